# Two commands do everything on a fresh machine: `make quickstart` and `make test`. Both make .venv and install what they need.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := pyproject.toml constraints.txt hatch_build.py $(wildcard src/bothways/kernels/csrc/*)

.PHONY: quickstart test check fuzz format clean

quickstart: .venv/.quickstart
	$(BIN)/bothways quickstart

test: .venv/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto

check: test

# Damage files and processes at random, a minute for each target; a failure becomes a test.
fuzz: .venv/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m fuzz --seconds 60

format: .venv/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/.quickstart: $(INSTALLED) | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	touch $@

.venv/.test: $(INSTALLED) | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,test]'
	touch $@
