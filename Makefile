# `make` alone lists the targets. Flags for the program behind a target go into ARGS:
#   make serve ARGS="--port 9000"      make test ARGS="tests/engine -k prefix"
# TORCH=cpu|cuda|default and PYTHON=... choose what the environment is made of: see deploy/make_env.sh.

VENV ?= .venv
ARGS ?=
# A python with torch for CUDA and transformers; the environment here may hold the CPU build.
GPU_PYTHON ?= python3
BIN := $(VENV)/bin
export VENV

.DEFAULT_GOAL := help
.PHONY: help serve test test-all lint format bench gpu-train gpu-check test-tools env env-dev env-all lock clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

serve: env ## Serve the default model on http://127.0.0.1:8000 (flags in ARGS)
	@exec $(BIN)/dspark serve $(ARGS)

test: env-dev ## Run all tests but the long ones (pytest's flags in ARGS)
	@exec env OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --dist loadfile --no-loadscope-reorder $(ARGS)

test-all: env-all ## Run the long tests too, those that take minutes each
	@exec env OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto --dist loadfile --no-loadscope-reorder -m "" $(ARGS)

lint: env-dev ## Check style and types: ruff, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env-dev ## Mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-train: ## Train a drafter on one GPU in ten minutes (flags in ARGS; see deploy/gpu/train.py)
	@exec env PYTHONPATH=. $(GPU_PYTHON) -m deploy.gpu.train run $(ARGS)

gpu-check: ## Check on one GPU what no CPU can tell, in ten minutes (flags in ARGS; see deploy/gpu/check.py)
	@exec env PYTHONPATH=. $(GPU_PYTHON) -m deploy.gpu.check run $(ARGS)

bench: env ## Measure the engine without HTTP (flags in ARGS)
	@exec $(BIN)/dspark bench $(ARGS)

test-tools: ## Install nginx, Prometheus and Chromium for the tests of deployment (Debian, root)
	@deploy/test_tools.sh

env: ## Make the environment for serving
	@deploy/make_env.sh runtime

env-dev: ## Make the environment for serving, testing and linting
	@deploy/make_env.sh dev

env-all: ## Make the environment for the tests of deployment too
	@deploy/make_env.sh all

lock: ## Write requirements/lock.txt anew after a change to pyproject.toml
	$(BIN)/pip install -q -e '.[test,dev]'
	@sed '/^[^#]/,$$d' requirements/lock.txt >requirements/lock.new
	@$(BIN)/pip freeze --all --exclude-editable --exclude torch --exclude pip | \
		grep -v -e '^nvidia-' -e '^cuda-' -e '^triton=' >>requirements/lock.new
	@mv requirements/lock.new requirements/lock.txt

clean: ## Remove caches and build products
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean ## Remove the environment as well
	rm -rf $(VENV)
