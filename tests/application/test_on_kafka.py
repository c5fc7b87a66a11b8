"""The contracts on Apache Kafka, if its jars are available."""

import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.application.apps import QUICK, header, read_all, running
from tests.compat import apache_kafka
from tests.compat.apache_kafka import ApacheKafka
from tests.waiting import eventually

from penstock.client import Backoff, Message, Penstock
from penstock.protocol import dead_letter_headers

pytestmark = apache_kafka.NEEDED
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
    assert {header(each, dead_letter_headers.GROUP_HEADER) for each in read_all(kafka, f"{topic}.dlq")} == {
        delivery
    }


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


# -- plain calls and share groups --------------------------------------------------------------------------


@pytest.fixture
def app(kafka: str) -> Iterator[Penstock]:
    with Penstock(kafka, settings=QUICK) as made:
        yield made


@pytest.fixture
def jobs(app: Penstock, unique: Callable[[str], str]) -> str:
    name = unique("jobs")
    app.create_topic(name, partitions=2)
    for future in [app.publish_soon(name, number) for number in range(20)]:
        future.result(30)
    return name


def test_plain_calls(app: Penstock, jobs: str, group: str) -> None:
    retry = Backoff(base="50ms", cap="50ms", attempts=2)
    seen: Counter[tuple[int, int]] = Counter()
    with app.consumer(jobs, group=group, retry=retry) as consumer:

        def all_was_seen() -> bool:
            for message in consumer.poll(timeout="500ms"):
                number = message.payload(int)
                seen[number, message.attempt] += 1
                if number == 3 and message.attempt == 1:
                    consumer.nack(message)
                else:
                    consumer.ack(message)
            return seen.total() >= 21

        eventually(all_was_seen)
    assert seen == Counter([*((number, 1) for number in range(20)), (3, 2)])


def test_a_share_group_tries_again_at_once_and_says_so(
    app: Penstock, jobs: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    done: Counter[int] = Counter()

    @app.subscribe(
        jobs, group=group, share=True, concurrency=2, retry=Backoff(base="1h", cap="1h", attempts=3)
    )
    def work(number: int, message: Message) -> None:
        if number == 3 and message.attempt == 1:
            raise RuntimeError("once")
        done[number] += 1

    with caplog.at_level(logging.WARNING), running(app, until=lambda: done.total() >= 20):
        pass
    assert done == Counter(range(20))
    (warning,) = [each.message for each in caplog.records if "do not support all settings" in each.message]
    assert "retried at once" in warning


def test_a_share_group_at_most_once(app: Penstock, jobs: str, group: str) -> None:
    """These brokers know nothing of it, so the members accept what they get, and know it, before it is handled."""
    tried: Counter[int] = Counter()

    @app.subscribe(jobs, group=group, share=True, delivery="at-most-once", concurrency=2)
    def work(number: int) -> None:
        tried[number] += 1
        if number == 7:
            raise RuntimeError("no")

    figures = app.figures()[work.__qualname__]
    with running(app, until=lambda: figures.handled == 19 and figures.dead == 1):
        pass
    assert tried == Counter(range(20))
    assert figures.dropped == 0
