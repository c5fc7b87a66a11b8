# One command each to set up, run, test, lint and measure. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLASSES := $(VENV)/.spark-classes
DATA ?= data
LISTEN ?= localhost:9092
HTTP ?= localhost:9644
# A third keeps two cores busy, since tests wait for time-outs and disks as long as they compute
WORKERS ?= 3

.PHONY: setup up serve test test-slow test-spark test-clusters test-kafka test-install lint bench bench-spark bench-contracts fuzz chaos simulate clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Penstock needs Python 3.11 or newer; set PYTHON=/path/to/python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m compileall -q src  # as an installed package would be, so that the first start is a fast one
	@touch $(STAMP)

# An archive of Spark's classes, with which the tests start Spark in half the time; tried once, as not every Java can make it
$(CLASSES): $(STAMP)
	$(BIN)/python -m tests.spark.class_archive
	@touch $(CLASSES)

# A whole story: broker, orders, subscribers, Spark pipelines, dead letters and their replay, shown while it happens
up: setup
	@exec $(BIN)/penstock demo --listen $(LISTEN) --data-dir $(DATA) --http $(HTTP)

# Only the broker, with what the demo has left
serve: setup
	@exec $(BIN)/penstock serve --listen $(LISTEN) --data-dir $(DATA)/broker --http $(HTTP) --welcome

test: setup $(CLASSES)
	$(BIN)/python -m pytest -m "not slow" --numprocesses $(WORKERS) --dist loadfile $(ARGS)

# What takes longer than the others together: campaigns, clusters, long stories
test-slow: setup $(CLASSES)
	$(BIN)/python -m pytest -m slow --numprocesses $(WORKERS) --dist loadfile $(ARGS)

# The whole Spark side: also a standalone cluster, a Connect server, a long-lived query, processes that are killed
test-spark: setup $(CLASSES)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile tests/spark tests/demo $(ARGS)

# Pipelines on a standalone Spark cluster that loses an executor, and on a Spark Connect server: 100,000 rows each
test-clusters: setup $(CLASSES)
	$(BIN)/python -m pytest --numprocesses 2 tests/spark/clusters $(ARGS)

# Against Apache Kafka: its jars are fetched by Maven into benchmarks/.cache; where that cannot be, it says so
test-kafka: setup
	@$(BIN)/python -m tests.compat.apache_kafka; case $$? in \
	  0) $(BIN)/python -m pytest -m kafka --numprocesses $(WORKERS) --dist loadfile $(ARGS) ;; \
	  75) ;; \
	  *) exit 1 ;; \
	esac

# The wheel, installed by pip with each extra into an environment of its own
test-install: setup
	$(BIN)/python -m pytest -m slow tests/install $(ARGS)

lint: setup
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: setup
	$(BIN)/python -m benchmarks $(if $(PEER),--peer $(PEER)) $(ARGS)

# Delivery contracts beside loops written by hand on confluent-kafka: make bench-contracts ARGS="--only 'least-*'"
bench-contracts: setup
	$(BIN)/python -m benchmarks.contracts $(ARGS)

# The Spark source and sinks beside Spark's own Kafka connector: make bench-spark ARGS="--only 'read-*'"
bench-spark: setup
	@$(BIN)/python -c 'import numba, pyarrow, pyspark' 2>/dev/null || $(BIN)/python -m pip install --quiet --editable '.[dev,spark]'
	$(BIN)/python -m benchmarks.spark $(ARGS)

# Damaged frames; valid requests with hostile values: make fuzz ARGS=--state
fuzz: setup
	$(BIN)/python -m tests.fuzz $(if $(FRAMES),--frames $(FRAMES)) $(if $(SEED),--seed $(SEED)) $(ARGS)

# make chaos ARGS="--campaign sink" (nodes, copier, rebalance, schedule, share, once, contracts, sink)
chaos: setup
	$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED)) $(ARGS)

# As long as you like: make simulate ARGS="--seeds 0 --minutes 60", ARGS="--mutations" or ARGS="--world share"
# (worlds: small, transactions, consumer, share, schedule, sized)
simulate: setup
	$(BIN)/python -m penstock.simulation $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
