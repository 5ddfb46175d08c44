# `make` alone lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXP ?= mnist5k
ALG ?= fedmuon
SEED ?= 0
RUNS ?= runs
DATA ?= data
PLAN ?= quickstart
# Optional: ROUNDS=5 shortens every run of a target; SEEDS="0 1" chooses the seeds of quickstart.
on = $(filter-out 0 no false,$(1))
ROUNDS_OF = $(if $(ROUNDS),--rounds $(ROUNDS))
SWEEP = --root $(RUNS) $(ROUNDS_OF)
SEEDS ?= 0
# Tests run side by side, one thread each.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help

help: ## Show this help
	@awk 'BEGIN {FS = ":.*## "} /^[a-zA-Z0-9_%-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-models: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[models]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

install: $(VENV)/.installed ## Create .venv and install the project

quickstart: $(VENV)/.installed ## Compare five methods on real digits: table, picture, TensorBoard
	$(BIN)/fedmuon sweep quickstart $(SWEEP) --seed $(SEEDS)

run: $(VENV)/.installed ## One run, resumed if it was interrupted: make run EXP=mnist5k ALG=fedmuon SEED=0
	$(BIN)/fedmuon sweep --experiment $(EXP) --algorithm $(ALG) $(SWEEP) --seed $(SEED)

tensorboard: $(VENV)/.installed ## Curves of all methods of an experiment: make tensorboard EXP=mnist5k
	$(BIN)/tensorboard --logdir $(RUNS)/$(EXP)

readme: $(VENV)/.installed ## Regenerate the results of README.md: five methods, three rates, three seeds
	-$(BIN)/fedmuon sweep quickstart_rates --root $(RUNS)/readme # a diverged trial is a failed run
	$(BIN)/fedmuon compare $(RUNS)/readme/mnist5k --markdown README.md --section quickstart
	cp $(RUNS)/readme/mnist5k/compare/curves.png docs/quickstart.png

tune: $(VENV)/.installed ## Choose the learning rates of configs/tuned/mnist5k on the validation split
	$(BIN)/fedmuon sweep tune_mnist5k --root $(RUNS)/tuning --write-tuned configs/tuned

ablation: $(VENV)/.installed ## FedMuon's three switches in every combination: tables and figures
	$(BIN)/fedmuon sweep ablation --root $(RUNS)/ablation $(ROUNDS_OF)
	for e in mnist5k fashion5k; do \
	  $(BIN)/fedmuon compare $(RUNS)/ablation/$$e --markdown docs/ablation.md --section $$e && \
	  $(BIN)/python benchmarks/effects.py $(RUNS)/ablation/$$e --section $$e-effects && \
	  $(BIN)/fedmuon report $(RUNS)/ablation/$$e -o $(RUNS)/ablation/report-$$e && \
	  cp $(RUNS)/ablation/report-$$e/figures/finals.png docs/ablation-$$e.png || exit 1; \
	done

sensitivity: $(VENV)/.installed ## How FedMuon depends on alpha, beta, rate and Newton-Schulz steps: heat maps
	$(BIN)/fedmuon sweep sensitivity --root $(RUNS)/sensitivity $(ROUNDS_OF)
	$(BIN)/fedmuon heatmap $(RUNS)/sensitivity/mnist5k -o docs/sensitivity

# The Transformers are timm's.
reproduce-cifar100-vit-tiny reproduce-tiny-imagenet-vit-tiny reproduce-tiny-imagenet-swin: $(VENV)/.installed-models

# make reproduce-cifar100-resnet18 DIR=0.1 SEEDS="0 1" ROUNDS=50 GPUS=2 SMOKE=1 PARITY=1
reproduce-%: $(VENV)/.installed ## A published table, ours beside theirs: cifar100-resnet18, lmo, lmo-public, mini, ...
	$(BIN)/fedmuon reproduce $* --root $(RUNS)/reproduce --data $(DATA) \
	  $(if $(DIR),--case $(addprefix dir,$(DIR))) $(if $(filter-out file,$(origin SEEDS)),--seed $(SEEDS)) \
	  $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(GPUS),--jobs $(GPUS)) \
	  $(if $(call on,$(SMOKE)),--smoke) $(if $(call on,$(PARITY)),--parity) \
	  $(if $(call on,$(DOWNLOAD)),--download) $(if $(OUT),-o $(OUT))

bench: $(VENV)/.installed ## Measure the table of ratios of benchmarks/RESULTS.md: make bench ONLY=population REPEAT=3
	$(BIN)/python benchmarks/run_all.py $(if $(ONLY),--only '$(ONLY)') $(if $(REPEAT),--repeat $(REPEAT))

.venv-peers/.installed: pyproject.toml
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check \
	  'flwr[simulation]' pfl psutil --editable .
	touch $@

bench-peers: .venv-peers/.installed ## The same work in Flower and pfl, side by side; in .venv-peers
	.venv-peers/bin/python benchmarks/peers/run_all.py $(if $(ONLY),--only '$(ONLY)') \
	  $(if $(REPEAT),--repeat $(REPEAT))

compare: $(VENV)/.installed ## Tables, paired tests and curves of an experiment: make compare EXP=mnist5k
	$(BIN)/fedmuon compare $(RUNS)/$(EXP) -o $(RUNS)/$(EXP)/compare

report: $(VENV)/.installed ## The same as one HTML page: make report EXP=mnist5k
	$(BIN)/fedmuon report $(RUNS)/$(EXP) -o $(RUNS)/$(EXP)/report

sweep: $(VENV)/.installed ## Any plan, resumed if it was interrupted: make sweep PLAN=quickstart
	$(BIN)/fedmuon sweep $(PLAN) $(ROUNDS_OF) $(if $(filter-out file,$(origin RUNS)),--root $(RUNS))

lint: $(VENV)/.installed-dev ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint ## Style, types and tests
	$(BIN)/python -m pytest -n auto --dist worksteal

format: $(VENV)/.installed-dev ## Reformat and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environments and caches; runs stay
	rm -rf $(VENV) .venv-peers build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

.PHONY: help install quickstart run tensorboard readme tune ablation sensitivity bench bench-peers compare report sweep lint test format clean
