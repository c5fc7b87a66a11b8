"""Publishing: acknowledgements, order, keys, sizes up to the limit and beyond it, and timestamps."""

import asyncio
import itertools
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import aiokafka.errors
import kafka.errors
import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import KafkaError, KafkaException, Producer
from kafka import KafkaProducer
from tests.compat import aio, confluent, kafka_python
from tests.compat.message import CODECS, Message, numbered, values
from tests.waiting import eventually

CLIENTS: dict[str, ModuleType] = {"confluent": confluent, "kafka-python": kafka_python, "aiokafka": aio}
LIMIT_BYTES = 1_048_588
FAR_ABOVE_LIMIT_BYTES = 3_000_000


@pytest.mark.parametrize("acks", [0, 1, "all"])
@pytest.mark.parametrize("client", CLIENTS)
def test_every_level_of_acknowledgement_delivers(bootstrap: str, topic: str, client: str, acks: Any) -> None:
    idempotence = {"confluent": {}}.get(client, {"enable_idempotence": False})
    CLIENTS[client].publish(bootstrap, topic, numbered(200), acks=acks, **idempotence)
    received = kafka_python.read(bootstrap, topic, 200)
    assert values(received) == values_of(numbered(200))


@pytest.mark.parametrize("client", CLIENTS)
def test_an_idempotent_producer_delivers_in_order(bootstrap: str, topic: str, client: str) -> None:
    idempotence = {"enable_idempotence": True}
    offsets = CLIENTS[client].publish(bootstrap, topic, numbered(500), **idempotence)
    assert offsets == list(range(500))
    assert values(confluent.read(bootstrap, topic, 500)) == values_of(numbered(500))


def test_one_key_stays_in_one_partition_and_in_order(bootstrap: str, new_topic: Callable[..., str]) -> None:
    topic = new_topic(partitions=6)
    client = confluent.producer(bootstrap)
    for number in range(600):
        client.produce(topic, key=b"key-%d" % (number % 20), value=b"%d" % number)
    assert client.flush(confluent.TIMEOUT_S) == 0
    received = [each.message for each in confluent.read(bootstrap, topic, 600, partitions=6)]
    homes = {
        key: {each.partition for each in received if each.key == key} for key in {e.key for e in received}
    }
    assert all(len(partitions) == 1 for partitions in homes.values())
    assert len(set(itertools.chain(*homes.values()))) > 1
    for key in homes:
        numbers = [int(each.value or b"") for each in received if each.key == key]
        assert numbers == sorted(numbers)


def test_messages_without_a_key_reach_every_partition(bootstrap: str, new_topic: Callable[..., str]) -> None:
    topic = new_topic(partitions=4)
    client = confluent.producer(bootstrap, sticky_partitioning_linger_ms=0)
    for number in range(400):
        client.produce(topic, value=b"%d" % number)
    assert client.flush(confluent.TIMEOUT_S) == 0
    received = confluent.read(bootstrap, topic, 400, partitions=4)
    assert {each.message.partition for each in received} == {0, 1, 2, 3}
    assert sorted(int(each.message.value or b"") for each in received) == list(range(400))


@pytest.mark.parametrize("client", CLIENTS)
def test_a_message_just_below_the_limit_passes(bootstrap: str, topic: str, client: str) -> None:
    large = Message(value=b"x" * (LIMIT_BYTES - 200))
    room = "message_max_bytes" if client == "confluent" else "max_request_size"
    CLIENTS[client].publish(bootstrap, topic, [large], **{room: 2 * LIMIT_BYTES})
    for reader in CLIENTS.values():
        assert values(reader.read(bootstrap, topic, 1)) == [large.value]


def test_confluent_is_told_that_a_message_is_too_large(bootstrap: str, topic: str) -> None:
    with pytest.raises(KafkaException) as refused:
        confluent.publish(bootstrap, topic, [too_large()], message_max_bytes=2 * FAR_ABOVE_LIMIT_BYTES)
    assert refused.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE


def test_kafka_python_is_told_that_a_message_is_too_large(bootstrap: str, topic: str) -> None:
    with pytest.raises(kafka.errors.MessageSizeTooLargeError):
        kafka_python.publish(bootstrap, topic, [too_large()], max_request_size=2 * FAR_ABOVE_LIMIT_BYTES)


def test_aiokafka_is_told_that_a_message_is_too_large(bootstrap: str, topic: str) -> None:
    with pytest.raises(aiokafka.errors.MessageSizeTooLargeError):
        aio.publish(bootstrap, topic, [too_large()], max_request_size=2 * FAR_ABOVE_LIMIT_BYTES)


@pytest.mark.parametrize("codec", CODECS)
def test_a_topic_may_allow_larger_messages(bootstrap: str, new_topic: Callable[..., str], codec: str) -> None:
    topic = new_topic(**{"max.message.bytes": "5000000"})
    confluent.publish(bootstrap, topic, [too_large()], codec, message_max_bytes=2 * FAR_ABOVE_LIMIT_BYTES)
    for reader in CLIENTS.values():
        assert values(reader.read(bootstrap, topic, 1)) == [too_large().value]


