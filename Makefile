# Every target creates the environment it needs, once: `make demo` and `make test` work on a fresh machine.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# TORCH selects another release, or a wheel: make install TORCH=./torch-2.13.0+cpu-cp311-....whl
TORCH ?= $(shell grep '^torch==' constraints.txt)
# With uv on the PATH, torch's build fits this machine: the CUDA version of its driver, or CPU only. TORCH_BACKEND names
# another one (cpu, cu128, ...). Without uv it is the package index's build: CUDA on x86_64.
TORCH_BACKEND ?= auto
UV := $(shell command -v uv)
# extras for tests and lint; without DeepSpeed its tests are skipped: make test EXTRAS=dev
EXTRAS ?= dev,deepspeed
# a lock with hashes to install first: make install LOCK=requirements-dev.lock EXTRAS=dev
LOCK ?=
# test processes, one torch thread each; 0 runs the tests in the calling process
WORKERS ?= 2
# length of the fuzz job: make fuzz MINUTES=60
MINUTES ?= 5
# extra arguments for pytest: make test ARGS="tests/unit/data -k order"
ARGS ?=

# torch and what its builds bring are not locked: TORCH decides
BUILDS := torch triton cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc \
	nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse \
	nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx
# every platform, and every Python from the oldest that the extra dev supports
COMPILE := uv pip compile pyproject.toml --constraint constraints.txt --universal --python-version 3.11.5 --generate-hashes \
	--no-header --no-annotate --quiet $(addprefix --no-emit-package ,$(BUILDS))

# the time of every test lies in durations.xml
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations=10 --junitxml=durations.xml
# keep the collection order: heavy folders first, light ones last
PARALLEL := -n $(WORKERS) --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-gpu fuzz lint format docs docs-site lock install clean distclean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.run-installed ## train a tiny model on generated images and sample it, on one CPU
	$(BIN)/sd3-light demo

test: $(VENV)/.dev-installed ## the tests that every change must pass (about 13 minutes on 2 cores)
	$(PYTEST) $(PARALLEL) -m "not slow and not timed and not gpu" $(ARGS)

test-full: $(VENV)/.dev-installed ## all tests except the GPU tests; tests of missing tools are skipped
	$(PYTEST) $(PARALLEL) -m "not gpu and not timed" $(ARGS)
	$(BIN)/python -m pytest -m timed tests/e2e

test-gpu: $(VENV)/.dev-installed ## the tests that need CUDA
	$(PYTEST) -m gpu $(ARGS)

fuzz: $(VENV)/.dev-installed ## hostile and odd inputs, for MINUTES: exit 0 or 2, bounded, nothing else touched
	$(BIN)/python -m tests.fuzz.run --minutes $(MINUTES) $(ARGS)

lint: $(VENV)/.dev-installed ## style, types and import order
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev-installed ## format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(VENV)/.run-installed ## regenerate docs/reference/config.md from the config schema
	$(BIN)/python -m sd3_light.config.docs

docs-site: $(VENV)/.dev-installed ## build the documentation with its search into site/; a broken link is an error
	$(BIN)/python scripts/docs_site.py

lock: ## write the locks with hashes from pyproject.toml and constraints.txt; needs uv on the PATH
	$(COMPILE) --extra bnb --extra s3 --output-file requirements.lock
	$(COMPILE) --extra bnb --extra s3 --extra dev --output-file requirements-dev.lock

install: ## recreate the environment: make install [PYTHON=...] [TORCH=...] [TORCH_BACKEND=...] [EXTRAS=...] [LOCK=...]
	rm -rf $(VENV)
	@$(MAKE) --no-print-directory $(VENV)/.dev-installed

clean: ## remove caches, build output and the demo run
	rm -rf build dist site durations.xml *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis demo_run fuzz-failures
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## clean, and also remove the environment
	rm -rf $(VENV)

# Stamp files: nothing is installed again until pyproject.toml or constraints.txt changes.
# torch is installed first and removed from the constraints, so TORCH may differ from the pin and is not replaced.
$(VENV)/.run-installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: SD3-Light needs Python 3.11 or newer, and '$(PYTHON)' is older; choose another: make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
ifneq ($(LOCK),)
	$(PIP) install --no-deps --require-hashes --requirement $(LOCK)
endif
ifdef UV
	uv pip install --python $(BIN)/python --torch-backend $(TORCH_BACKEND) --constraint $(VENV)/constraints.txt "$(TORCH)"
else
	$(PIP) install --constraint $(VENV)/constraints.txt "$(TORCH)"
endif
	@nvidia-smi > /dev/null 2>&1 && ! $(BIN)/python -c 'import torch; torch.zeros(1, device="cuda")' > /dev/null 2>&1 && \
		echo "note: this torch cannot use the GPU of this machine; install uv, which chooses the build for its driver, and run make install again" || true
	$(PIP) install --constraint $(VENV)/constraints.txt --editable .
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.run-installed
	$(PIP) install --constraint $(VENV)/constraints.txt --editable ".[$(EXTRAS)]"
	@touch $@
