# Two commands do everything on a fresh machine: `make demo` and `make test`.
# PyTorch: the CPU build is installed by default; for a GPU set your own index and TORCH first, for example
#   PIP_INDEX_URL=... make demo TORCH="torch>=2.11"
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
CONSTRAINTS := deploy/constraints.txt
# A file stays in one process; files that are marked slow come first (tests/conftest.py), so that none is left for last.
# `make test` leaves the long tests out; `make integration LANE=` and the like run all of their part.
LANE ?= --skip-long
BY_FILE := --dist loadfile --no-loadscope-reorder --numprocesses
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
# Without its bytecode each of the many processes would compile the whole source: a second or more at every start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup docs demo demo-seeds schedules methods sim-recommend sim-fidelity test test-all lint lint-and-unit unit integration contract sglang-env sglang-try frameworks-try deploy chart chart-tools chart-tools-try prometheus-try redis-try images image-sglang images-test docker-try chromium-try e2e chaos fuzz bench sim-check clean

help: ## What can be made
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sort | awk -F':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

$(VENV)/.python: $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "python >= 3.11 is needed; set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11; set PYTHON="; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq python3-venv; }
	@echo "environment 1/3: $(VENV), with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --upgrade pip
	@echo "environment 2/3: $(TORCH), the largest download"
	@$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) "$(TORCH)"
	@touch $@

