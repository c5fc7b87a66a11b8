"""confluent-kafka (librdkafka) behind the few verbs that the tests share."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic
from tests.compat.message import Message, Received
from tests.topics import create_topics
from tests.waiting import eventually

TIMEOUT_S = 60.0


def create_topic(
    admin: AdminClient, name: str, partitions: int = 1, settings: Mapping[str, str] | None = None
) -> str:
    """Create a topic and wait until it can be used, which a cluster does not promise with its answer."""
    topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dict(settings or {}))
    create_topics(admin, topic)
    eventually(lambda: _leaders(admin, name) == partitions, what=f"topic {name} with leaders")
    return name


def add_partitions(admin: AdminClient, name: str, total: int) -> None:
    admin.create_partitions([NewPartitions(name, total)])[name].result(TIMEOUT_S)
    eventually(lambda: _leaders(admin, name) == total, what=f"topic {name} with {total} leaders")


def _leaders(admin: AdminClient, name: str) -> int:
    described = admin.list_topics(name, timeout=TIMEOUT_S).topics[name]
    return sum(partition.leader >= 0 for partition in described.partitions.values())


def producer(bootstrap: str, **settings: Any) -> Producer:
    return Producer({"bootstrap.servers": bootstrap, "linger.ms": 5} | _dotted(settings))


def publish(
    bootstrap: str, topic: str, messages: Iterable[Message], codec: str = "none", **settings: Any
) -> list[int]:
    """Publish and return the offsets in the order of the messages; any failure is raised."""
    return publish_on(producer(bootstrap, compression_type=codec, **settings), topic, messages)


def publish_on(client: Producer, topic: str, messages: Iterable[Message]) -> list[int]:
    offsets: dict[int, int] = {}
    errors: list[Any] = []
    for number, message in enumerate(messages):
        client.produce(topic, **_fields(message), on_delivery=_note(offsets, errors, number))
    left = client.flush(TIMEOUT_S)
    if errors:
        raise KafkaException(errors[0])
    assert left == 0, f"{left} messages were not delivered within {TIMEOUT_S:g} s"
    return [offsets[number] for number in sorted(offsets)]


def _note(offsets: dict[int, int], errors: list[Any], number: int) -> Callable[[Any, Any], None]:
    def delivered(error: Any, message: Any) -> None:
        if error is None:
            offsets[number] = message.offset()
        else:
            errors.append(error)

    return delivered


def _fields(message: Message) -> dict[str, Any]:
    fields = {
        "value": message.value,
        "key": message.key,
        "headers": list(message.headers),
        "partition": message.partition,
    }
    return fields if message.timestamp_ms is None else fields | {"timestamp": message.timestamp_ms}


def consumer(bootstrap: str, group: str = "unused", **settings: Any) -> Consumer:
    defaults = {
        "bootstrap.servers": bootstrap,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "fetch.wait.max.ms": 100,
        "topic.metadata.refresh.interval.ms": 1000,
    }
    return Consumer(defaults | _dotted(settings))


def read(bootstrap: str, topic: str, count: int, *, partitions: int = 1, **settings: Any) -> list[Received]:
    """The first `count` messages of a topic, without joining a group."""
    client = consumer(bootstrap, **settings)
    try:
        assign(client, [TopicPartition(topic, index, OFFSET_BEGINNING) for index in range(partitions)])
        return take(client, count)
    finally:
        client.close()


def assign(client: Consumer, partitions: list[TopicPartition]) -> None:
    """Assign partitions whose leader is known already: librdkafka waits half a second for one that it must look up."""
    client.list_topics(partitions[0].topic, timeout=TIMEOUT_S)
    client.assign(partitions)


def take(client: Consumer, count: int, within_s: float = TIMEOUT_S) -> list[Received]:
    """Exactly `count` messages, or a failure that shows what came instead."""
    received: list[Received] = []
    deadline = time.monotonic() + within_s
    while len(received) < count and (left_s := deadline - time.monotonic()) > 0:
        for message in client.consume(count - len(received), timeout=min(left_s, 0.2)):
            if message.error():
                raise KafkaException(message.error())
            received.append(_received(message))
    assert len(received) == count, f"got {len(received)} of {count} messages: {received[:5]} ..."
    return received


def _received(message: Any) -> Received:
    headers = tuple((name, value) for name, value in message.headers() or ())
    common = Message(
        value=message.value(),
        key=message.key(),
        headers=headers,
        timestamp_ms=message.timestamp()[1],
        partition=message.partition(),
    )
    return Received(common, message.offset())


def assigned(client: Consumer, topic: str) -> set[int]:
    """Partitions that the group gave to this member; polling is what lets it take part."""
    client.poll(0.05)
    return {each.partition for each in client.assignment() if each.topic == topic}


def _dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("_", "."): value for name, value in settings.items()}
