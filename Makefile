# Everything here works on a fresh clone with Python >= 3.11, a C/C++ compiler, npm and make.
# PYTHON=python3.12 chooses another interpreter, PORT=9000 another port, TORCH="torch==2.13.0 --index-url …" another torch.

PYTHON ?= python3
PORT ?= 8000
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TORCH_THERE := $(VENV)/.torch-stamp
RUNTIME := $(VENV)/.runtime-stamp
DEV := $(VENV)/.dev-stamp
# Programs that only tests call, as Debian package=command. Installed when absent; `make serve` needs none of them.
APT_TEST_PACKAGES ?= systemd=systemd-analyze prometheus=promtool chromium=chromium openssl=openssl curl=curl
APT := $(VENV)/.apt-stamp
DEPLOY_TOOLS := $(VENV)/.deploy-stamp
BENCH := $(VENV)/.bench-stamp
NODE := node_modules/.package-lock.json
# Environments of clients that only slow tests start, each by tests/clients/requirements-NAME.txt.
CLIENTS := sdks instructor evaluation evalscope
CLIENT_STAMPS := $(CLIENTS:%=$(VENV)/.clients-%-stamp)
NOT_HERE := not cuda and not npu
# Two files at a time: most tests wait for processes that they started. JOBS=0 runs one after another.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help serve test test-slow check check-deploy bench protos format clean

help:
	@echo "make serve      start the whole mesh with the demo model on port $(PORT)"
	@echo "make test       run the tests"
	@echo "make test-slow  run the long tests too"
	@echo "make check      ruff, mypy, import contracts, buf lint, freshness of generated code"
	@echo "make check-deploy  what the heavy validators say of deploy/ (part of test-slow)"
	@echo "make bench      run the benchmarks and write benchmarks/results/"
	@echo "make protos     regenerate protos/gen"

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pdmesh needs Python 3.11 or later")'
	$(PYTHON) -m venv $(VENV)

$(TORCH_THERE): | $(VENV)/bin/python
	$(PIP) $(TORCH)
	@touch $@

$(RUNTIME): $(TORCH_THERE) pyproject.toml constraints.txt
	$(PIP) --editable . --constraint constraints.txt
	@touch $@

# Holds the runtime too: a fresh clone that goes straight to the tests installs once.
$(DEV): $(TORCH_THERE) pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]' --constraint constraints.txt
	@touch $(RUNTIME) $@

$(BENCH): $(DEV)
	$(PIP) --editable '.[bench]' --constraint constraints.txt
	@touch $@

$(NODE): package.json package-lock.json
	npm ci --silent
	@touch $@

# Heavy, and with dependencies that clash with others: an environment of its own.
$(DEPLOY_TOOLS): deploy/requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m venv $(VENV)/deploy
	$(VENV)/deploy/bin/python -m pip install --quiet --disable-pip-version-check --requirement deploy/requirements.txt
	@touch $@

$(CLIENT_STAMPS): $(VENV)/.clients-%-stamp: tests/clients/requirements-%.txt | $(VENV)/bin/python
	$(BIN)/python -m venv $(VENV)/clients/$*
	! grep -q '^torch==' $< || $(VENV)/clients/$*/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VENV)/clients/$*/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

$(APT): .ci/debian-packages | $(VENV)/bin/python
	.ci/debian-packages $(APT_TEST_PACKAGES)
	@touch $@

serve: $(RUNTIME)
	$(BIN)/pdmesh model fetch demo
	exec $(BIN)/pdmesh serve --model demo --port $(PORT)

test: $(DEV) $(APT) $(NODE)
	$(BIN)/pdmesh model fetch demo
	$(PYTEST) -m "not slow and $(NOT_HERE)"

test-slow: $(DEV) $(APT) $(NODE) $(CLIENT_STAMPS) check-deploy
	$(BIN)/pdmesh model fetch demo
	$(PYTEST) -m "$(NOT_HERE)"

check: $(DEV) $(NODE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	npx --no-install buf lint
	$(BIN)/python protos/generate.py --check

check-deploy: $(DEV) $(DEPLOY_TOOLS)
	deploy/check $(CURDIR)/$(VENV)/deploy

bench: $(BENCH)
	$(BIN)/pdmesh model fetch demo
	$(BIN)/python benchmarks/run.py

protos: $(DEV)
	$(BIN)/python protos/generate.py

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) node_modules build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
