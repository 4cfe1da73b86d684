# Everything a person or CI runs. Each target sets the environment up first; that is quick when nothing changed.
#   VENV=FOLDER    where the environment is (.venv)         PYTHON=...  the Python to build it from (python3)
#   ARGS="..."     more arguments, for the tests or for `stretto train`
VENV ?= .venv
PYTHON ?= python3
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train test check matrix bench chaos

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

setup: ## the environment: pinned packages and stretto itself, in .venv
	@PYTHON="$(PYTHON)" sh scripts/setup.sh "$(VENV)"

train: setup ## train the example GPT with two workers
	@"$(VENV)/bin/stretto" train examples/gpt --workers 2 $(ARGS)

test: setup ## every test but the long grids
	@sh scripts/test.sh "$(VENV)" $(ARGS)

check: setup ## lint and strict types
	@sh scripts/check.sh "$(VENV)"

matrix: setup ## the whole grid of models, plans and optimizers
	@sh scripts/test.sh "$(VENV)" -m matrix $(ARGS)

chaos: setup ## many seeded kills, stops and other long trials
	@sh scripts/test.sh "$(VENV)" -m chaos $(ARGS)

bench: setup ## every benchmark, one after another
	@set -e; for script in benchmarks/*/run.py; do \
		[ -f "$$script" ] || { echo "bench: there is no benchmarks/*/run.py" >&2; exit 1; }; \
		echo "bench: $$script"; "$(VENV)/bin/python" "$$script"; \
	done
