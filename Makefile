# `make demo` and `make test` need Python 3.11 or newer, git and make; everything else they set up in .venv.
PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1
export RAY_USAGE_STATS_ENABLED := 0

.PHONY: demo test test-fast test-all check bench quality swiftkv-shapes clean

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "needs Python >= 3.11: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

demo: .venv/installed  ## the main job on the demo model and a corpus made on the spot
	$(BIN)/python -m jobs.demo

test: .venv/installed  ## what CI runs: lint, types, tests; about twelve minutes on two cores
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow"

test-fast: .venv/installed  ## what starts no Ray and no process; under three minutes on two cores
	$(BIN)/python -m pytest -m "not slow and not ray and not process"

test-all: .venv/installed  ## the slow tests too
	$(BIN)/python -m pytest

check: .venv/installed  ## lint, format and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed  ## the decoder alone, on this CPU
	$(BIN)/python -m jobs.bench --config configs/bench-cpu.yaml

E2E ?= $(wildcard data/devset.csv)
quality: .venv/installed  ## quality against speed: make quality E2E=path/to/devset.csv; without it, without references
	$(BIN)/python -m jobs.evaluate --sweep --config configs/quality-e2e.yaml data.path=$(or $(E2E),null)

SHAPES := 18-1 18-2 12-1 12-2 12-4 9-1
swiftkv-shapes: .venv/installed  ## what configs/quality-swiftkv.yaml compares: make swiftkv-shapes TRAIN=trainset.csv E2E=devset.csv
	@test -f "$(TRAIN)" -a -f "$(E2E)" || { echo "give TRAIN=trainset.csv E2E=devset.csv"; exit 1; }
	for shape in $(SHAPES); do \
	  test -d outputs/swiftkv/init-$$shape || \
	  $(BIN)/python -m jobs.distill --init-only --config configs/distill-swiftkv-e2e.yaml -o outputs/swiftkv/init-$$shape \
	    "model.swiftkv={kv_layers: $${shape%-*}, group_size: $${shape#*-}}" || exit 1; \
	  $(BIN)/python -m jobs.distill --resume --config configs/distill-swiftkv-e2e.yaml -o outputs/swiftkv/$$shape \
	    "model.swiftkv={kv_layers: $${shape%-*}, group_size: $${shape#*-}}" model.source=outputs/swiftkv/init-$$shape \
	    train.epochs=0.3 data.path=$(TRAIN) data.validation=$(E2E) || exit 1; done

clean:
	rm -rf .venv outputs build *.egg-info
