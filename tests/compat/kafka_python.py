"""kafka-python behind the few verbs that the tests share."""

import time
from collections.abc import Iterable
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from tests.compat.message import Message, Received, received_record

TIMEOUT_S = 60.0


def publish(
    bootstrap: str, topic: str, messages: Iterable[Message], codec: str = "none", **settings: Any
) -> list[int]:
    defaults = {"linger_ms": 5, "compression_type": None if codec == "none" else codec}
    with KafkaProducer(bootstrap_servers=bootstrap, **(defaults | settings)) as client:
        sent = [client.send(topic, **message.send_arguments()) for message in messages]
        return [future.get(TIMEOUT_S).offset for future in sent]


def consumer(bootstrap: str, *topics: str, **settings: Any) -> KafkaConsumer:
    """A consumer that has read the metadata of its subscription before it joins.

    Where that comes after it has led the group into a generation, kafka-python 3.0 joins again. If a poll times out in
    between, it never finishes: it consumes without heartbeats, and each commit fails with RebalanceInProgressError.
    """
    defaults = {"auto_offset_reset": "earliest", "fetch_max_wait_ms": 100, "enable_auto_commit": False}
    client = KafkaConsumer(bootstrap_servers=bootstrap, **(defaults | settings))
    if topics:
        client.subscribe(topics)
        client.topics()
    return client


def read(bootstrap: str, topic: str, count: int, *, partitions: int = 1, **settings: Any) -> list[Received]:
    client = consumer(bootstrap, **settings)
    try:
        client.assign([TopicPartition(topic, index) for index in range(partitions)])
        return take(client, count)
    finally:
        client.close()


def read_to_end(bootstrap: str, topic: str) -> list[Received]:
    """All that is left of the topic's only partition, whose offsets may have gaps."""
    client, partition, received = consumer(bootstrap), TopicPartition(topic, 0), []
    try:
        client.assign([partition])
        end = client.end_offsets([partition])[partition]
        deadline = time.monotonic() + TIMEOUT_S
        while client.position(partition) < end and time.monotonic() < deadline:
            for records in client.poll(timeout_ms=200).values():
                received.extend(map(received_record, records))
        assert client.position(partition) >= end, f"stopped at {client.position(partition)} of {end}"
        return received
    finally:
        client.close()


def take(client: KafkaConsumer, count: int, within_s: float = TIMEOUT_S) -> list[Received]:
    received: list[Received] = []
    deadline = time.monotonic() + within_s
    while len(received) < count and time.monotonic() < deadline:
        for records in client.poll(timeout_ms=200, max_records=count - len(received)).values():
            received.extend(map(received_record, records))
    assert len(received) == count, f"got {len(received)} of {count} messages: {received[:5]} ..."
    return received
