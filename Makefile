# make demo | test | golden | lint | compile-check. PYTHON=... picks the interpreter, VENV=... the environment.
SHELL := /bin/bash
PYTHON ?= $(shell tools/find-python)
python := $(PYTHON)
$(if $(python),,$(error no Python found))
version := $(shell $(python) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= .venv
CUDA_VENV ?= .venv-cuda
lock := requirements/lock-$(if $(filter 3.11,$(version)),3.11,3.12).txt
bin := $(VENV)/bin

.PHONY: demo test golden lint compile-check venv
.DEFAULT_GOAL := demo

demo: venv
	$(bin)/python -m serving.demo --checkpoint tests/goldens/tiny_ckpt

# tests/conftest.py says what runs in one worker, and in which order.
pytest := pytest -n 2 --dist loadfile --no-loadscope-reorder

test: venv
	$(bin)/python -m $(pytest) --durations 15

golden: venv
	$(bin)/python -m $(pytest) -m "golden and not slow"

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
