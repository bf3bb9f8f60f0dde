# Every target works from a fresh checkout: `setup` builds .venv once and reuses it while the requirements are unchanged.
PYTHON := .venv/bin/python
PYTHON_XLA := .venv-xla/bin/python
SOURCES := nxd_memopt models scripts tests docs/examples

.DEFAULT_GOAL := help
.PHONY: help setup setup-xla train test test-fast test-slow test-compat test-cuda check golden bench bench-gpu mutants parity docs clean

help:
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: ## build .venv, the main track, from the pinned requirements
	@scripts/setup_env.sh main

setup-xla: ## build .venv-xla: torch_xla, which simulates trn1 on a CPU (7 GB)
	@scripts/setup_env.sh xla

train: setup ## continue pretraining SmolLM2-135M on Python's standard library, with tensor and sequence parallelism
	$(PYTHON) scripts/launch/smollm2.py

# A test computes with one thread: two at a time keep two cores busy.
SPREAD := --numprocesses 2 --dist worksteal
# Tests of one group run in one process: what they share takes a minute to compile.
SPREAD_XLA := --numprocesses 2 --dist loadgroup

test: check setup-xla ## static checks, then the tests of both tracks, without the slow ones
	$(PYTHON) -m pytest $(SPREAD) -m "not slow"
	$(PYTHON_XLA) -m pytest $(SPREAD_XLA) -m "not slow" tests/xla tests/dist/test_backends.py

# Layers, operations, models and optimizers, on up to two ranks.
CORE := $(addprefix tests/, backends ops parallel_layers modules models optimizer)
CORE += $(patsubst %, tests/dist/test_%.py, mappings layers embedding cross_entropy fused_loss grads qkv_linear \
	gated_mlp parallel_residual parallel_state random zero1)

test-fast: setup ## the core's tests on one and two ranks, about three minutes
	$(PYTHON) -m pytest $(SPREAD) -m "not slow" -k "not ranks4" $(CORE)

test-slow: setup setup-xla ## the slow proofs of both tracks, and every XLA test without functionalization
	$(PYTHON) -m pytest $(SPREAD) -m slow
	$(PYTHON_XLA) -m pytest $(SPREAD_XLA) -m slow tests/xla tests/dist/test_backends.py
	XLA_DISABLE_FUNCTIONALIZATION=1 $(PYTHON_XLA) -m pytest $(SPREAD_XLA) tests/xla tests/dist/test_backends.py

check: setup ## lint, format, types, import levels, size limits
	.venv/bin/ruff check $(SOURCES) setup.py
	.venv/bin/ruff format --check $(SOURCES) setup.py
	.venv/bin/basedpyright
	.venv/bin/lint-imports
	$(PYTHON) scripts/check_sizes.py
	$(PYTHON) scripts/check_splits.py
	$(PYTHON) scripts/file_tree.py > /dev/null
	$(PYTHON) -m nxd_memopt.training --help > /dev/null
	$(PYTHON) -m scripts.bench.report
	$(PYTHON) -m scripts.bench.numerics_page

NXD_SOURCE ?= build/neuronx-distributed
NXD_REVISION := fbac349b61a3adbb123c2983835af692840ff62f

build/neuronx-distributed:
	git clone https://github.com/aws-neuron/neuronx-distributed $@
	git -C $@ checkout --detach $(NXD_REVISION)

test-compat: setup setup-xla $(NXD_SOURCE) ## neuronx-distributed's own tests, example models and checkpoints, unchanged, on CPU ranks (NXD_SOURCE=its checkout)
	$(PYTHON) tests/nxd_upstream/run_nxd_tests.py --source $(NXD_SOURCE)
	$(PYTHON) tests/nxd_upstream/train_examples.py --source $(NXD_SOURCE)
	$(PYTHON) tests/nxd_upstream/nxd_checkpoints.py --source $(NXD_SOURCE)
	$(PYTHON) tests/nxd_upstream/nxd_script.py --source $(NXD_SOURCE)

golden: setup ## record the golden losses anew
	$(PYTHON) -m scripts.golden

parity: setup ## compare losses and gradients with transformers, and record the tables
	$(PYTHON) -m scripts.bench.parity --record
	$(PYTHON) -m scripts.bench.moe_parity --record
	$(PYTHON) -m scripts.bench.numerics_page --write

bench: parity ## parity, and the race of forward + backward against transformers
	$(PYTHON) -m scripts.bench.races.forward_backward --append

GPUS ?= 1

test-cuda: setup ## the tests that need NVIDIA GPUs; some need two
	NXD_MEMOPT_BACKEND=cuda $(PYTHON) -m pytest tests/cuda

bench-gpu: setup ## GPUS=N: the races of docs/benchmarks.md on N NVIDIA GPUs, recorded
	$(PYTHON) -m scripts.bench.races.suite --gpus $(GPUS) --append; code=$$?; $(PYTHON) -m scripts.bench.report --write; exit $$code

mutants: setup setup-xla ## plant faults in copies, one at a time: the tests must detect each (40 minutes on two cores)
	$(PYTHON) scripts/mutants.py

docs: ## build/site: the pages of docs/ and the API reference; a warning is an error
	@scripts/setup_env.sh docs
	.venv-docs/bin/mkdocs build

clean: ## remove what runs and tools wrote, but not .venv
	rm -rf build dist runs *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
