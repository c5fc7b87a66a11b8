"""confluent-kafka's ShareConsumer behind the few verbs that the tests share."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from confluent_kafka import AcknowledgeType, KafkaException, ShareConsumer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

TIMEOUT_S = 60.0
ACCEPT, RELEASE, REJECT = AcknowledgeType.ACCEPT, AcknowledgeType.RELEASE, AcknowledgeType.REJECT

#: Locks expire, and members get their partitions, while a test waits.
SHARE_SETTINGS = {
    "group.share.min.record.lock.duration.ms": "1000",
    "group.share.min.session.timeout.ms": "1000",
    "group.share.min.heartbeat.interval.ms": "200",
    "group.share.heartbeat.interval.ms": "200",
    "share.coordinator.state.topic.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
}

#: What is to become of a message.
Judge = Callable[[Any], AcknowledgeType]


def configure(admin: AdminClient, group: str, **settings: str) -> None:
    """`configure(admin, group, share_isolation_level="read_committed")`, as settings of the group."""
    entries = [
        ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
        for name, value in settings.items()
    ]
    resource = ConfigResource(ConfigResource.Type.GROUP, group, incremental_configs=entries)
    (done,) = admin.incremental_alter_configs([resource]).values()
    done.result(TIMEOUT_S)


def share_consumer(bootstrap: str, group: str, *topics: str, **settings: Any) -> ShareConsumer:
    given = {name.replace("_", "."): value for name, value in settings.items()}
    config = {
        "bootstrap.servers": bootstrap,
        "group.id": group,
        "share.acknowledgement.mode": "explicit",
        "log_level": 0,
    }
    client = ShareConsumer(config | given)
    client.subscribe(list(topics))
    return client


def accept(_: Any) -> AcknowledgeType:
    return ACCEPT


def work(client: ShareConsumer, judge: Judge = accept, timeout_s: float = 0.2) -> list[Any]:
    """One poll: judge what comes and wait until the broker has stored it."""
    messages = list(client.poll(timeout_s))
    for message in messages:
        if message.error():
            raise KafkaException(message.error())
        client.acknowledge(message, judge(message))
    for error in client.commit_sync(TIMEOUT_S).values():
        if error is not None:
            raise error
    return messages


def take(client: ShareConsumer, count: int, judge: Judge = accept) -> list[Any]:
    """At least `count` deliveries, or a failure that shows what came instead."""
    taken: list[Any] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(taken) < count and time.monotonic() < deadline:
        taken += work(client, judge)
    assert len(taken) >= count, f"got {len(taken)} of {count} messages: {values(taken)[:5]} ..."
    return taken


def values(messages: list[Any]) -> list[bytes | None]:
    return [message.value() for message in messages]


def counted(messages: list[Any]) -> Counter[bytes | None]:
    return Counter(values(messages))
