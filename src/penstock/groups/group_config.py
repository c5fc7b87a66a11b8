"""The settings that the group rules use.

`GroupConfig` holds the settings of one group; `GroupCoordinatorConfig` holds the settings of the node, with Kafka's
names in the comments. Every node loads this module when it starts, so it imports nothing heavy.
"""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

#: Stands for the source topic in the name of a dead-letter topic.
_TOPIC_PLACEHOLDER: Final = "{topic}"


class OffsetReset(NamedTuple):
    """Where a share group starts in a topic that is new to it."""

    kind: Literal["earliest", "latest", "by_duration"]
    duration_ms: int = 0  # how far back from now, for by_duration

    def timestamp_ms(self, now_ms: int) -> int:
        assert self.kind == "by_duration"
        return now_ms - self.duration_ms


_LATEST: Final = OffsetReset("latest")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Every field has the setting's name with underscores, shortened if the name is long."""

    consumer_session_timeout_ms: int = 45_000
    consumer_heartbeat_interval_ms: int = 5_000
    consumer_assignment_interval_ms: int = 1_000

    streams_session_timeout_ms: int = 45_000
    streams_heartbeat_interval_ms: int = 5_000
    streams_assignment_interval_ms: int = 1_000
    streams_initial_rebalance_delay_ms: int = 3_000
    streams_num_standby_replicas: int = 0

    share_session_timeout_ms: int = 45_000
    share_heartbeat_interval_ms: int = 5_000
    share_record_lock_duration_ms: int = 30_000
    share_delivery_count_limit: int = 5
    share_partition_max_record_locks: int = 2_000
    share_auto_offset_reset: OffsetReset = _LATEST
    share_isolation_level: Literal["read_committed", "read_uncommitted"] = "read_uncommitted"
    share_renew_acknowledge_enable: bool = True

    share_delivery: Literal["at-least-once", "at-most-once"] = "at-least-once"
    share_acquire_mode: Literal["batch_optimized", "record_limit"] = "batch_optimized"
    share_backoff: Literal["none", "fixed", "exponential"] = "none"
    share_backoff_ms: int = 1_000
    share_backoff_max_ms: int = 60_000
    share_backoff_jitter_ms: int = 1_000  # equals the base backoff if the setting is -1

    dead_letter_topic: str = f"{_TOPIC_PLACEHOLDER}.dlq"  # a pattern: use dead_letter_topic_of
    dead_letter_copies_record: bool = True
    dead_letter_rate_max: float | None = None  # per second; None means no limit
    dead_letter_share_max: float | None = None  # fraction of the delivered records; None means no limit

    @property
    def share_reads_committed(self) -> bool:
        return self.share_isolation_level == "read_committed"

    @property
    def share_is_exact(self) -> bool:
        """Whether a member never gets more records than it requests."""
        return self.share_acquire_mode == "record_limit"

    @property
    def is_at_most_once(self) -> bool:
        return self.share_delivery == "at-most-once"

    def dead_letter_topic_of(self, topic: str) -> str | None:
        """The dead-letter topic for this topic's records; None if dead letters are disabled."""
        return self.dead_letter_topic.replace(_TOPIC_PLACEHOLDER, topic) or None


_MINUTE_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCoordinatorConfig:
    session_timeout_min_ms: int = 6_000  # group.min.session.timeout.ms
    session_timeout_max_ms: int = 1_800_000  # group.max.session.timeout.ms
    initial_rebalance_delay_ms: int = 3_000  # group.initial.rebalance.delay.ms
    size_max: int = 2**31 - 1  # group.max.size
    #: A new member cannot send heartbeats while its first join waits; it is removed after this time.
    new_member_join_timeout_ms: int = 5 * _MINUTE_MS
    #: Whether clients may not see all topics: then only the topics that a member may describe match its expression.
    hides_topics: bool = False
    offset_metadata_max_bytes: int = 4_096  # offset.metadata.max.bytes
    offsets_retention_ms: int = 7 * 24 * 60 * _MINUTE_MS  # offsets.retention.minutes
    offsets_retention_check_interval_ms: int = 10 * _MINUTE_MS  # offsets.retention.check.interval.ms
    consumer_session_timeout_ms: int = 45_000  # group.consumer.session.timeout.ms, unless a group has its own
    consumer_size_max: int = 2**31 - 1  # group.consumer.max.size
    consumer_assignors: tuple[str, ...] = ("uniform", "range")  # group.consumer.assignors
    consumer_migration_policy: str = "bidirectional"  # group.consumer.migration.policy
    share_session_timeout_ms: int = 45_000  # group.share.session.timeout.ms, unless a group has its own
    share_size_max: int = 200  # group.share.max.size
    streams_session_timeout_ms: int = 45_000  # group.streams.session.timeout.ms, unless a group has its own
    streams_size_max: int = 2**31 - 1  # group.streams.max.size

    def config_of(self, group_id: str) -> GroupConfig:
        """The settings of a group that has none of its own, as far as the membership rules use them."""
        return GroupConfig(
            consumer_session_timeout_ms=self.consumer_session_timeout_ms,
            share_session_timeout_ms=self.share_session_timeout_ms,
            streams_session_timeout_ms=self.streams_session_timeout_ms,
        )