$(VENV)/.local: $(VENV)/.python pyproject.toml $(wildcard proto/rollmesh/v1/*.proto) proto/hatch_build.py
	@echo "environment 3/3: rollmesh and what it needs to train"
	@$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[local]"
	@touch $@

$(VENV)/.dev: $(VENV)/.local
	@echo "environment, for development: linters, test tools, a browser's driver"
	@$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable ".[local,dev]"
	@touch $@

setup: $(VENV)/.dev ## Install everything for development

demo: $(VENV)/.local ## Set up what is needed and run the main job: train a small model through the real mesh
	$(BIN)/rollmesh demo

demo-seeds: $(VENV)/.local ## The demo over three seeds, copris beside sync at equal updates
	$(BIN)/python -m benchmarks.demos seeds $(ARGS)

schedules: $(VENV)/.local ## The demo's task under every preset of `rollmesh schedules`, 6 updates each
	$(BIN)/python -m benchmarks.demos schedules $(ARGS)

methods: $(VENV)/.local ## The demo's task with every method of `rollmesh methods`, 3 updates each
	$(BIN)/python -m benchmarks.demos methods $(ARGS)

sim-recommend: $(VENV)/.local ## Simulate the pools and switches behind the recommendations of docs/schedules.md (minutes)
	$(BIN)/python -m benchmarks.published pools docs

sim-fidelity: $(VENV)/.local ## Write the section of docs/simulator-published.md about published speed-ups (minutes); print it with ARGS="--json" or "--with NAME=VALUE"
	$(BIN)/python -m benchmarks.published speed-ups $(or $(ARGS),--write docs/simulator-published.md)

# Those that simulate for minutes are written by sim-recommend and sim-fidelity.
PAGES ?= metrics reference schedules
docs: $(VENV)/.dev ## Write the pages of docs/ that are generated from the code; one with PAGES=reference
	for page in $(PAGES); do $(BIN)/python -m docs.build.$$page || exit 1; done

test: lint-and-unit integration contract deploy e2e ## Set up what is needed, run all checks and the tests that are not long

test-all: ## All checks and tests, the long ones too: hours on two cores
	@$(MAKE) test LANE=

lint: $(VENV)/.dev ## ruff, mypy strict, import-linter, buf
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint proto

# mypy keeps one core busy for longer than the unit tests need the other one.
lint-and-unit: $(VENV)/.dev
	@$(MAKE) lint & lint=$$!; $(MAKE) unit; unit=$$?; wait $$lint && exit $$unit

unit: $(VENV)/.dev ## Unit tests
	$(BIN)/pytest $(LANE) tests/unit --numprocesses 2 --dist worksteal

integration: $(VENV)/.dev sglang-try frameworks-try ## Tests against real Redis, gRPC, processes and SGLang servers
# Three processes on two cores: tests wait for the processes that they start half of the time.
	$(BIN)/pytest $(LANE) tests/integration -m "not alone" $(BY_FILE) 3
# Only the files that have such tests: to collect all the others takes ten seconds.
	$(BIN)/pytest $(LANE) $$(grep -rl --include="*.py" "pytest.mark.alone" tests/integration) -m alone

contract: $(VENV)/.dev sglang-try ## The same cases for every engine, and the behaviour of SGLang's server that we rely on
# By server, each of which takes eleven seconds of a core to start. Three processes: a test waits for its server half of the time.
	$(BIN)/pytest $(LANE) tests/sglang_cpu tests/contract --numprocesses 3 --dist loadgroup --no-loadscope-reorder

# Not a stamp: the environment lies outside of this folder and knows best whether it is complete.
sglang-env: $(VENV)/.python ## Install the real SGLang server for tests on a CPU (3.4 GB in the user's cache)
	@$(BIN)/python -m tests.kit.environments sglang-cpu

# Without a way to install it, for example without a network, the tests that need it say why and are skipped.
sglang-try: $(VENV)/.python
	@$(BIN)/python -m tests.kit.environments sglang-cpu || echo "tests of the real SGLang server will be skipped"

# What others wrote for agents (0.5 GB each), and the trainers of TRL (1.4 GB), in environments of their own.
frameworks-try: $(VENV)/.python
	@$(BIN)/python -m tests.kit.environments openenv verifiers frameworks trl || echo "tests of these will be skipped"

deploy: $(VENV)/.dev sglang-try prometheus-try chart-tools-try ## What is shipped for operations: rules, dashboards, chart, images
	$(BIN)/pytest $(LANE) tests/deploy $(BY_FILE) 3

# Without a way to get it, the tests that need Prometheus say why and are skipped.
prometheus-try:
	@tests/deploy/prometheus/install.sh || echo "tests of Prometheus will be skipped"

# The embedded server has no TLS. Debian's redis-tools have the program redis-server too, and start no service.
redis-try:
	@command -v redis-server >/dev/null || command -v redis-check-rdb >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq redis-tools; } || echo "the test of Redis over TLS will be skipped"

chart: $(VENV)/.dev ## Write what follows from the chart's values.yaml: README, schema, adapter rules
	$(BIN)/python helm/generate.py

chart-tools: $(VENV)/.python ## Get Helm 3 and 4 and the schemas for the tests of the chart (300 MB in the user's cache)
	@$(BIN)/python -m tests.kit.environments chart-tools

chart-tools-try: $(VENV)/.python
	@$(BIN)/python -m tests.kit.environments chart-tools || echo "tests of the chart will be skipped"

# Needs Docker. By environment variables: BASE_IMAGE, TORCH, TORCH_INDEX, EXTRAS, REGISTRY, VERSION (deploy/build.sh).
images: ## Build every image that runs on a CPU
	deploy/build.sh gateway agents rollout reward generator-cpu trainer

image-sglang: ## Build the generator into the upstream SGLang image
	BASE_IMAGE=$${BASE_IMAGE:-lmsysorg/sglang:v0.5.23} deploy/build.sh generator-sglang

images-test: $(VENV)/.dev sglang-try docker-try ## Build the images and run the mesh of the compose file in them (minutes)
	ROLLMESH_TEST_IMAGES=1 $(BIN)/pytest tests/deploy/images

# Debian's engine, Compose and debootstrap, where this is root and they are missing; without them tests are skipped.
docker-try:
	@command -v dockerd docker-compose debootstrap >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && \
		apt-get install -y -qq --no-install-recommends docker.io docker-compose debootstrap iptables >/dev/null; } || \
		echo "tests of the images will be skipped"

# The browser that the gateway's page is tested in.
chromium-try:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || echo "tests of the gateway's page will be skipped"

e2e: $(VENV)/.dev sglang-try frameworks-try redis-try chromium-try ## The whole mesh, once on real SGLang servers
# Three processes on two cores: a test of a mesh waits for a third of its time, and one of the page for two thirds.
	$(BIN)/pytest $(LANE) tests/e2e --ignore tests/e2e/gateway $(BY_FILE) 3
# Processes of their own: the browser's driver keeps an event loop running, in which no other test could start one.
	$(BIN)/pytest $(LANE) tests/e2e/gateway $(BY_FILE) 3

chaos: $(VENV)/.dev ## 38 rounds against a training mesh: kill -9, stalls, damaged files; audited and judged from outside
	$(BIN)/python -m tests.chaos $(ARGS)

fuzz: $(VENV)/.dev ## Random requests to every port of a training run, which must go on
	$(BIN)/python -m tests.fuzz $(ARGS)

# For example: make bench NAME=train ARGS="--json --check"; make bench NAME=--help says which there are.
bench: $(VENV)/.local ## Figures beside their baselines: one bench by NAME, or some 15 minutes of them
	@for name in $(or $(NAME),engine train queue reload); do $(BIN)/python -m benchmarks $$name $(ARGS) || exit 1; done

sim-check: $(VENV)/.local ## Real runs of the demo's mesh beside the simulator, which is calibrated on sync alone
	$(BIN)/python -m benchmarks sim-check $(ARGS)

clean: ## Remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
