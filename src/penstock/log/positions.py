"""The values that an append and a read hand back."""

from typing import NamedTuple


class LogPosition(NamedTuple):
    """An offset and the place in the files where the batch that starts there is, or will be."""

    offset: int
    segment_base: int
    position: int


class Appended(NamedTuple):
    base_offset: int
    last_offset: int
    append_time_ms: int  # -1 unless the topic stamps LogAppendTime
    duplicate: bool
    end: LogPosition  # of the log after this append


class Slice(NamedTuple):
    """Raw bytes of whole batches, and the offset to read from next."""

    data: bytes | bytearray
    next_offset: int


class TimestampMatch(NamedTuple):
    timestamp: int
    offset: int
    leader_epoch: int
