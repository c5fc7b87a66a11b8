"""What a group's own settings say, as values that rules can use."""

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

#: Stands for the source topic in the name of a dead-letter topic.
_TOPIC_PLACE: Final = "{topic}"


class OffsetReset(NamedTuple):
    """Where a share group that is new to a topic begins."""

    kind: Literal["earliest", "latest", "by_duration"]
    duration_ms: int = 0  # how far back from now, for by_duration

    def timestamp_ms(self, now_ms: int) -> int:
        assert self.kind == "by_duration"
        return now_ms - self.duration_ms


_LATEST: Final = OffsetReset("latest")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Every field has the setting's name with underscores, shortened where the name of the setting is long."""

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
    share_backoff_jitter_ms: int = 1_000  # already the base where the setting is -1

    dead_letter_topic: str = f"{_TOPIC_PLACE}.dlq"  # ask dead_letter_topic_of
    dead_letter_copies_record: bool = True
    dead_letter_rate_max: float | None = None  # per second; None has no bound
    dead_letter_share_max: float | None = None  # of the delivered records; None has no bound

    @property
    def share_reads_committed(self) -> bool:
        return self.share_isolation_level == "read_committed"

    @property
    def share_is_exact(self) -> bool:
        """Whether nobody gets more records than asked for."""
        return self.share_acquire_mode == "record_limit"

    @property
    def is_at_most_once(self) -> bool:
        return self.share_delivery == "at-most-once"

    def dead_letter_topic_of(self, topic: str) -> str | None:
        """Where this topic's records go when they are given up; None keeps none."""
        return self.dead_letter_topic.replace(_TOPIC_PLACE, topic) or None
