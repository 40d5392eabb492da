# `make demo` and `make test` are each complete on a fresh machine: Python 3.10 or newer and a C++ compiler are all they need.
# TORCH=x.y.z takes another torch, PYTHON another interpreter, VENV another folder for the environment.

TORCH ?= 2.13.0
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(TORCH)
# Two processes: each test may compile, which is heavy, and what the tests are about needs threads, not processes.
WORKERS ?= 2

export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint types hazards matrix clean

# torch first and pinned: an open requirement, met by a later step, would pull the newest CUDA build of several gigabytes.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==$(TORCH) numpy
	$(BIN)/python -m pip install --quiet --editable '.[dev]' torch==$(TORCH)
	rm -f $(VENV)/.ready-*
	touch $@

demo: $(READY)
	$(BIN)/python repro/demo.py

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

test: $(READY) lint types
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

hazards: $(READY)
	$(BIN)/python -m compile_guard.hazards --table

# Each torch in an environment of its own: tests, doctor and a short stress; written to docs/matrix.md.
matrix:
	$(PYTHON) .ci/matrix

clean:
	rm -rf $(VENV) .matrix .pytest_cache .mypy_cache .ruff_cache .hypothesis
