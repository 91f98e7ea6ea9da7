"""Learning a GPU's dispatch tables from measurements: ``python -m tritonops.calibrate``. Nothing imports this."""
