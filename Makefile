# Every task of the project. CI calls the same targets.

PYTHON ?= python3
# The interpreter of `make test-gpu`: any that has torch with CUDA. Nothing is installed into it.
PY ?= python3
PYTEST_WORKERS ?= 2
# GPU tests in parallel: eight on one GPU, five on each of two.
GPU_WORKERS ?= $$((gpus > 1 ? 10 : 8))
# What `make test` and `make test-all` run: folders or files.
TESTS ?= tests
# With NEWEST=1 the tests of vLLM and SGLang install their newest releases in place of the pinned ones.
NEWEST ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
# The oldest and the newest vLLM that the plugin was tested with, with their own versions of shared dependencies.
ENGINES_VENV := .venv-engines
ENGINES_STAMP := $(ENGINES_VENV)/.setup-done
VLLM_NEXT := 0.33.0
ENGINES_NEXT_VENV := .venv-engines-$(VLLM_NEXT)
ENGINES_NEXT_STAMP := $(ENGINES_NEXT_VENV)/.setup-done
# SGLang with its own.
SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.setup-done
# LMDeploy with its own.
LMDEPLOY_VENV := .venv-lmdeploy
LMDEPLOY_STAMP := $(LMDEPLOY_VENV)/.setup-done
# SMG and TokenSpeed with theirs.
TOKENSPEED_VENV := .venv-tokenspeed
TOKENSPEED_STAMP := $(TOKENSPEED_VENV)/.setup-done
CHECKPOINT := build/checkpoints/qwen3_vl-small

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-engines test test-all test-long test-engines test-engines-all test-engines-next test-sglang test-sglang-all setup-lmdeploy test-lmdeploy test-tokenspeed test-fleet test-gpu lint format docs docs-settings proto proto-check engine-pins bench bench-transport bench-serve bench-fleet demo serve fleet clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with torch and everything the other targets need

