# Each target makes the virtual environment it needs. PYTHON=python3.12 picks the interpreter, VENV=path the place.
PYTHON ?= python3
VENV ?= .venv
SGLANG_VENV ?= .venv-sglang

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
BENCHMARKS ?= $(sort $(filter-out benchmarks/token_log_probs%.py,$(wildcard benchmarks/*.py)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help quickstart test check bench bench-kernels test-models test-sglang clean

help:
	@echo "make quickstart   train a tiny model to use a calculator, on this machine's CPU (ARGS='--set run.steps=20')"
	@echo "make test         run the tests (PYTEST_ARGS='tests/tooljax -k config')"
	@echo "make check        lint, formatting and types"
	@echo "make bench        run the benchmarks (BENCHMARKS=benchmarks/one.py)"
	@echo "make bench-kernels  check and time the kernels on an NVIDIA GPU (ARGS='--sections ceiling,table')"
	@echo "make test-models  fetch a small real model and tokenizer for the tests that skip without them"
	@echo "make test-sglang  run the tests of the SGLang engine on a real SGLang, on this machine's CPU (Python 3.11, 4 GB)"
	@echo "make clean        remove the virtual environment, caches and build outputs; runs/ stays"

quickstart: $(VENV)/.installed
	@$(BIN)/python -m tooljax.quickstart --config configs/quickstart.gin $(ARGS)

test: $(VENV)/.installed-test
	@$(BIN)/python -m pytest -rs $(PYTEST_ARGS)

check: $(VENV)/.installed-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/.installed
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python $$script; done

bench-kernels: $(VENV)/.installed
	@$(BIN)/python benchmarks/token_log_probs.py $(ARGS)

test-models: $(VENV)/.installed-test
	@tests/tools/make_test_models.sh build/test-models $(BIN)/python

test-sglang: $(SGLANG_VENV)/.installed
	@SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=tests/sglang/cpu_shim $(SGLANG_VENV)/bin/python -m pytest -rs tests/sglang $(PYTEST_ARGS)

# A folder is removed only if it is a virtual environment.
clean:
	@for venv in $(VENV) $(SGLANG_VENV); do [ ! -f $$venv/pyvenv.cfg ] || rm -rf $$venv; done
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find tooljax rollout_sidecar pallas_kernels tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	    "tooljax needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + \
	    "; name another one: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# Made anew when the dependencies change.
$(VENV)/.installed: pyproject.toml | $(VENV)/.made
	@echo "installing tooljax into $(VENV) (once)"
	@$(PIP) install -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/.made
	@echo "installing tooljax and the test tools into $(VENV) (once)"
	@$(PIP) install -e '.[test]'
	@touch $@ $(VENV)/.installed

# SGLang without its dependencies, which are made for GPUs: tests/sglang/requirements.txt has what its CPU engine needs.
$(SGLANG_VENV)/.installed: tests/sglang/requirements.txt
	@$(PYTHON) -c 'import sys; sys.version_info[:2] == (3, 11) or sys.exit( \
	    "make test-sglang needs Python 3.11, and $(PYTHON) is " + sys.version.split()[0] + ": torch 2.13.0 comes as" \
	    " a CPU build for 3.11 only, and as 5 GB of CUDA for others; name one: make test-sglang PYTHON=python3.11")'
	@echo "installing SGLang and torch for CPUs into $(SGLANG_VENV) (once; 3.7 GB)"
	@$(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_VENV)/bin/python -m pip --quiet --disable-pip-version-check install --no-deps sglang==0.5.23
	@$(SGLANG_VENV)/bin/python -m pip --quiet --disable-pip-version-check install -r tests/sglang/requirements.txt
	@touch $@
