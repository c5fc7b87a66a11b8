"""The internal topics, in which coordinators store their state and nodes their audit trail, and the broker settings
that size each of them, declared once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.topic_names import (
    AUDIT,
    CONSUMER_OFFSETS,
    SCHEDULE,
    SHARE_GROUP_STATE,
    TRANSACTION_STATE,
)

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings


class InternalTopic(NamedTuple):
    """A topic's name, the names of the node settings that configure it, and its fixed topic settings."""

    name: str
    partitions: str
    replication_factor: str
    segment_bytes: str
    #: How long a request waits for the topic's replicas before it fails with a retriable error. Empty if none waits.
    commit_timeout_ms: str = ""
    #: None: the topic has the same min.insync.replicas as any other topic.
    min_isr: str | None = None
    configs: tuple[tuple[str, str], ...] = (("cleanup.policy", "compact"), ("compression.type", "producer"))

    def topic_configs(self, settings: NodeSettings) -> tuple[tuple[str, str], ...]:
        given = [
            *self.configs,
            ("segment.bytes", str(settings.integer(self.segment_bytes))),
            # A coordinator may write a record that is larger than the batches that clients may send.
            ("max.message.bytes", str(settings.integer("socket.request.max.bytes"))),
        ]
        if self.min_isr is not None:
            given.append(("min.insync.replicas", str(settings.integer(self.min_isr))))
        return tuple(given)

    def new_topic(self, settings: NodeSettings, active_brokers: int) -> NewTopic:
        """With fewer brokers, use fewer replicas. The controller raises the factor when brokers join."""
        return NewTopic(
            name=self.name,
            partitions=settings.integer(self.partitions),
            replication_factor=max(1, min(settings.integer(self.replication_factor), active_brokers)),
            configs=self.topic_configs(settings),
        )


CONSUMER_OFFSETS_TOPIC: Final = InternalTopic(
    CONSUMER_OFFSETS,
    partitions="offsets.topic.num.partitions",
    replication_factor="offsets.topic.replication.factor",
    segment_bytes="offsets.topic.segment.bytes",
    commit_timeout_ms="offsets.commit.timeout.ms",
)
TRANSACTION_STATE_TOPIC: Final = InternalTopic(
    TRANSACTION_STATE,
    partitions="transaction.state.log.num.partitions",
    replication_factor="transaction.state.log.replication.factor",
    segment_bytes="transaction.state.log.segment.bytes",
    commit_timeout_ms="penstock.transaction.commit.timeout.ms",
    min_isr="transaction.state.log.min.isr",
)
SHARE_STATE_TOPIC: Final = InternalTopic(
    SHARE_GROUP_STATE,
    partitions="share.coordinator.state.topic.num.partitions",
    replication_factor="share.coordinator.state.topic.replication.factor",
    segment_bytes="share.coordinator.state.topic.segment.bytes",
    commit_timeout_ms="share.coordinator.write.timeout.ms",
    min_isr="share.coordinator.state.topic.min.isr",
    # Updates build on each other, so none may be deleted before a later snapshot exists. The topic therefore overrides
    # the node's retention settings.
    configs=(
        ("cleanup.policy", "delete"),
        ("retention.ms", "-1"),
        ("retention.bytes", "-1"),
        ("compression.type", "producer"),
    ),
)
SCHEDULE_TOPIC: Final = InternalTopic(
    SCHEDULE,
    partitions="penstock.schedule.topic.num.partitions",
    replication_factor="penstock.schedule.topic.replication.factor",
    segment_bytes="penstock.schedule.topic.segment.bytes",
    commit_timeout_ms="penstock.schedule.commit.timeout.ms",
    min_isr="penstock.schedule.topic.min.isr",
    configs=(
        ("cleanup.policy", "compact"),
        ("compression.type", "producer"),
        # A source's mark says which of its records were released. Tombstones only let compaction remove records, so
        # they need not be kept for long.
        ("delete.retention.ms", "60000"),
    ),
)
AUDIT_TOPIC: Final = InternalTopic(
    AUDIT,
    partitions="penstock.audit.topic.num.partitions",
    replication_factor="penstock.audit.topic.replication.factor",
    segment_bytes="penstock.audit.topic.segment.bytes",
    # The topic's own settings may be altered; the node's retention settings do not apply to it.
    configs=(
        ("cleanup.policy", "delete"),
        ("retention.ms", str(30 * 24 * 3_600_000)),
        ("retention.bytes", str(1 << 30)),
        ("compression.type", "producer"),
    ),
)
INTERNAL_TOPICS: Final = {
    topic.name: topic
    for topic in (
        CONSUMER_OFFSETS_TOPIC,
        TRANSACTION_STATE_TOPIC,
        SHARE_STATE_TOPIC,
        SCHEDULE_TOPIC,
        AUDIT_TOPIC,
    )
}
