# Every task of the project. CI calls the same targets.

PYTHON ?= python3
# The interpreter of `make test-gpu`: any that has torch with CUDA; nothing is installed into it.
PY ?= python3
PYTEST_WORKERS ?= 2
# Of the GPU tests, beside each other: eight on one GPU, five on each of two.
GPU_WORKERS ?= $$((gpus > 1 ? 10 : 8))

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
# vLLM beside its own versions of what the project needs too.
ENGINES_VENV := .venv-engines
ENGINES_STAMP := $(ENGINES_VENV)/.setup-done
CHECKPOINT := build/checkpoints/qwen3_vl-small

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup test test-engines test-gpu lint proto proto-check bench bench-transport bench-serve demo serve clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Create .venv with torch and everything the other targets need

# Runs again when the dependencies change. Each step keeps what is already right.
$(STAMP): pyproject.toml deploy/install_torch.py
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; ok = (3, 11) <= v < (3, 14); \
	    sys.exit(0 if ok else f"{sys.executable} is Python {v[0]}.{v[1]}, needs 3.11 to 3.13: make setup PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python deploy/install_torch.py --with-torchvision
	$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]'
	@touch $@

# One compute thread for each worker: two workers with two threads each only fight over two cores.
test: $(STAMP) ## Run every test that needs no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu" -n $(PYTEST_WORKERS) --dist loadfile

$(ENGINES_STAMP): pyproject.toml deploy/install_engines.py deploy/install_torch.py
	@test -x $(ENGINES_VENV)/bin/python || $(PYTHON) -m venv $(ENGINES_VENV)
	$(ENGINES_VENV)/bin/python deploy/install_engines.py
	@touch $@

# One vLLM server at a time: each takes two cores and two gigabytes while it starts.
test-engines: $(ENGINES_STAMP) ## Run vLLM on the CPU with image rows from the service
	OMP_NUM_THREADS=1 $(ENGINES_VENV)/bin/python -m pytest --durations=5 tests/engines

# What is the same with and without a GPU: doors, keys to them, other stores, pixels before any device, language
# models that are on the CPU, services whose device is the CPU or a stand-in.
NO_DEVICE := $(addprefix --ignore=tests/,parity/test_hf_engine.py parity/test_hf_engine_checkpoint.py parity/test_mrope.py \
    parity/test_mrope_properties.py parity/test_synthetic_reference.py parity/test_video_end_to_end.py \
    parity/test_video_pixels.py integration/test_admin_page.py integration/test_cli_access.py \
    integration/test_device_tier.py integration/test_door_metrics.py \
    integration/test_security.py integration/test_shared_tier.py integration/test_shared_tier_tls.py \
    integration/test_sight.py integration/test_url_items.py integration/test_video_items.py \
    integration/test_vllm_fetch.py)

# How both selections are spread and reported; what each test took is what tests/gpu/seconds.txt is made of.
GPU_REPORT := --dist worksteal --tb=short --durations=40 --durations-min=3 --seconds-file build/test-gpu-seconds

# Both selections always run; the target fails when either does. Workers take turns on which GPU is their first, so
# that of the tests that measure a whole device each GPU has one at a time.
test-gpu: ## Run the GPU tests, and kernels, parity and integration on cuda:0 (PY=... has torch with CUDA)
	@status=0; export PYTHONPATH=.:proto:$$PYTHONPATH; \
	gpus=$$($(PY) -c 'import torch; print(max(1, torch.cuda.device_count()))') || exit; export TEST_NUM_GPUS=$$gpus; \
	$(PY) -m pytest -m whole_device --device cuda:0 -n $$gpus $(GPU_REPORT)/whole-device.txt tests/gpu || status=$$?; \
	OMP_NUM_THREADS=$$((gpus > 1 ? 3 : 4)) $(PY) -m pytest -m "not whole_device and not without_device" --device cuda:0 -n $(GPU_WORKERS) \
	    $(GPU_REPORT)/shared-device.txt $(NO_DEVICE) tests/gpu tests/parity tests/integration tests/unit/kernels \
	    tests/unit/towers/test_attention_backends.py || status=$$?; \
	exit $$status

lint: $(STAMP) proto-check ## Ruff, strict mypy, import direction, generated code up to date
	$(BIN)/python -m ruff check
	$(BIN)/python -m ruff format --check
	$(BIN)/python -m mypy
	PYTHONPATH=proto $(BIN)/lint-imports

proto: ## Regenerate the code of encoder.proto
	PYTHON=$(PYTHON) proto/generate.sh

proto-check: ## Fail when the committed generated code is not what encoder.proto gives
	PYTHON=$(PYTHON) proto/check.sh

# Without a GPU: the smallest tower, to see that the benchmark runs. With one: the recorded measurement.
bench: $(STAMP) ## Measure the towers
	@if [ -e /dev/nvidiactl ]; then \
	    set -x; $(BIN)/python bench/tower.py; \
	else \
	    set -x; $(BIN)/python bench/tower.py --quick --size tiny --device cpu; \
	fi

# Without a GPU host memory and streams alone; with two the recorded measurement.
bench-transport: $(STAMP) ## Measure the delivery of rows over every transport
	@if [ -e /dev/nvidiactl ]; then \
	    set -x; $(BIN)/python bench/transport.py; \
	else \
	    set -x; $(BIN)/python bench/transport.py --quick --device cpu; \
	fi

# Without a GPU: the smallest tower, to see that the benchmark runs.
bench-serve: $(STAMP) ## Measure the service under load, beside its tower and a plain loop
	@if [ -e /dev/nvidiactl ]; then \
	    set -x; $(BIN)/python bench/serve.py; \
	else \
	    set -x; $(BIN)/python bench/serve.py --quick --size tiny --device cpu; \
	fi

demo: $(STAMP) ## Start the service, send photographs, run a language model on the rows, compare
	$(BIN)/python bench/demo.py

serve: $(STAMP) $(CHECKPOINT)/config.json ## Serve a small random-weight checkpoint on the CPU
	$(BIN)/vision-encoder serve --model $(CHECKPOINT) --device cpu

# Made beside its final place and moved, so that an interrupted run leaves no half checkpoint.
$(CHECKPOINT)/config.json: | $(STAMP)
	rm -rf $(CHECKPOINT) $(CHECKPOINT).partial
	mkdir -p $(dir $(CHECKPOINT))
	$(BIN)/vision-encoder make-checkpoint --family qwen3_vl --size small --seed 0 $(CHECKPOINT).partial
	mv $(CHECKPOINT).partial $(CHECKPOINT)

clean: ## Remove what the targets made, the environments included
	rm -rf build dist demo-output $(VENV) $(ENGINES_VENV) .venv-proto .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