# Runs again when the dependencies change. Each step keeps what is already right.
$(STAMP): pyproject.toml deploy/install.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; ok = (3, 11) <= v < (3, 14); \
	    sys.exit(0 if ok else f"{sys.executable} is Python {v[0]}.{v[1]}, needs 3.11 to 3.13: make setup PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python deploy/install.py
	@touch $@

# One compute thread for each worker: two workers with two threads each only fight over two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile

test: $(STAMP) ## Run the tests that need no GPU, without the long ones (five minutes)
	$(PYTEST) -m "not gpu and not extended and not fleet" --ignore=tests/gpu $(TESTS)

test-all: $(STAMP) ## Run every test that needs no GPU: also storms, soaks, fuzzing and parity sweeps
	$(PYTEST) -m "not gpu and not fleet" --ignore=tests/gpu $(TESTS)

test-long: $(STAMP) ## Run only the long ones of these
	$(PYTEST) -m "extended and not gpu and not fleet" --ignore=tests/gpu $(TESTS)

$(ENGINES_STAMP): pyproject.toml deploy/install_engines.py deploy/install.py
	@test -x $(ENGINES_VENV)/bin/python || $(PYTHON) -m venv $(ENGINES_VENV)
	$(ENGINES_VENV)/bin/python deploy/install_engines.py $(if $(NEWEST),--newest)
	@touch $@

$(ENGINES_NEXT_STAMP): pyproject.toml deploy/install_engines.py deploy/install.py
	@test -x $(ENGINES_NEXT_VENV)/bin/python || $(PYTHON) -m venv $(ENGINES_NEXT_VENV)
	$(ENGINES_NEXT_VENV)/bin/python deploy/install_engines.py $(VLLM_NEXT)
	@touch $@

# Two engines on two cores keep each other waiting: what came too late is tried once more, what came wrong is not.
LATE := -rfER --reruns 1 --only-rerun 'Timeout|did not come within'
# Each worker has servers of its own. A start takes one core for a minute, and two gigabytes.
ENGINES_PYTEST := -m pytest -n 2 --dist loadfile --durations=5 $(LATE)

test-engines: $(ENGINES_STAMP) ## Run vLLM on the CPU with image rows of Qwen3-VL from the service (eight minutes)
	OMP_NUM_THREADS=1 $(ENGINES_VENV)/bin/python $(ENGINES_PYTEST) -m "not extended" tests/engines

test-engines-all: $(ENGINES_STAMP) ## The same with every family, data parallelism and the bench
	OMP_NUM_THREADS=1 $(ENGINES_VENV)/bin/python $(ENGINES_PYTEST) tests/engines

# What a new version of vLLM may change: tokens, failures, what the plugin uses, media, what runs beside it.
test-engines-next: $(ENGINES_NEXT_STAMP) ## Run the most telling of these with the newest vLLM that was tested
	OMP_NUM_THREADS=1 $(ENGINES_NEXT_VENV)/bin/python $(ENGINES_PYTEST) -m "not extended" \
	    tests/engines/test_vllm_tokens.py tests/engines/test_vllm_failures.py tests/engines/test_vllm_plugin.py \
	    tests/engines/test_vllm_beside.py tests/engines/test_vllm_epd.py tests/engines/test_vllm_media.py

$(SGLANG_STAMP): pyproject.toml deploy/install_sglang.py deploy/install_engines.py deploy/install.py
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python deploy/install_sglang.py $(if $(NEWEST),--newest)
	@touch $@

# An SGLang server of each worker: a start takes one core and two gigabytes.
SGLANG_PYTEST := OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m pytest -n 2 --dist loadfile --durations=5 $(LATE)

test-sglang: $(SGLANG_STAMP) ## Run SGLang on the CPU with image rows from the service (four minutes)
	$(SGLANG_PYTEST) -m "not extended" tests/sglang

test-sglang-all: $(SGLANG_STAMP) ## The same with Kimi-K2.5, and rows received by SGLang's scheduler
	$(SGLANG_PYTEST) tests/sglang

$(TOKENSPEED_STAMP): pyproject.toml deploy/install_tokenspeed.py deploy/install_engines.py deploy/install.py
	@test -x $(TOKENSPEED_VENV)/bin/python || $(PYTHON) -m venv $(TOKENSPEED_VENV)
	$(TOKENSPEED_VENV)/bin/python deploy/install_tokenspeed.py
	@touch $@

test-tokenspeed: $(TOKENSPEED_STAMP) ## Run SMG's gateway and TokenSpeed's receiver on the CPU with rows from the service
	OMP_NUM_THREADS=1 $(TOKENSPEED_VENV)/bin/python -m pytest --durations=5 $(LATE) tests/tokenspeed

$(LMDEPLOY_STAMP): pyproject.toml deploy/install_lmdeploy.py deploy/install_engines.py deploy/install.py
	@test -x $(LMDEPLOY_VENV)/bin/python || $(PYTHON) -m venv $(LMDEPLOY_VENV)
	$(LMDEPLOY_VENV)/bin/python deploy/install_lmdeploy.py
	@touch $@

setup-lmdeploy: $(LMDEPLOY_STAMP) ## Create the environment of LMDeploy's tests

test-lmdeploy: $(LMDEPLOY_STAMP) ## Run LMDeploy on the CPU with image rows from the service (two minutes)
	OMP_NUM_THREADS=1 $(LMDEPLOY_VENV)/bin/python -m pytest -n 2 --dist loadfile --durations=5 $(LATE) -m "not extended" tests/lmdeploy

setup-engines: $(ENGINES_STAMP) $(ENGINES_NEXT_STAMP) $(SGLANG_STAMP) $(LMDEPLOY_STAMP) $(TOKENSPEED_STAMP) ## Create the environments of the engines' tests

# A fleet takes both cores: one file at a time.
test-fleet: $(STAMP) ## Run encoders behind a real Envoy through kills, scaling, stalls and restarts (four minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "fleet and not extended" --durations=5 tests/fleet

GPU_PYTEST := $(PY) -m pytest --device cuda:0 --dist worksteal --tb=short --durations=40 --durations-min=3

# Both selections always run; the target fails when either does. Workers take turns on which GPU is their first.
# With a GPU as --device only tests that use a device are selected.
test-gpu: ## Run the GPU tests, and kernels, parity and integration on cuda:0 (PY=... has torch with CUDA)
	@status=0; export PYTHONPATH=.:proto:$$PYTHONPATH; \
	gpus=$$($(PY) -c 'import torch; print(max(1, torch.cuda.device_count()))') || exit; export TEST_NUM_GPUS=$$gpus; \
	$(GPU_PYTEST) -m whole_device -n 1 tests/gpu || status=$$?; \
	OMP_NUM_THREADS=$$((gpus > 1 ? 3 : 4)) $(GPU_PYTEST) -m "not whole_device and not without_device" -n $(GPU_WORKERS) \
	    tests/gpu tests/parity tests/integration tests/unit/kernels tests/unit/towers || status=$$?; \
	exit $$status

lint: $(STAMP) proto-check ## Ruff, mypy, budgets, import direction, generated code and documents
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy
	$(BIN)/python tests/budgets.py
	PYTHONPATH=.:proto $(BIN)/python docs/settings.py --check
	$(BIN)/python tests/documents.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	PYTHONPATH=.:proto $(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/pre-commit validate-config

format: $(STAMP) ## Reformat the code, and mend what ruff can mend
	$(BIN)/python -m ruff check --fix
	$(BIN)/python -m ruff format

docs: $(STAMP) ## Build the documents as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-settings: $(STAMP) ## Write docs/settings.md from the settings
	PYTHONPATH=.:proto $(BIN)/python docs/settings.py

proto: ## Regenerate the code of encoder.proto
	PYTHON=$(PYTHON) proto/generate.sh

proto-check: ## Fail when the committed generated code is not what encoder.proto gives
	PYTHON=$(PYTHON) proto/check.sh

engine-pins: $(STAMP) ## Record what environments of the newest vLLM, SGLang and LMDeploy have (metadata only)
	$(BIN)/python deploy/engine_pins.py

# The recorded measurements on a GPU; without one the smallest tower, as a check that the program runs.
bench: $(STAMP) ## Measure the towers
	$(BIN)/python -m bench.tower $$([ -e /dev/nvidiactl ] || echo --quick --size tiny --device cpu)

bench-transport: $(STAMP) ## Measure the delivery of rows over every transport
	$(BIN)/python -m bench.transport $$([ -e /dev/nvidiactl ] || echo --quick --device cpu)

bench-serve: $(STAMP) ## Measure the service under load, beside its tower
	$(BIN)/python -m bench.serve $$([ -e /dev/nvidiactl ] || echo --quick --size tiny --device cpu)

bench-fleet: $(STAMP) ## Measure encoders behind Envoy through kills, scaling, stalls and restarts, on a CPU (an hour)
	$(BIN)/python -m bench.fleet

demo: $(STAMP) ## Start the service, send photographs, run a language model on the rows, compare
	$(BIN)/python -m bench.demo

serve: $(STAMP) $(CHECKPOINT)/config.json ## Serve a small random-weight checkpoint on the CPU
	$(BIN)/vision-encoder serve --model $(CHECKPOINT) --device cpu

fleet: $(STAMP) $(CHECKPOINT)/config.json ## Run four encoders on the CPU behind Envoy, until Ctrl-C
	PYTHONPATH=.:proto $(BIN)/python -m bench.harness.fleet $(CHECKPOINT)

# Made beside its final place and moved, so that an interrupted run leaves no half checkpoint.
$(CHECKPOINT)/config.json: | $(STAMP)
	rm -rf $(CHECKPOINT) $(CHECKPOINT).partial
	mkdir -p $(dir $(CHECKPOINT))
	$(BIN)/vision-encoder make-checkpoint --family qwen3_vl --size small --seed 0 $(CHECKPOINT).partial
	mv $(CHECKPOINT).partial $(CHECKPOINT)

clean: ## Remove what the targets made, the environments included
	rm -rf build dist demo-output $(VENV) $(ENGINES_VENV) $(ENGINES_NEXT_VENV) $(SGLANG_VENV) $(LMDEPLOY_VENV) $(TOKENSPEED_VENV) .venv-proto .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
