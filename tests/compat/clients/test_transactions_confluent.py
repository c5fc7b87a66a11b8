"""Transactions with confluent-kafka (librdkafka): all or nothing, fencing, offsets, and a coordinator that dies."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from tests.brokers import BrokerProcess
from tests.compat import confluent
from tests.compat.message import Message, numbered, values

END = b"end"
TIMEOUT_S = 60.0

Transactional = Callable[..., Producer]


@pytest.fixture
def transactional(bootstrap: str, unique: Callable[[str], str]) -> Transactional:
    """`transactional(**settings)`: one more producer of the test's transactional id, which fences those before."""
    name = unique("tx")

    def make(servers: str = bootstrap, **settings: Any) -> Producer:
        producer = confluent.producer(servers, transactional_id=name, **settings)
        producer.init_transactions(TIMEOUT_S)
        return producer

    return make


def read_all(bootstrap: str, topic: str, *, committed: bool) -> list[bytes | None]:
    """All that a consumer of that isolation gets to see; what is published last shows that there is no more."""
    confluent.publish(bootstrap, topic, [Message(value=END)])
    isolation = "read_committed" if committed else "read_uncommitted"
    client = confluent.consumer(bootstrap, isolation_level=isolation)
    found: list[bytes | None] = []
    try:
        confluent.assign(client, [TopicPartition(topic, 0, 0)])
        while not found or found[-1] != END:
            found += values(confluent.take(client, 1))
    finally:
        client.close()
    return [value for value in found if value != END]


def send(producer: Producer, topic: str, *messages: bytes) -> None:
    producer.begin_transaction()
    for message in messages:
        producer.produce(topic, message)


def test_committed_transactions_are_seen_and_aborted_ones_are_not(
    bootstrap: str, topic: str, transactional: Transactional
) -> None:
    producer = transactional()
    send(producer, topic, b"a", b"b")
    producer.commit_transaction(TIMEOUT_S)
    send(producer, topic, b"never")
    assert producer.flush(TIMEOUT_S) == 0
    producer.abort_transaction(TIMEOUT_S)
    send(producer, topic, b"c")
    producer.commit_transaction(TIMEOUT_S)
    assert read_all(bootstrap, topic, committed=True) == [b"a", b"b", b"c"]
    assert read_all(bootstrap, topic, committed=False) == [b"a", b"b", b"never", b"c"]


def test_a_transaction_over_many_partitions_is_one(
    bootstrap: str, new_topic: Callable[..., str], transactional: Transactional
) -> None:
    topic = new_topic(partitions=6)
    producer = transactional()
    producer.begin_transaction()
    for number in range(600):
        producer.produce(topic, b"%d" % number, partition=number % 6)
    assert producer.flush(TIMEOUT_S) == 0
    reader = confluent.consumer(bootstrap, isolation_level="read_committed")
    try:
        confluent.assign(reader, [TopicPartition(topic, index, 0) for index in range(6)])
        assert reader.consume(1, timeout=0.5) == []
        producer.commit_transaction(TIMEOUT_S)
        found = sorted(int(value or b"") for value in values(confluent.take(reader, 600)))
        assert found == list(range(600))
    finally:
        reader.close()


def test_readers_of_what_is_committed_wait_behind_an_open_transaction(
    bootstrap: str, topic: str, transactional: Transactional
) -> None:
    producer = transactional()
    send(producer, topic, b"open")
    assert producer.flush(TIMEOUT_S) == 0
    confluent.publish(bootstrap, topic, [Message(value=b"plain")])
    reader = confluent.consumer(bootstrap, isolation_level="read_committed")
    try:
        confluent.assign(reader, [TopicPartition(topic, 0, 0)])
        assert reader.consume(1, timeout=0.5) == []
        assert reader.get_watermark_offsets(TopicPartition(topic, 0), timeout=TIMEOUT_S) == (0, 0)
        producer.commit_transaction(TIMEOUT_S)
        assert values(confluent.take(reader, 2)) == [b"open", b"plain"]
    finally:
        reader.close()


