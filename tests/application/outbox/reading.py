"""Reads the committed messages of topics from beginning to end."""

from collections.abc import Sequence
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from tests.waiting import eventually

SETTINGS = {
    "group.id": "reader",
    "isolation.level": "read_committed",
    "enable.partition.eof": True,
    "fetch.wait.max.ms": 20,
}
READ_S = 30.0


def messages(bootstrap: str, topics: Sequence[str]) -> list[Any]:
    """In the order of the log within each partition."""
    reader = Consumer({"bootstrap.servers": bootstrap, **SETTINGS})
    try:
        known = reader.list_topics(timeout=READ_S).topics
        there = [topic for topic in topics if topic in known]
        places = [TopicPartition(topic, index, 0) for topic in there for index in known[topic].partitions]
        _await_markers(bootstrap, places)
        reader.assign(places)
        found = _to_the_end(reader, len(places))
        return sorted(found, key=lambda message: (message.topic(), message.partition(), message.offset()))
    finally:
        reader.close()


def _await_markers(bootstrap: str, places: list[TopicPartition]) -> None:
    """Waits until no transaction is open: its end is acknowledged before its markers are written."""
    admin = AdminClient({"bootstrap.servers": bootstrap})

    def ends(isolation: IsolationLevel) -> list[int]:
        asked = admin.list_offsets(dict.fromkeys(places, OffsetSpec.latest()), isolation_level=isolation)
        return [found.result(READ_S).offset for found in asked.values()]

    if places:
        eventually(lambda: ends(IsolationLevel.READ_COMMITTED) == ends(IsolationLevel.READ_UNCOMMITTED))


def _to_the_end(reader: Any, partitions: int) -> list[Any]:
    found = []
    while partitions:
        message = reader.poll(READ_S)
        assert message is not None, f"{partitions} partitions are not read to their end"
        if message.error() is None:
            found.append(message)
        else:
            assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
            partitions -= 1
    return found
