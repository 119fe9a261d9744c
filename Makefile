# make lab     a fresh clone becomes a running JupyterLab at lesson 00
# make test    the whole suite
# Everything lives in .venv and in the user cache; each step is done once and resumes when interrupted.

PYTHON ?= python3
PORT   ?= 8888
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
PYTEST_ARGS ?=

export PATH := $(abspath $(BIN)):$(PATH)
export JUPYTER_PLATFORM_DIRS := 1

.PHONY: help setup lab test lint clients course exercises triton-matrix clean
.DELETE_ON_ERROR:

help:
	@echo "make lab [PORT=8888]   set up, then open JupyterLab at the first lesson"
	@echo "make test              set up, then run every test (lint, units, notebooks, grader, records)"
	@echo "make clients           make .venv-clients: clients of other projects that the tests talk through"
	@echo "make setup             make .venv, install, fetch the embedded model; done once"
	@echo "make lint              ruff and mypy"
	@echo "make course            execute every lesson from a fresh kernel"
	@echo "make exercises         generate exercises/ from solutions/"
	@echo "make triton-matrix     the kernel tests on every supported Triton version (fetches each)"
	@echo "make clean             remove .venv and build leftovers (the model in the user cache stays)"

# The stamps are written only when a step has finished, so whatever was interrupted is done again.
$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "minillm needs Python 3.11 or newer; try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.created
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

setup: $(VENV)/.installed
	@$(BIN)/minillm fetch

lab: setup
	@$(BIN)/python -m minillm.course.lab --port $(PORT)

# Their versions do not fit beside the course's, so they have an environment of their own.
.venv-clients/.installed: constraints-clients.txt | $(VENV)/.created
	$(PYTHON) -m venv --clear .venv-clients
	.venv-clients/bin/python -m pip --disable-pip-version-check install -q -c constraints-clients.txt litellm langchain-openai
	@touch $@

clients: .venv-clients/.installed

test: setup lint clients
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

course: setup
	$(BIN)/python -m minillm.course.execute

exercises: setup
	$(BIN)/python -m minillm.course.exercises

triton-matrix: setup
	$(BIN)/python tests/triton_matrix.py

clean:
	rm -rf $(VENV) .venv-clients build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
