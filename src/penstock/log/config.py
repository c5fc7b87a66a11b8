"""`LogConfig`: the topic settings that one log uses, and the bounds of this package."""

from typing import Final, Literal, NamedTuple

DAY_MS: Final = 24 * 60 * 60 * 1000
INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1

TimestampType = Literal["CreateTime", "LogAppendTime"]
FlushPolicy = Literal["ack", "interval", "never"]


class LogConfig(NamedTuple):
    segment_bytes: int = 1 << 30
    segment_ms: int = 7 * DAY_MS
    segment_index_bytes: int = 10 << 20
    index_interval_bytes: int = 4096
    retention_ms: int = 7 * DAY_MS
    retention_bytes: int = -1
    cleanup_delete: bool = True
    cleanup_compact: bool = False
    max_message_bytes: int = 1_048_588
    min_cleanable_dirty_ratio: float = 0.5
    delete_retention_ms: int = DAY_MS
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = INT64_MAX
    file_delete_delay_ms: int = 60_000
    timestamp_type: TimestampType = "CreateTime"
    timestamp_before_max_ms: int = INT64_MAX
    timestamp_after_max_ms: int = 3_600_000
    compression_type: str = "producer"
    flush: FlushPolicy = "ack"
    flush_interval_ms: int = 1000
    #: How large the records of a batch may become when it is decompressed (for a look-up by timestamp, or compaction).
    decoded_bytes_max: int = 64 << 20
    #: Whether records may be held until they are due.
    schedule: bool = False
    #: Whether writes continue on a full disk: without the metadata log nothing could be deleted.
    uses_reserve: bool = False
    #: A segment rolls before it would have more bytes than this, even if it may have more.
    roll_bytes: int = INT64_MAX
    #: Whether batches may be refused for good or acknowledged without being stored, so that sequences have gaps.
    accepts_gaps: bool = False

    @property
    def roll_bytes_max(self) -> int:
        return min(self.segment_bytes, self.roll_bytes)

    @property
    def segment_ms_max(self) -> int:
        """Only closed segments are compacted, so the active one must roll within max.compaction.lag.ms."""
        if self.cleanup_compact and self.max_compaction_lag_ms > 0:
            return min(self.segment_ms, self.max_compaction_lag_ms)
        return self.segment_ms
