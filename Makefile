# One command each to set up, run, check, test, document and measure. Everything is installed into .venv.
# `make` alone lists the targets: each has its description after `##`. ARGS goes to the command behind most of them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
CLASSES := $(VENV)/.spark-classes
DATA ?= data
LISTEN ?= localhost:9092
HTTP ?= localhost:9644
# Tests wait for timeouts, disks and processes as long as they compute: three workers more keep the cores busy.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 3, 10))')
# Number of runs of `make test-repeat`, and of processes that keep one core each busy meanwhile.
RUNS ?= 10
BUSY ?= 0

# Workers of a run and the processes that they start import the same modules: each is to be compiled once.
unexport PYTHONDONTWRITEBYTECODE

SOURCES := src simulation tests tools benchmarks examples
PARALLEL := --numprocesses $(WORKERS) --dist loadfile
PYTEST := $(BIN)/python -m pytest $(PARALLEL)
FAST := -m "not slow"
# All of tests/unit except the shells of the broker, the embedded broker and the benchmarks: 2 minutes on 2 cores.
CHECKED := tests/properties tests/unit/test_requirements.py $(addprefix tests/unit/, \
	cli client cluster groups log protocol raft replication scheduling security tools transactions)

.DEFAULT_GOAL := help
.PHONY: help setup up serve check lint format test test-slow test-repeat test-spark test-clusters test-kafka test-install \
	coverage docs docs-serve wheel bench bench-spark bench-contracts fuzz chaos simulate clean

help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## Create .venv with Penstock and all that development needs.

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Penstock needs Python 3.11 or newer; set PYTHON=/path/to/python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m compileall -q src  # as pip does for an installed package, so that the first start is fast
	@touch $(STAMP)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[dev,docs]'
	@touch $(DOCS_STAMP)

# An archive of Spark's classes, with which tests start Spark in half the time. Not every Java can create it.
$(CLASSES): $(STAMP)
	$(BIN)/python -m tests.spark.class_archive
	@touch $(CLASSES)

up: setup  ## Run the demo: broker, application, Spark pipelines, dead letters and their replay, with a live view.
	@exec $(BIN)/penstock demo --listen $(LISTEN) --data-dir $(DATA) --http $(HTTP)

serve: setup  ## Run only the broker, on the data of the demo.
	@exec $(BIN)/penstock serve --listen $(LISTEN) --data-dir $(DATA)/broker --http $(HTTP) --welcome

check: lint  ## Lint, types, and the unit and property tests of what is pure: about two minutes.
	$(PYTEST) $(FAST) $(CHECKED) $(ARGS)

lint: setup  ## Style, formatting, types and import contracts.
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports --no-cache

format: setup  ## Format the code and fix what ruff can fix.
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

test: setup $(CLASSES)  ## The whole suite without slow tests.
	$(PYTEST) $(FAST) $(ARGS)

test-slow: setup $(CLASSES)  ## The slow tests: campaigns, clusters, long runs.
	$(PYTEST) -m slow $(ARGS)

test-repeat: setup $(CLASSES)  ## Run `make test` RUNS times beside BUSY busy processes; report in build/repeat.
	$(BIN)/python -m tests.repeat --runs $(RUNS) --busy $(BUSY) -- $(PARALLEL) $(FAST) $(ARGS)

test-spark: setup $(CLASSES)  ## All Spark tests, with a standalone cluster, a Connect server and killed processes.
	$(PYTEST) tests/spark tests/demo $(ARGS)

test-clusters: setup $(CLASSES)  ## Pipelines of 100,000 rows on a standalone Spark cluster and a Spark Connect server.
	$(BIN)/python -m pytest --numprocesses 2 tests/spark/clusters $(ARGS)

# Exit code 75: the jars cannot be fetched, and the program has said so.
test-kafka: setup  ## Tests against Apache Kafka, whose jars Maven fetches into benchmarks/.cache.
	@$(BIN)/python -m tests.compat.apache_kafka; case $$? in \
	  0) $(PYTEST) -m kafka $(ARGS) ;; \
	  75) ;; \
	  *) exit 1 ;; \
	esac

test-install: setup  ## Install the wheel with each extra into an environment of its own.
	$(BIN)/python -m pytest -m slow tests/install $(ARGS)

coverage: setup $(CLASSES)  ## `make test` with line and branch coverage; report in build/coverage.
	$(PYTEST) $(FAST) --cov --cov-report term:skip-covered --cov-report html $(ARGS)

docs: $(DOCS_STAMP)  ## Build the site into build/site; a broken link fails.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

docs-serve: $(DOCS_STAMP)  ## Serve the site on localhost:8000 and rebuild it when a page changes.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve $(ARGS)

wheel: setup  ## Build the wheel into dist.
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

bench: setup  ## Benchmarks of the broker, beside PEER=kafka or PEER=nats if given.
	$(BIN)/python -m benchmarks $(if $(PEER),--peer $(PEER)) $(ARGS)

bench-contracts: setup  ## Delivery contracts beside loops on confluent-kafka: ARGS="--only 'least-*'".
	$(BIN)/python -m benchmarks.contracts $(ARGS)

bench-spark: setup  ## The Spark source and sinks beside Spark's Kafka connector: ARGS="--only 'read-*'".
	$(BIN)/python -m benchmarks.spark $(ARGS)

fuzz: setup  ## Damaged frames; ARGS=--state: valid requests with hostile values; ARGS=--secure: TLS, logins, access rules.
	$(BIN)/python -m tests.fuzz $(if $(FRAMES),--frames $(FRAMES)) $(if $(SEED),--seed $(SEED)) $(ARGS)

chaos: setup  ## Faults in real processes: ARGS="--campaign sink" (nodes, copier, rebalance, schedule, share, once, contracts).
	$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) $(ARGS)

simulate: setup  ## Seeded simulation of whole nodes: ARGS="--seeds 0 --minutes 60", ARGS=--mutations or ARGS="--world share".
	$(BIN)/python -m simulation $(ARGS)

clean:  ## Remove .venv, caches and what was built.
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