def test_a_topic_may_allow_only_smaller_messages(bootstrap: str, new_topic: Callable[..., str]) -> None:
    topic = new_topic(**{"max.message.bytes": "1000"})
    confluent.publish(bootstrap, topic, [Message(value=b"x" * 500)])
    with pytest.raises(KafkaException) as refused:
        confluent.publish(bootstrap, topic, [Message(value=b"x" * 2000)])
    assert refused.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    assert len(values(confluent.read(bootstrap, topic, 1))) == 1


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("client", CLIENTS)
def test_log_append_time_replaces_the_publishers_clock(
    bootstrap: str, new_topic: Callable[..., str], client: str, codec: str
) -> None:
    topic = new_topic(**{"message.timestamp.type": "LogAppendTime"})
    before_ms = int(time.time() * 1000)
    stale = [message._replace(timestamp_ms=1) for message in numbered(20)]
    CLIENTS[client].publish(bootstrap, topic, stale, codec)
    after_ms = int(time.time() * 1000)
    received = CLIENTS[client].read(bootstrap, topic, 20)
    assert all(before_ms <= (each.message.timestamp_ms or 0) <= after_ms for each in received)


def test_publishers_learn_the_time_of_the_append(bootstrap: str, new_topic: Callable[..., str]) -> None:
    topic = new_topic(**{"message.timestamp.type": "LogAppendTime"})
    before_ms = int(time.time() * 1000)
    with KafkaProducer(bootstrap_servers=bootstrap) as client:
        sent = client.send(topic, b"value", timestamp_ms=1).get(60)
    assert before_ms <= sent.timestamp <= int(time.time() * 1000)


def test_a_timestamp_too_far_in_the_future_is_refused(bootstrap: str, new_topic: Callable[..., str]) -> None:
    topic = new_topic(**{"message.timestamp.after.max.ms": "60000"})
    tomorrow_ms = int(time.time() * 1000) + 86_400_000
    with pytest.raises(KafkaException) as refused:
        confluent.publish(bootstrap, topic, [Message(value=b"later", timestamp_ms=tomorrow_ms)])
    assert refused.value.args[0].code() == KafkaError.INVALID_TIMESTAMP


async def test_an_asyncio_batch_is_appended_whole(bootstrap: str, topic: str) -> None:
    async with aio.producing(bootstrap) as client:
        batch = client.create_batch()
        for number in range(50):
            batch.append(key=None, value=b"%d" % number, timestamp=None)
        sent = await client.send_batch(batch, topic, partition=0)
        assert (await sent).offset == 0
    received = await asyncio.to_thread(confluent.read, bootstrap, topic, 50)
    assert values(received) == values_of(numbered(50))


def test_publishing_to_a_partition_that_is_not_there_fails(bootstrap: str, topic: str) -> None:
    with pytest.raises(KafkaException) as refused:
        confluent.publish(bootstrap, topic, [Message(value=b"x", partition=7)], message_timeout_ms=3000)
    assert refused.value.args[0].code() == KafkaError._UNKNOWN_PARTITION


def test_many_requests_in_flight_keep_their_order(bootstrap: str, topic: str) -> None:
    """Small batches and five requests at a time: answers must come back in the order of the requests."""
    messages = numbered(3000)
    pipelined = {"batch_num_messages": 10, "max_in_flight": 5, "linger_ms": 0}
    assert confluent.publish(bootstrap, topic, messages, **pipelined) == list(range(3000))
    assert values(confluent.read(bootstrap, topic, 3000)) == values_of(messages)


def test_publishers_side_by_side_lose_nothing(bootstrap: str, topic: str) -> None:
    clients = [confluent.producer(bootstrap, linger_ms=0) for _ in range(5)]
    for number, client in itertools.product(range(200), clients):
        client.produce(topic, value=b"%d-%d" % (clients.index(client), number))
    assert [client.flush(confluent.TIMEOUT_S) for client in clients] == [0] * 5
    received = values(confluent.read(bootstrap, topic, 1000))
    assert sorted(received) == sorted(b"%d-%d" % pair for pair in itertools.product(range(5), range(200)))


def test_a_producer_sees_partitions_added_later(bootstrap: str, topic: str, admin: Any) -> None:
    client = Producer({"bootstrap.servers": bootstrap, "topic.metadata.refresh.interval.ms": 200})
    confluent.publish_on(client, topic, [Message(value=b"before")])
    confluent.add_partitions(admin, topic, 3)
    eventually(lambda: len(client.list_topics(topic, timeout=5).topics[topic].partitions) == 3)
    confluent.publish_on(client, topic, [Message(value=b"after", partition=2)])
    received = confluent.read(bootstrap, topic, 2, partitions=3)
    assert {(each.message.value, each.message.partition) for each in received} == {
        (b"before", 0),
        (b"after", 2),
    }


async def test_asyncio_producer_knows_the_partitions(bootstrap: str, new_topic: Callable[..., str]) -> None:
    topic = await asyncio.to_thread(new_topic, 5)
    client = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await client.start()
    try:
        assert await client.partitions_for(topic) == {0, 1, 2, 3, 4}
    finally:
        await client.stop()


def too_large() -> Message:
    return Message(value=b"x" * FAR_ABOVE_LIMIT_BYTES)


def values_of(messages: list[Message]) -> list[bytes | None]:
    return [message.value for message in messages]


async def test_a_publisher_finds_its_own_messages_counted(bootstrap: str, topic: str) -> None:
    """Whatever was acknowledged, and with acks=1 that is before it is synced, counts in the very next answer."""
    partition = aio.TopicPartition(topic, 0)
    async with aio.producing(bootstrap, acks=1, linger_ms=0) as producer, aio.consuming(bootstrap) as reader:
        for number in range(50):
            sent = await producer.send_and_wait(topic, b"%d" % number, partition=0)
            assert sent.offset == number
            assert await reader.end_offsets([partition]) == {partition: number + 1}
