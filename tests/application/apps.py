"""Applications in tests: started in this process, watched until they have done what is expected, and closed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, TopicPartition
from tests.waiting import PATIENCE_S, eventually

from penstock.client import Penstock

#: Rebalances of tests need not wait for slow members.
QUICK = {"session.timeout.ms": 6_000, "heartbeat.interval.ms": 500, "fetch.wait.max.ms": 50}


@contextmanager
def running(app: Penstock, until: Callable[[], bool], within_s: float = PATIENCE_S) -> Iterator[None]:
    """Begins the subscriptions, and goes on when `until` says so; then everything is closed."""
    app.start()
    try:
        eventually(until, within_s=within_s, what="what the application is to do")
        yield
    finally:
        app.close()


def read_all(bootstrap: str, topic: str) -> list[Any]:
    """Every committed message of a topic."""
    reader = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    try:
        found = reader.list_topics(topic, timeout=60).topics[topic]
        left = set(found.partitions)
        reader.assign([TopicPartition(topic, number, 0) for number in left])
        messages = []
        while left:
            message = reader.poll(60)
            assert message is not None, f"no end of {topic}"
            if message.error() is None:
                messages.append(message)
            else:
                left.discard(message.partition())
        return messages
    finally:
        reader.close()


def header(message: Any, name: str) -> str | None:
    found = dict(message.headers() or ()).get(name)
    return found.decode() if found is not None else None


def committed(bootstrap: str, group: str, topic: str, partitions: int = 1) -> dict[int, int]:
    reader = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False})
    try:
        told = reader.committed([TopicPartition(topic, number) for number in range(partitions)], timeout=10)
        return {each.partition: each.offset for each in told}
    finally:
        reader.close()
