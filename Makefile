# make demo | test | golden | notebooks | lint | compile-check. PYTHON=... picks the interpreter, VENV=... the environment.
SHELL := /bin/bash
PYTHON ?= $(shell tools/find-python)
python := $(PYTHON)
$(if $(python),,$(error no Python found))
version := $(shell $(python) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
lock := requirements/lock-$(if $(filter 3.11,$(version)),3.11,3.12).txt
bin := $(VENV)/bin

.PHONY: demo test golden notebooks store-notebooks lint compile-check venv
.DEFAULT_GOAL := demo

demo: venv
	$(bin)/python -m serving.demo

# tests/conftest.py says what runs in one worker, and in which order.
pytest := pytest -n 2 --dist loadfile --no-loadscope-reorder

test: venv
	$(bin)/python -m $(pytest) --durations 15

golden: venv
	$(bin)/python -m $(pytest) -m "golden and not slow"

# Executes the notebooks as they are stored and changes nothing.
notebooks: venv
	$(run_notebooks)

# After a change of a script: its notebook anew, with what it prints and draws.
store-notebooks: venv
	$(bin)/jupytext --quiet --update --to ipynb notebooks/*.py
	$(run_notebooks) --overwrite

run_notebooks := JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.cache/jax \
	JAX_COMPILATION_CACHE_MAX_SIZE=1000000000 \
	$(bin)/python -m pytest -n 2 --maxschedchunk 1 --nbmake --nbmake-timeout 600 --durations 8 notebooks

lint: venv
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/pyright --pythonpath $(bin)/python

# Needs Python 3.12 or newer and about 4 GB for the CUDA build of JAX; no GPU, no driver.
compile-check:
	tools/make-venv "$(python)" $(CUDA_VENV) requirements/lock-cuda13.txt
	$(CUDA_VENV)/bin/python -m pytest -m h200 tests/h200

venv:
	@tools/make-venv "$(python)" $(VENV) $(lock)
