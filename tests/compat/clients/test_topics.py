"""Topics: auto-creation, retention, compaction, deletion, and creation with the same name."""

import contextlib
import time
import uuid
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka import KafkaConsumer
from kafka.admin import ConfigResource
from tests.brokers import BrokerProcess
from tests.compat import aio, confluent, kafka_python
from tests.compat.message import CODECS, Message, numbered, values
from tests.waiting import PATIENCE_S, eventually

CLIENTS: dict[str, ModuleType] = {"confluent": confluent, "kafka-python": kafka_python, "aiokafka": aio}
SEGMENT_BYTES = 1 << 20
HOUR_MS = 3_600_000
NO_ID = uuid.UUID(int=0)

COMPACTED = {
    "cleanup.policy": "compact",
    "segment.bytes": str(SEGMENT_BYTES),
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "0",
}


def watermarks(bootstrap: str, topic: str) -> tuple[int, int]:
    client = confluent.consumer(bootstrap)
    try:
        low, high = client.get_watermark_offsets(TopicPartition(topic, 0), timeout=10)
        return low, high
    finally:
        client.close()


def everything(bootstrap: str, topic: str) -> list[Message]:
    """All that is left of a topic, whose offsets may have gaps."""
    client = confluent.consumer(bootstrap, enable_partition_eof=True)
    left: list[Message] = []
    try:
        confluent.assign(client, [TopicPartition(topic, 0, OFFSET_BEGINNING)])
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            message = client.poll(1)
            if message is not None and message.error():
                assert message.error().code() == KafkaError._PARTITION_EOF
                return left
            if message is not None:
                left.append(Message(value=message.value(), key=message.key()))
        raise AssertionError("the end of the partition was not reached")
    finally:
        client.close()


@pytest.mark.parametrize("client", CLIENTS)
def test_publishing_creates_the_topic(bootstrap: str, unique: Callable[[str], str], client: str) -> None:
    topic = unique("born")
    assert CLIENTS[client].publish(bootstrap, topic, numbered(3)) == [0, 1, 2]
    assert values(confluent.read(bootstrap, topic, 3)) == [b"0", b"1", b"2"]


def test_subscribing_creates_the_topic(
    bootstrap: str, unique: Callable[[str], str], admin: AdminClient, closing: contextlib.ExitStack
) -> None:
    topic = unique("wanted")
    client = KafkaConsumer(topic, bootstrap_servers=bootstrap, group_id=topic)
    closing.callback(client.close)
    client.poll(timeout_ms=100)
    eventually(lambda: topic in admin.list_topics(timeout=60).topics)


async def test_subscribing_with_aiokafka_creates_the_topic(
    bootstrap: str, unique: Callable[[str], str], group: str
) -> None:
    topic = unique("born")
    async with aio.consuming(bootstrap, topic, group_id=group, metadata_max_age_ms=200) as client:
        await aio.publish_async(bootstrap, topic, [Message(value=b"hello")])
        assert values(await aio.take(client, 1)) == [b"hello"]


