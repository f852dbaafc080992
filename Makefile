# Everything runs in an environment of its own (.venv), made on first use and again when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
OLDEST := .venv-oldest/bin
# one thread per test process: two processes use two cores
TEST_ENV := OMP_NUM_THREADS=1 WANDB_SILENT=true

.PHONY: help demo test test-slow test-all test-oldest lint docs benchmark clean

help:            ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

demo: .venv/ready  ## ten clients learn handwritten digits: table, pictures, offline W&B runs (under a minute)
	$(BIN)/python examples/digits.py

test: .venv/ready lint  ## lint, types and the fast tests, warnings as errors (at most 5 minutes on two cores)
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-slow: .venv/ready  ## the slow tests: long fits, transports, resumption beyond one case of each method
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal -m slow

test-all: test test-slow  ## everything

test-oldest: .venv-oldest/ready  ## all tests with the lowest versions that pyproject.toml allows (.venv-oldest)
	$(TEST_ENV) $(OLDEST)/python -m pytest -n 2 --dist worksteal

lint: .venv/ready  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/pyright

docs: .venv/ready  ## the documentation as a site, in outputs/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

benchmark: .venv/ready  ## times of rounds, engines, layers and fusion beside other frameworks', as Markdown tables (20 minutes)
	$(BIN)/python -m benchmarks.speed.run
	$(BIN)/python -m benchmarks.engine.run
	$(BIN)/python -m benchmarks.layers.run
	$(BIN)/python -m benchmarks.fusion.run

# $(call install,FOLDER,OPTIONS): by uv, which needs a tenth of pip's time and takes the lowest versions. It does not read
# pip's settings: it is told pip's index, if one is set. Where it fails, pip takes its place.
define install
	$(1)/bin/python -m pip install --quiet --upgrade "pip>=25.1" uv
	UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$$($(1)/bin/pip config get global.index-url 2>/dev/null)}}" \
	$(1)/bin/uv pip install --quiet --python $(1)/bin/python --editable . $(2) || \
	$(1)/bin/python -m pip install --quiet --editable . $(2)
	touch $(1)/ready
endef

.venv/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(call install,.venv,--group dev)

.venv-oldest/ready: pyproject.toml
	$(PYTHON) -m venv --clear .venv-oldest
	$(call install,.venv-oldest,--resolution lowest-direct --group test --group docs)

clean:           ## remove the environment and everything generated
	rm -rf .venv .venv-oldest outputs dist build .pytest_cache .ruff_cache .hypothesis
