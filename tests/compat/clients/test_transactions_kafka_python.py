"""Transactions with kafka-python, and what its admin client tells about them."""

import contextlib
from collections.abc import Callable
from typing import Any

import kafka.errors
import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.structs import OffsetAndMetadata
from tests.compat import kafka_python
from tests.compat.message import Message, numbered, values
from tests.waiting import eventually

END = b"end"

Transactional = Callable[..., KafkaProducer]


@pytest.fixture
def name(unique: Callable[[str], str]) -> str:
    return unique("tx")


@pytest.fixture
def transactional(bootstrap: str, name: str, closing: contextlib.ExitStack) -> Transactional:
    def make(**settings: Any) -> KafkaProducer:
        client = KafkaProducer(bootstrap_servers=bootstrap, transactional_id=name, **settings)
        closing.callback(client.close, timeout=1)
        client.init_transactions()
        return client

    return make


def read_all(bootstrap: str, topic: str, *, committed: bool) -> list[bytes | None]:
    kafka_python.publish(bootstrap, topic, [Message(value=END)])
    isolation = "read_committed" if committed else "read_uncommitted"
    client = kafka_python.consumer(bootstrap, isolation_level=isolation)
    found: list[bytes | None] = []
    try:
        client.assign([TopicPartition(topic, 0)])
        while not found or found[-1] != END:
            found += values(kafka_python.take(client, 1))
    finally:
        client.close()
    return [value for value in found if value != END]


def send(producer: KafkaProducer, topic: str, *messages: bytes) -> None:
    producer.begin_transaction()
    for future in [producer.send(topic, message, partition=0) for message in messages]:
        future.get(60)


def test_committed_transactions_are_seen_and_aborted_ones_are_not(
    bootstrap: str, topic: str, transactional: Transactional
) -> None:
    producer = transactional()
    send(producer, topic, b"a", b"b")
    producer.commit_transaction()
    send(producer, topic, b"never")
    producer.abort_transaction()
    send(producer, topic, b"c")
    producer.commit_transaction()
    assert read_all(bootstrap, topic, committed=True) == [b"a", b"b", b"c"]
    assert read_all(bootstrap, topic, committed=False) == [b"a", b"b", b"never", b"c"]


def test_a_zombie_is_fenced(bootstrap: str, topic: str, transactional: Transactional) -> None:
    zombie = transactional()
    send(zombie, topic, b"zombie")
    heir = transactional()
    with pytest.raises((kafka.errors.ProducerFencedError, kafka.errors.InvalidProducerEpochError)):
        zombie.commit_transaction()
    send(heir, topic, b"heir")
    heir.commit_transaction()
    assert read_all(bootstrap, topic, committed=True) == [b"heir"]


def test_what_is_consumed_and_what_is_produced_are_committed_together(
    bootstrap: str,
    new_topic: Callable[..., str],
    group: str,
    transactional: Transactional,
    closing: contextlib.ExitStack,
) -> None:
    source, target = new_topic(), new_topic()
    kafka_python.publish(bootstrap, source, numbered(10))
    reader = kafka_python.consumer(bootstrap, source, group_id=group, isolation_level="read_committed")
    closing.callback(reader.close)
    producer = transactional()
    copy(reader, producer, source, target, 4, commit=True)
    copy(reader, producer, source, target, 3, commit=False)
    place = TopicPartition(source, 0)
    eventually(lambda: reader.committed(place) == 4, what="the first offset")
    reader.seek(place, 4)
    copy(reader, producer, source, target, 6, commit=True)
    eventually(lambda: reader.committed(place) == 10, what="the last offset")
    assert read_all(bootstrap, target, committed=True) == [b"%d" % number for number in range(10)]


def copy(
    reader: KafkaConsumer, producer: KafkaProducer, source: str, target: str, count: int, *, commit: bool
) -> None:
    received = kafka_python.take(reader, count)
    send(producer, target, *(each.message.value or b"" for each in received))
    offsets = {TopicPartition(source, 0): OffsetAndMetadata(received[-1].offset + 1, "", -1)}
    producer.send_offsets_to_transaction(offsets, reader.group_metadata())
    if commit:
        producer.commit_transaction()
    else:
        producer.abort_transaction()


def test_transactions_are_listed_and_described(
    python_admin: KafkaAdminClient, topic: str, name: str, transactional: Transactional
) -> None:
    producer = transactional()

    def state() -> str:
        described = python_admin.describe_transactions([name])[name]
        return str(described.state)

    send(producer, topic, b"a")
    described = python_admin.describe_transactions([name])[name]
    assert described.topic_partitions == {TopicPartition(topic, 0)}
    listed = [
        each
        for found in python_admin.list_transactions(state_filters=["Ongoing"]).values()
        for each in found
        if each.transactional_id == name
    ]
    assert [each.producer_id for each in listed] == [described.producer_id]
    producer.commit_transaction()
    eventually(lambda: "complete" in state().lower(), what="the end of the transaction")
    assert python_admin.find_hanging_transactions() == []
