# Everything runs in an environment of its own (.venv), made on first use and again when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
# one thread per test process: two processes use two cores
TEST_ENV := OMP_NUM_THREADS=1 WANDB_SILENT=true

.PHONY: help demo test lint docs benchmark clean

help:            ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

demo: .venv/ready  ## federate the handwritten digits: table, pictures, offline W&B runs (under a minute)
	$(BIN)/python examples/digits.py

test: .venv/ready lint  ## lint, types and all tests, warnings as errors
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal

lint: .venv/ready  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/pyright

docs: .venv/ready  ## the documentation as a site, in outputs/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

benchmark: .venv/ready  ## speed against the field, engines, layers and fusion, as Markdown tables (20 minutes)
	$(BIN)/python benchmarks/speed/run.py
	$(BIN)/python benchmarks/engine/run.py
	$(BIN)/python benchmarks/layers/run.py
	$(BIN)/python benchmarks/fusion/run.py

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

clean:           ## remove the environment and everything generated
	rm -rf .venv outputs dist build .pytest_cache .ruff_cache .hypothesis
