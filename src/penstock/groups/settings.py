"""The node settings that the rules of groups depend on, by Kafka's names."""

from dataclasses import dataclass

from penstock.groups.config import GroupConfig

_MINUTE_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    session_timeout_min_ms: int = 6_000  # group.min.session.timeout.ms
    session_timeout_max_ms: int = 1_800_000  # group.max.session.timeout.ms
    initial_rebalance_delay_ms: int = 3_000  # group.initial.rebalance.delay.ms
    size_max: int = 2**31 - 1  # group.max.size
    #: A member that joins for the first time cannot heartbeat yet; its parked join is answered after this.
    new_member_join_timeout_ms: int = 5 * _MINUTE_MS
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
        """Of a group without settings of its own, as far as the rules of membership ask."""
        return GroupConfig(
            consumer_session_timeout_ms=self.consumer_session_timeout_ms,
            share_session_timeout_ms=self.share_session_timeout_ms,
            streams_session_timeout_ms=self.streams_session_timeout_ms,
        )
