"""The same contracts on Apache Kafka, where its jars can be had."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.application.apps import QUICK, header, read_all, running
from tests.compat import apache_kafka
from tests.compat.apache_kafka import ApacheKafka

from penstock.client import Backoff, Message, Penstock
from penstock.protocol import letters

pytestmark = pytest.mark.skipif(
    not apache_kafka.can_be_had(), reason="needs java and the jars in PENSTOCK_KAFKA_LIBS"
)
COUNT = 40


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    process = ApacheKafka(tmp_path_factory.mktemp("kafka"), ["PLAINTEXT"], {}).start()
    yield process.address("PLAINTEXT")
    process.stop()


@pytest.mark.parametrize("delivery", ["at-most-once", "at-least-once", "effectively-once", "exactly-once"])
def test_a_contract(kafka: str, tmp_path: Path, delivery: str) -> None:
    app = Penstock(kafka, settings=QUICK)
    topic, invoices = f"orders-{delivery}", f"invoices-{delivery}"
    app.create_topic(topic, partitions=2)
    app.create_topic(invoices, partitions=1)
    retries = None if delivery == "at-most-once" else Backoff(base="50ms", cap="100ms", attempts=3)
    store = f"sqlite:///{tmp_path}/seen.db" if delivery == "effectively-once" else None
    attempts: dict[int, int] = {}

    @app.subscribe(topic, group=delivery, delivery=delivery, retry=retries, store=store, to=invoices)
    def bill(order: dict[str, int], message: Message) -> dict[str, int]:
        attempts[order["id"]] = message.attempt
        if order["id"] == 7 or (order["id"] == 11 and message.attempt == 1):
            raise RuntimeError("cannot be billed")
        return order

    for number in range(COUNT):
        app.publish_soon(topic, {"id": number}, key=str(number))
    bad = {7} if retries else {7, 11}
    figures = app.figures()[bill.__qualname__]
    with running(app, until=lambda: figures.handled == COUNT - len(bad) and figures.dead == len(bad)):
        pass
    found = sorted(json.loads(each.value())["id"] for each in read_all(kafka, invoices))
    assert found == [number for number in range(COUNT) if number not in bad]
    assert {json.loads(each.value())["id"] for each in read_all(kafka, f"{topic}.dlq")} == bad
    assert attempts[7] == (3 if retries else 1)
    assert {header(each, letters.GROUP) for each in read_all(kafka, f"{topic}.dlq")} == {delivery}


def test_a_ledger(kafka: str, tmp_path: Path) -> None:
    app = Penstock(kafka, settings=QUICK)
    app.create_topic("sales", partitions=2)
    with Penstock(kafka) as other:
        for number in range(COUNT):
            other.publish_soon("sales", {"id": number}, key=str(number))

    @app.subscribe("sales", group="totals", delivery="exactly-once", ledger=f"sqlite:///{tmp_path}/totals.db")
    def add(sale: dict[str, int], connection: object) -> None:
        connection.execute("CREATE TABLE IF NOT EXISTS sold (id INTEGER)")  # type: ignore[attr-defined]
        connection.execute("INSERT INTO sold VALUES (?)", (sale["id"],))  # type: ignore[attr-defined]

    figures = app.figures()[add.__qualname__]
    with running(app, until=lambda: figures.handled == COUNT):
        pass
    with sqlite3.connect(tmp_path / "totals.db") as database:
        assert sorted(row[0] for row in database.execute("SELECT id FROM sold")) == list(range(COUNT))
