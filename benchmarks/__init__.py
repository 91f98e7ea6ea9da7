"""Benchmarks of tritonops and its peers: ``python -m benchmarks.run --help``."""
