"""Reads the committed messages of topics from beginning to end."""

from collections.abc import Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, TopicPartition

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
        reader.assign(places)
        found = _to_the_end(reader, len(places))
        return sorted(found, key=lambda message: (message.topic(), message.partition(), message.offset()))
    finally:
        reader.close()


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
