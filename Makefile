# make quickstart   corpus, tokenizer, three training stages, a picture: everything under quickstart/
# make test         the tests (make test-all: every combination as well)
# make check        format, lint, types, tests
#
# PYTHON=python3.12 make …   takes another interpreter to make .venv with.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet --quiet

# One thread per process: the processes fill the cores. The large thresholds keep glibc from giving memory back
# to the system between tensors, which costs a page fault per 4 KiB each time.
export OMP_NUM_THREADS ?= 1
export MALLOC_MMAP_THRESHOLD_ ?= 1073741824
export MALLOC_TRIM_THRESHOLD_ ?= 1073741824
export MALLOC_TOP_PAD_ ?= 67108864

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all check lint format format-check types req clean

help:
	@sed -n 's/^# \{0,1\}//; 1,5p' Makefile

# --- the environment: each stamp is made again when a file it was made from changes --------------------------------
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "Python 3.11 or newer is needed and '$(PYTHON)' is not: install python3.11, or say PYTHON=/path/to/python make …"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "'$(PYTHON)' cannot make virtual environments; on Debian and Ubuntu: apt-get install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.plot: $(VENV)/.made requirements/core.txt requirements/plot.txt setup.py
	@echo "installing what requirements/plot.txt lists into $(VENV)"
	@$(PIP) install -r requirements/plot.txt
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.plot requirements/dev.txt
	@echo "installing what requirements/dev.txt lists into $(VENV)"
	@$(PIP) install -r requirements/dev.txt
	@touch $@

# --- what people type ----------------------------------------------------------------------------------------------
quickstart: $(VENV)/.plot
	@PATH="$(abspath $(BIN)):$$PATH" bash examples/tiny/quickstart.sh

test: $(VENV)/.dev
	$(BIN)/python -m pytest

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -m "" --timeout 3600

check: format-check lint types test

lint: $(VENV)/.dev
	$(BIN)/ruff check .

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only .

format-check: $(VENV)/.dev
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# requirements of tests/requirements.txt that no test cites
req:
	@$(PYTHON) tests/house/citations.py

clean:
	rm -rf quickstart build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
