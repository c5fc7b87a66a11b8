"""The topics that coordinators keep their state in, and the settings that shape them, said once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.cluster.names import CONSUMER_OFFSETS, SCHEDULE, SHARE_GROUP_STATE, TRANSACTION_STATE

if TYPE_CHECKING:
    from penstock.broker.settings import Settings


class InternalTopic(NamedTuple):
    """A topic's name, the names of the node's settings for it, and what its own settings are besides."""

    name: str
    partitions: str
    replication_factor: str
    segment_bytes: str
    #: How long a request waits for the topic's replicas before it is told to try again.
    commit_timeout_ms: str
    #: None: as any other topic.
    min_isr: str | None = None
    configs: tuple[tuple[str, str], ...] = (("cleanup.policy", "compact"), ("compression.type", "producer"))

    def topic_configs(self, settings: Settings) -> tuple[tuple[str, str], ...]:
        given = [
            *self.configs,
            ("segment.bytes", str(settings.integer(self.segment_bytes))),
            # One large record may exceed what clients may send in one batch.
            ("max.message.bytes", str(settings.integer("socket.request.max.bytes"))),
        ]
        if self.min_isr is not None:
            given.append(("min.insync.replicas", str(settings.integer(self.min_isr))))
        return tuple(given)


OFFSETS: Final = InternalTopic(
    CONSUMER_OFFSETS,
    partitions="offsets.topic.num.partitions",
    replication_factor="offsets.topic.replication.factor",
    segment_bytes="offsets.topic.segment.bytes",
    commit_timeout_ms="offsets.commit.timeout.ms",
)
TRANSACTIONS: Final = InternalTopic(
    TRANSACTION_STATE,
    partitions="transaction.state.log.num.partitions",
    replication_factor="transaction.state.log.replication.factor",
    segment_bytes="transaction.state.log.segment.bytes",
    commit_timeout_ms="penstock.transaction.commit.timeout.ms",
    min_isr="transaction.state.log.min.isr",
)
SHARE_STATE: Final = InternalTopic(
    SHARE_GROUP_STATE,
    partitions="share.coordinator.state.topic.num.partitions",
    replication_factor="share.coordinator.state.topic.replication.factor",
    segment_bytes="share.coordinator.state.topic.segment.bytes",
    commit_timeout_ms="share.coordinator.write.timeout.ms",
    min_isr="share.coordinator.state.topic.min.isr",
    # Its updates build on each other, so none may go before a later snapshot is there, whatever a node keeps of others.
    configs=(
        ("cleanup.policy", "delete"),
        ("retention.ms", "-1"),
        ("retention.bytes", "-1"),
        ("compression.type", "producer"),
    ),
)
SCHEDULED: Final = InternalTopic(
    SCHEDULE,
    partitions="penstock.schedule.topic.num.partitions",
    replication_factor="penstock.schedule.topic.replication.factor",
    segment_bytes="penstock.schedule.topic.segment.bytes",
    commit_timeout_ms="penstock.schedule.commit.timeout.ms",
    min_isr="penstock.schedule.topic.min.isr",
    configs=(
        ("cleanup.policy", "compact"),
        ("compression.type", "producer"),
        # What is released counts by its source's mark; tombstones only tell compaction.
        ("delete.retention.ms", "60000"),
    ),
)
INTERNAL_TOPICS: Final = {topic.name: topic for topic in (OFFSETS, TRANSACTIONS, SHARE_STATE, SCHEDULED)}