def test_a_zombie_is_fenced(bootstrap: str, topic: str, transactional: Transactional) -> None:
    zombie = transactional()
    send(zombie, topic, b"zombie")
    assert zombie.flush(TIMEOUT_S) == 0
    heir = transactional()
    with pytest.raises(KafkaException) as refused:
        zombie.commit_transaction(TIMEOUT_S)
    assert refused.value.args[0].fatal()
    assert refused.value.args[0].code() == KafkaError._FENCED
    send(heir, topic, b"heir")
    heir.commit_transaction(TIMEOUT_S)
    assert read_all(bootstrap, topic, committed=True) == [b"heir"]


def test_a_transaction_that_takes_too_long_is_aborted(
    bootstrap: str, topic: str, transactional: Transactional, tuned_broker: BrokerProcess
) -> None:
    producer = transactional(transaction_timeout_ms=1000)
    send(producer, topic, b"slow")
    assert producer.flush(TIMEOUT_S) == 0
    confluent.publish(bootstrap, topic, [Message(value=b"plain")])
    reader = confluent.consumer(bootstrap, isolation_level="read_committed")
    try:
        confluent.assign(reader, [TopicPartition(topic, 0, 0)])
        assert values(confluent.take(reader, 1)) == [b"plain"], "the broker aborts it unasked"
    finally:
        reader.close()
    with pytest.raises(KafkaException):
        producer.commit_transaction(TIMEOUT_S)


def test_what_is_consumed_and_what_is_produced_are_committed_together(
    bootstrap: str, new_topic: Callable[..., str], group: str, transactional: Transactional
) -> None:
    source, target = new_topic(), new_topic()
    confluent.publish(bootstrap, source, numbered(20))
    with contextlib.ExitStack() as closing:
        reader = confluent.consumer(bootstrap, group, isolation_level="read_committed")
        closing.callback(reader.close)
        reader.subscribe([source])
        producer = transactional()
        copy(reader, producer, target, 8, commit=True)
        copy(reader, producer, target, 5, commit=False)
        assert committed_offset(reader, source) == 8
    with contextlib.ExitStack() as closing:
        reader = confluent.consumer(bootstrap, group, isolation_level="read_committed")
        closing.callback(reader.close)
        reader.subscribe([source])
        copy(reader, transactional(), target, 12, commit=True)
        assert committed_offset(reader, source) == 20
    assert read_all(bootstrap, target, committed=True) == [b"%d" % number for number in range(20)]


def copy(reader: Consumer, producer: Producer, target: str, count: int, *, commit: bool) -> None:
    received = confluent.take(reader, count)
    send(producer, target, *(each.message.value or b"" for each in received))
    positions = reader.position(reader.assignment())
    producer.send_offsets_to_transaction(positions, reader.consumer_group_metadata(), TIMEOUT_S)
    if commit:
        producer.commit_transaction(TIMEOUT_S)
    else:
        producer.abort_transaction(TIMEOUT_S)


def committed_offset(reader: Consumer, topic: str) -> int:
    (found,) = reader.committed([TopicPartition(topic, 0)], timeout=TIMEOUT_S)
    return int(found.offset)


@pytest.mark.parametrize("commits", [True, False])
def test_a_transaction_outlives_its_coordinator(fresh_broker: BrokerProcess, commits: bool) -> None:
    """Killed with the transaction open; the producer ends it as if nothing had happened."""
    servers, topic = fresh_broker.bootstrap_servers, "orders"
    producer = confluent.producer(servers, transactional_id="tx")
    producer.init_transactions(TIMEOUT_S)
    send(producer, topic, b"before")
    assert producer.flush(TIMEOUT_S) == 0
    fresh_broker.kill()
    fresh_broker.start()
    producer.produce(topic, b"after")
    end(producer, commits)
    send(producer, topic, b"next")
    end(producer, True)
    expected = [b"before", b"after", b"next"] if commits else [b"next"]
    assert read_all(servers, topic, committed=True) == expected


def end(producer: Producer, commits: bool) -> None:
    """As librdkafka asks for it: again while the error says so."""
    finish = producer.commit_transaction if commits else producer.abort_transaction
    for _ in range(12):
        try:
            return finish(5)
        except KafkaException as error:
            if not error.args[0].retriable():
                raise
    raise AssertionError("the transaction does not end")
