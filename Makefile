# Needs Python 3.11 or newer, git and make; everything else each target sets up in .venv. `make help` lists the targets.
PYTHON ?= python3
BIN := .venv/bin
# Compiling all of torch and Ray to bytecode would take more than a minute; Python compiles what it imports.
PIP := $(BIN)/pip install --no-compile --disable-pip-version-check --root-user-action=ignore --editable
export HF_HUB_OFFLINE ?= 1
export RAY_USAGE_STATS_ENABLED := 0
# Where it is set, each process that Ray or a test starts compiles torch and Ray anew, which takes 4 to 6 s.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo demo-chat test test-fast test-ray test-all test-floor chaos mutants check docs bench gpu baselines quality clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Stamps: each says which extras are in .venv. A later target adds to what an earlier one has installed.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "needs Python >= 3.11: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/pip
	@echo "installing torch, Ray and others into .venv, which takes a minute or so"
	$(PIP) .
	@touch $@

.venv/installed-test: pyproject.toml | .venv/bin/pip
	$(PIP) '.[test]'
	@touch $@ .venv/installed

# The oldest transformers and Ray that pyproject.toml allows, and what they need, in front of the packages of .venv.
FLOOR := $(shell sed -nE 's/^ *"(transformers|ray)[^>]*>=([0-9.]+),.*/\1==\2/p' pyproject.toml)
.venv/floor/installed: pyproject.toml .venv/installed-test
	$(PYTHON) -m venv --clear .venv/floor
	@rest=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	own=$$(.venv/floor/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$rest')" > $$own/rest.pth
	.venv/floor/bin/pip install --no-compile --disable-pip-version-check $(FLOOR)
	@touch $@

.venv/installed-docs: pyproject.toml | .venv/bin/pip
	$(PIP) '.[docs]'
	@touch $@ .venv/installed

setup: .venv/installed  ## installs what a user needs; then: . .venv/bin/activate

setup-dev: .venv/installed-test  ## installs what a developer needs, too

demo: .venv/installed  ## the main job on the demo model and a corpus made on the spot
	$(BIN)/skipdecode demo

demo-chat: .venv/installed  ## a model of the package registry (93 MB; MODEL=gemma3: 238) answers 600 instructions
	$(BIN)/skipdecode demo --chat $(if $(MODEL),--model $(MODEL))

# The three parts run side by side, since tests with Ray wait more than they compute; each prints when it is over.
test: .venv/installed-test  ## what CI runs: lint, types and tests; 8 to 15 minutes on two cores, set-up included
	$(MAKE) --no-print-directory -j 3 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) check test-fast test-ray

test-fast: .venv/installed-test  ## the tests that do not start Ray
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not ray"

test-ray: .venv/installed-test  ## the tests that start Ray
	$(BIN)/python -m pytest -n 1 --dist loadscope -m "not slow and ray"

test-all: .venv/installed-test  ## the slow tests, too, and those of test-floor
	$(BIN)/python -m pytest --hypothesis-profile=thorough
	$(MAKE) --no-print-directory test-floor

MODELS := tests/skipdecode/checkpoint tests/skipdecode/model/wrapped
RUNS := tests/pipeline/cluster/test_ray_internals.py tests/jobs/test_demo.py::test_the_demo_runs \
  tests/jobs/test_wrapped_verbs.py::test_a_run_is_exact_and_resumed
test-floor: .venv/floor/installed  ## models, tokenizers and runs with the oldest transformers and Ray that pyproject.toml allows
	.venv/floor/bin/python -m pytest -n auto --dist worksteal -m "not ray" $(MODELS)
	.venv/floor/bin/python -m pytest -n 1 --dist loadscope $(RUNS)

TRIALS ?= 100
SEED ?= 0
chaos: .venv/installed-test  ## runs killed, paused and delayed at random; each must lose nothing: TRIALS=100 SEED=0
	$(BIN)/python -m tests.runs.chaos --trials $(TRIALS) --seed $(SEED)

mutants: .venv/installed-test  ## makes one line wrong at a time, which the tests named with it must find
	$(BIN)/python -m tests.mutants

check: .venv/installed-test  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed-docs  ## the pages of docs/ as a site in build/site; broken links are errors
	$(BIN)/mkdocs build --strict

bench: .venv/installed  ## the decoder alone, on this CPU
	$(BIN)/skipdecode bench --config configs/bench.yaml

gpu: .venv/installed-test  ## the first half hour on a GPU, ends with a table; ARGS=--dry-run tries the checks on a CPU
	$(BIN)/python -m benchmarks.gpu_check --keep-going $(ARGS)

# The E2E NLG challenge's trainset.csv and devset.csv, which are no part of this repository.
TRAIN ?= $(wildcard data/trainset.csv)
E2E ?= $(wildcard data/devset.csv)
TUNE = $(BIN)/skipdecode finetune --resume --config configs/finetune-demo.yaml data.path=$(TRAIN) data.validation=$(E2E)
FULL := 'train.schedules=[{method: full}]' train.distill=0 model.teacher=null
SHAPE := {vocab_size: 1024, hidden_size: 128, num_hidden_layers: 24, num_attention_heads: 4, ffn_dim: 512}
BASE := model.source=outputs/baselines/base
EXITS := {method: early_exit, max_layers: 16, min_layers: 8}, {method: early_exit, max_layers: 10, min_layers: 6}, \
  {method: early_exit, max_layers: 7, min_layers: 5}, {method: early_exit, max_layers: 6, min_layers: 4}, \
  {method: early_exit, max_layers: 5, min_layers: 3}, {method: early_exit, max_layers: 4, min_layers: 2}
EVEN := {method: unified, layers: 14}, {method: unified, layers: 9}, {method: unified, layers: 7}, \
  {method: unified, layers: 6}, {method: unified, layers: 5}, {method: unified, layers: 4}
baselines: .venv/installed  ## trains what `make quality` compares with, in about 3 hours: TRAIN=trainset.csv E2E=devset.csv
	@test -f "$(TRAIN)" -a -f "$(E2E)" || { echo "give TRAIN=trainset.csv E2E=devset.csv"; exit 1; }
	$(TUNE) $(FULL) -o outputs/baselines/start model.source=null 'model.shape=$(SHAPE)' \
	  train.epochs=1 train.final_learning_rate=0.0005 train.warmup_steps=300
	$(TUNE) $(FULL) -o outputs/baselines/base model.source=outputs/baselines/start
	$(TUNE) $(FULL) -o outputs/baselines/full $(BASE)
	$(TUNE) -o outputs/baselines/early-exit $(BASE) train.distill=0 model.teacher=null \
	  'train.schedules=[{method: full}, $(EXITS)]'
	$(TUNE) -o outputs/baselines/unified $(BASE) 'train.schedules=[{method: full}, $(EVEN)]'

quality: .venv/installed  ## quality against speed, after `make baselines`: E2E=devset.csv; without it, without references
	@test -d outputs/baselines/full || { echo "run make baselines first: it trains the models to compare with"; exit 1; }
	$(BIN)/skipdecode evaluate --sweep --config configs/quality.yaml data.path=$(or $(E2E),null)

clean:  ## removes .venv and outputs/
	rm -rf .venv outputs build *.egg-info
