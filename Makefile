# Everything here works on a fresh clone with Python >= 3.11, a C/C++ compiler, npm and make.
# PYTHON=python3.12 chooses another interpreter, PORT=9000 another port, TORCH="torch==2.13.0 --index-url …" another torch.

PYTHON ?= python3
PORT ?= 8000
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
RUNTIME := $(VENV)/.runtime-stamp
DEV := $(VENV)/.dev-stamp
BENCH := $(VENV)/.bench-stamp
BUF := node_modules/.package-lock.json
NOT_HERE := not cuda and not npu

.DEFAULT_GOAL := help
.PHONY: help serve demo test test-slow check bench protos format clean

help:
	@echo "make serve      start the whole mesh with the demo model on port $(PORT)"
	@echo "make test       run the tests"
	@echo "make test-slow  run the long tests too"
	@echo "make check      ruff, mypy, import contracts, buf lint, freshness of generated code"
	@echo "make bench      run the benchmarks and write benchmarks/results/"
	@echo "make protos     regenerate protos/gen"

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdmesh needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) $(TORCH)
	$(PIP) --editable . --constraint constraints.txt
	@touch $@

$(DEV): $(RUNTIME)
	$(PIP) --editable '.[dev]' --constraint constraints.txt
	@touch $@

$(BENCH): $(DEV)
	$(PIP) --editable '.[bench]' --constraint constraints.txt
	@touch $@

$(BUF): package.json package-lock.json
	npm ci --silent
	@touch $@

demo: $(RUNTIME)
	$(BIN)/pdmesh model fetch demo

serve: demo
	exec $(BIN)/pdmesh serve --model demo --port $(PORT)

test: $(DEV) demo
	$(BIN)/python -m pytest -q -m "not slow and $(NOT_HERE)"

test-slow: $(DEV) demo
	$(BIN)/python -m pytest -q -m "$(NOT_HERE)"

check: $(DEV) $(BUF)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	npx --no-install buf lint
	$(BIN)/python protos/generate.py --check

bench: $(BENCH) demo
	$(BIN)/python benchmarks/run.py

protos: $(DEV)
	$(BIN)/python protos/generate.py

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) node_modules build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