def test_asking_about_a_topic_does_not_create_it(
    python_admin: Any, admin: AdminClient, unique: Callable[[str], str]
) -> None:
    topic = unique("asked")
    [described] = python_admin.describe_topics([topic])
    assert described["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert topic not in admin.list_topics(timeout=60).topics


def test_internal_topics_are_marked(python_admin: Any, bootstrap: str, topic: str, group: str) -> None:
    client = kafka_python.consumer(bootstrap, topic, group_id=group)
    eventually(lambda: client.poll(50) is not None and client.assignment())
    client.close()
    internal = {each["name"] for each in python_admin.describe_topics() if each["is_internal"]}
    assert "__consumer_offsets" in internal


def test_a_topic_starts_afresh_under_its_old_name(
    bootstrap: str, admin: AdminClient, python_admin: Any, topic: str
) -> None:
    """A new topic id: neither the old messages nor the old offsets come back."""
    confluent.publish(bootstrap, topic, numbered(10))
    old_id = python_admin.describe_topics([topic])[0]["topic_id"]
    admin.delete_topics([topic])[topic].result(60)
    eventually(lambda: topic not in admin.list_topics(timeout=60).topics)
    confluent.create_topic(admin, topic, partitions=2)
    assert python_admin.describe_topics([topic])[0]["topic_id"] != old_id
    assert watermarks(bootstrap, topic) == (0, 0)
    assert confluent.publish(bootstrap, topic, [Message(value=b"new")]) == [0]
    for client in CLIENTS.values():
        assert values(client.read(bootstrap, topic, 1, partitions=2)) == [b"new"]


@pytest.fixture(scope="module")
def without_auto_creation(broker_with: Callable[..., BrokerProcess]) -> str:
    """The address of a broker that creates a topic only when CreateTopics asks for it."""
    return broker_with({"auto.create.topics.enable": "false"}).bootstrap_servers


def test_open_clients_find_the_topic_born_again(
    without_auto_creation: str, unique: Callable[[str], str], group: str, closing: contextlib.ExitStack
) -> None:
    bootstrap, topic = without_auto_creation, unique("topic")
    admin = AdminClient({"bootstrap.servers": bootstrap})
    confluent.create_topic(admin, topic)
    producer, consumer = _open_clients(bootstrap, topic, group, closing)
    admin.delete_topics([topic])[topic].result(60)
    eventually(lambda: topic not in admin.list_topics(timeout=60).topics)
    confluent.create_topic(admin, topic)
    eventually(lambda: _published(producer, topic))
    eventually(lambda: _polled(consumer) == b"reborn")


def test_an_open_producer_has_the_topic_created_again(
    bootstrap: str,
    admin: AdminClient,
    python_admin: Any,
    topic: str,
    group: str,
    closing: contextlib.ExitStack,
) -> None:
    """librdkafka's producers ask for auto-creation whenever they refresh what they know of a topic."""
    producer, consumer = _open_clients(bootstrap, topic, group, closing)
    old_id = python_admin.describe_topics([topic])[0]["topic_id"]
    admin.delete_topics([topic])[topic].result(60)
    eventually(lambda: python_admin.describe_topics([topic])[0].get("topic_id") not in (None, NO_ID, old_id))
    eventually(lambda: _published(producer, topic))
    eventually(lambda: _polled(consumer) == b"reborn")


def _open_clients(bootstrap: str, topic: str, group: str, closing: contextlib.ExitStack) -> tuple[Any, Any]:
    """A producer and a member of a group, both of which have used the topic."""
    producer = confluent.producer(bootstrap, topic_metadata_refresh_interval_ms=200)
    confluent.publish_on(producer, topic, numbered(5))
    consumer = confluent.consumer(bootstrap, group, topic_metadata_refresh_interval_ms=200)
    closing.callback(consumer.close)
    consumer.subscribe([topic])
    confluent.take(consumer, 5)
    return producer, consumer


def _published(producer: Any, topic: str) -> bool:
    with contextlib.suppress(KafkaException):
        confluent.publish_on(producer, topic, [Message(value=b"reborn")])
        return True
    return False


def _polled(consumer: Any) -> bytes | None:
    message = consumer.poll(0.1)
    return None if message is None or message.error() else message.value()


def test_committed_offsets_go_with_the_topic(
    bootstrap: str, admin: AdminClient, python_admin: Any, topic: str, group: str
) -> None:
    confluent.publish(bootstrap, topic, numbered(5))
    member = confluent.consumer(bootstrap, group)
    member.subscribe([topic])
    confluent.take(member, 5)
    member.commit(asynchronous=False)
    member.close()
    assert len(python_admin.list_group_offsets(group)[group]) == 1
    admin.delete_topics([topic])[topic].result(60)
    eventually(lambda: python_admin.list_group_offsets(group)[group] == {})


def test_old_messages_are_deleted(tuned_broker: Any, new_topic: Callable[..., str]) -> None:
    topic = new_topic(**{"retention.ms": "60000", "segment.bytes": str(SEGMENT_BYTES)})
    past_ms = int(time.time() * 1000) - HOUR_MS
    old = [each._replace(timestamp_ms=past_ms) for each in numbered(30, size=100_000)]
    confluent.publish(tuned_broker.bootstrap_servers, topic, old)
    eventually(lambda: watermarks(tuned_broker.bootstrap_servers, topic) == (30, 30))
    assert confluent.publish(tuned_broker.bootstrap_servers, topic, [Message(value=b"fresh")]) == [30]
    assert values(confluent.read(tuned_broker.bootstrap_servers, topic, 1)) == [b"fresh"]


def test_a_log_that_grew_too_long_loses_its_head(tuned_broker: Any, new_topic: Callable[..., str]) -> None:
    topic = new_topic(**{"retention.bytes": str(2 * SEGMENT_BYTES), "segment.bytes": str(SEGMENT_BYTES)})
    confluent.publish(tuned_broker.bootstrap_servers, topic, numbered(60, size=100_000), linger_ms=0)

    def trimmed() -> bool:
        low, high = watermarks(tuned_broker.bootstrap_servers, topic)
        return high == 60 and 10 <= low <= 45

    eventually(trimmed)
    low, _ = watermarks(tuned_broker.bootstrap_servers, topic)
    assert [
        int(each.value.rstrip(b"."))
        for each in everything(tuned_broker.bootstrap_servers, topic)
        if each.value
    ] == (list(range(low, 60)))


def test_a_compacted_topic_refuses_messages_without_a_key(
    bootstrap: str, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(**COMPACTED)
    with pytest.raises(KafkaException) as refused:
        confluent.publish(bootstrap, topic, [Message(value=b"no key")])
    assert refused.value.args[0].code() == KafkaError.INVALID_RECORD
    assert confluent.publish(bootstrap, topic, [Message(value=b"v", key=b"k")]) == [0]


def test_only_the_records_at_fault_are_blamed(bootstrap: str, new_topic: Callable[..., str]) -> None:
    """One batch, refused as a whole: the answer says which records to mend and which to send again."""
    topic = new_topic(**COMPACTED)
    client = confluent.producer(bootstrap, linger_ms=500)
    codes: dict[int, int] = {}
    for number in range(10):
        key = None if number in (2, 7) else b"key"
        client.produce(
            topic, b"v", key, 0, on_delivery=lambda error, _, n=number: codes.update({n: error.code()})
        )
    assert client.flush(confluent.TIMEOUT_S) == 0
    assert {number for number, code in codes.items() if code == KafkaError.INVALID_RECORD} == {2, 7}
    assert {code for number, code in codes.items() if number not in (2, 7)} == {
        KafkaError._INVALID_DIFFERENT_RECORD
    }


@pytest.mark.parametrize("codec", CODECS)
def test_compaction_keeps_the_newest_of_each_key(
    tuned_broker: Any, new_topic: Callable[..., str], codec: str
) -> None:
    bootstrap = tuned_broker.bootstrap_servers
    topic = new_topic(**COMPACTED)
    client = confluent.producer(bootstrap, compression_type=codec, batch_num_messages=5)
    rounds = [[Message(value=_noise(n, key), key=b"key-%d" % key) for key in range(10)] for n in range(8)]
    for messages in rounds:
        confluent.publish_on(client, topic, messages)
    eventually(lambda: len(everything(bootstrap, topic)) < 50, what="compaction")
    newest = {each.key: each.value for each in everything(bootstrap, topic)}
    assert newest == {each.key: each.value for each in rounds[-1]}
    for reader in (kafka_python, aio):
        received = reader.read_to_end(bootstrap, topic)
        assert {each.message.key: each.message.value for each in received} == newest


def _noise(number: int, key: int) -> bytes:
    """Hardly compressible, so that segments fill with every codec, and different each time."""
    seed = (number * 10 + key + 1) * 2_654_435_761
    return b"".join(((seed * (n + 1) * 40_503) % (1 << 64)).to_bytes(8, "big") for n in range(7_000))


def test_a_tombstone_removes_its_key(tuned_broker: Any, new_topic: Callable[..., str]) -> None:
    bootstrap = tuned_broker.bootstrap_servers
    topic = new_topic(**COMPACTED)
    confluent.publish(
        bootstrap, topic, [Message(value=b"kept", key=b"stays"), Message(value=b"old", key=b"goes")]
    )
    confluent.publish(bootstrap, topic, [Message(value=None, key=b"goes")])

    def gone() -> bool:
        """New segments give the cleaner its second pass over the tombstone."""
        confluent.publish(bootstrap, topic, [Message(value=b"." * 600_000, key=b"filler") for _ in range(4)])
        keys = {each.key for each in everything(bootstrap, topic)}
        assert b"stays" in keys
        return b"goes" not in keys

    eventually(gone)


def test_settings_changed_later_take_effect(
    tuned_broker: Any, python_admin: Any, new_topic: Callable[..., str]
) -> None:
    bootstrap = tuned_broker.bootstrap_servers
    topic = new_topic(**{"retention.ms": "-1"})
    past_ms = int(time.time() * 1000) - HOUR_MS
    confluent.publish(bootstrap, topic, [Message(value=b"old", timestamp_ms=past_ms)])
    assert watermarks(bootstrap, topic) == (0, 1)
    python_admin.alter_configs([ConfigResource("TOPIC", topic, {"retention.ms": "60000"})])
    eventually(lambda: watermarks(bootstrap, topic) == (1, 1))
    python_admin.alter_configs([ConfigResource("TOPIC", topic, {"max.message.bytes": "500"})])

    def refused() -> bool:
        with contextlib.suppress(KafkaException):
            confluent.publish(bootstrap, topic, [Message(value=b"x" * 1000)])
            return False
        return True

    eventually(refused)
