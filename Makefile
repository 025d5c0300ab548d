# make env    .venv with the `paceline` command, unmodified vLLM 0.31.0 (CPU build) and the tests' tools
# make demo   trains, validates, serves, measures and scores a small draft; writes runs/demo/report.html
# make test   every test;  make check  format, lint, types, contracts, unit tests;  make bench  timings
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: env demo test check bench test-gpu format
.DEFAULT_GOAL := env

$(VENV)/.ready: pyproject.toml scripts/constraints.txt scripts/install_cpu.sh scripts/repair_cpu_install.py
	PYTHON=$(PYTHON) scripts/install_cpu.sh $(VENV)
	touch $@

env: $(VENV)/.ready

demo: env
	$(BIN)/paceline demo --out runs/demo

test: env
	$(BIN)/python -m pytest -q -m "not gpu"

check: env
	$(BIN)/ruff format --check src tests scripts bench recipes
	$(BIN)/ruff check src tests scripts bench recipes
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/unit tests/contract

bench: env
	$(BIN)/python bench/run.py

test-gpu:
	python3 -m pytest -q -m gpu tests/gpu

format: env
	$(BIN)/ruff format src tests scripts bench recipes
	$(BIN)/ruff check --fix src tests scripts bench recipes
