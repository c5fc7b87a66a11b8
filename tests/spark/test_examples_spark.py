"""The Spark examples run as a newcomer would run them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from tests.brokers import BrokerProcess, executable

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 850.0

ORDER = {"id": "1", "customer": "ada", "quantity": 2, "price": 1.5}


def run(*command: str) -> str:
    """Run in the project folder, and show the output of a failure."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_topics_as_tables(fresh_broker: BrokerProcess) -> None:
    printed = run(sys.executable, "examples/spark_topics.py", fresh_broker.bootstrap_servers)
    assert printed == "ada: 2\ngrace: 1\n"


def test_a_pipeline(fresh_broker: BrokerProcess, tmp_path: Path) -> None:
    bootstrap = fresh_broker.bootstrap_servers
    publish(bootstrap, [json.dumps(ORDER), "no order", json.dumps({**ORDER, "price": 1e6})])
    options = ["--bootstrap", bootstrap, "--checkpoints", str(tmp_path), "--once"]
    run(*executable(), "pipeline", "run", "examples/orders_pipeline.py", *options)
    (clean,) = read(bootstrap, "orders.clean", 1)
    assert (clean.key(), json.loads(clean.value())) == (b"ada", {"id": "1", "customer": "ada", "total": 3.0})
    (dead_letter,) = read(bootstrap, "orders.dlq", 1)
    assert dead_letter.value() == b"no order"
    assert dict(dead_letter.headers())["__dlq.errors.topic"] == b"orders"


def publish(bootstrap: str, orders: list[str]) -> None:
    producer = Producer({"bootstrap.servers": bootstrap})
    for order in orders:
        producer.produce("orders", order, key="ada")
    producer.flush()


def read(bootstrap: str, topic: str, count: int) -> list[Any]:
    """Return the expected number of messages, and one more if there is one."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "test", "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    found = consumer.consume(count, timeout=30)
    consumer.close()
    return found
