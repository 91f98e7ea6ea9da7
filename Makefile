# make demo   train a small GPT twice, with torch's ops and with tritonops, and show what served each call
# make test   every test that this machine can run
#
# Both make their own environment in $(VENV) first. ENV=0 uses $(PYTHON) as it is and installs nothing.
PYTHON ?= python3
ENV ?= 1
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() or 1))')
VENV ?= .venv-make

ifeq ($(ENV),0)
PY := $(PYTHON)
READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
READY := $(VENV)/ready
endif

PIP = $(VENV)/bin/python -m pip install --disable-pip-version-check -q
PYTEST = $(PY) -m pytest -q
# Plugins that a machine without network may lack.
PARALLEL = $(shell $(PY) -c 'from importlib.util import find_spec as has; \
	print("-n $(JOBS)" * bool(has("xdist")), "--timeout=600" * bool(has("pytest_timeout")))')

.PHONY: demo test env clean

demo: $(READY)
	$(PY) examples/gpt_demo.py

test: $(READY)
	$(PYTEST) $(PARALLEL) -m gpu tests
	$(PYTEST) $(PARALLEL) -m "not gpu and not interpret" tests
	TRITON_INTERPRET=1 $(PYTEST) $(PARALLEL) -m interpret tests

env: $(READY)

# Without an NVIDIA GPU: one release of torch whose CPU build CI tests, and a Triton for the interpreter and the static
# compiler where torch brings none (numpy 2.4 breaks the interpreter of Triton 3.6: triton-lang/triton#9171).
# With one: the newest torch, which brings its own Triton.
$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else \
		"Python >= 3.11 is needed; name one with: make PYTHON=python3.12. $(PYTHON) is " + sys.version.split()[0])'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@if nvidia-smi -L >/dev/null 2>&1 || test -e /dev/nvidia0; then \
		echo "NVIDIA GPU found: installing torch with CUDA"; \
		$(PIP) 'torch >= 2.8'; \
	else \
		echo "no NVIDIA GPU found: installing torch for the CPU"; \
		$(PIP) torch==2.13.0 'numpy < 2.4' && \
		{ $(VENV)/bin/python -c 'import triton' 2>/dev/null || $(PIP) 'triton == 3.6.0 ; sys_platform == "linux"'; }; \
	fi
	$(PIP) -e '.[test,bench]'
	@touch $@

clean:
	rm -rf $(VENV) dist demo_out .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
