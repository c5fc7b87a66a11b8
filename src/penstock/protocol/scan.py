"""A cheap walk over the records of a batch: where each one lies, its key, and whether it has a value.

For who must look inside without needing the contents: compaction and the checks of a compacted topic.
Nothing but the key is copied, and kept records can be written again byte for byte.
"""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import BatchHeader, wrap_int64
from penstock.protocol.varint import encode_varint, read_varint, read_varlong


class RecordSpan(NamedTuple):
    start: int
    time_start: int  # where the timestamp delta begins; the byte before it holds the attributes
    time_end: int
    end: int
    timestamp_delta: int
    offset_delta: int
    key: bytes | None
    has_value: bool


def scan_records(header: BatchHeader, body: bytes | memoryview) -> Iterator[RecordSpan]:
    """The spans of an opened batch, in order; every length and count is checked. Raises CORRUPT_MESSAGE."""
    position, offset_delta = 0, -1
    for _ in range(header.record_count):
        span = _scan_record(body, position)
        if not offset_delta < span.offset_delta <= header.last_offset_delta:
            raise _corrupt(f"record out of order at offset delta {span.offset_delta}")
        position, offset_delta = span.end, span.offset_delta
        yield span
    if position != len(body):
        raise _corrupt(f"{len(body) - position} bytes after the last record")


def retimed(body: bytes | memoryview, span: RecordSpan, shift_ms: int) -> bytes:
    """The record's bytes with its timestamp delta moved, for a base timestamp that moves the other way."""
    content = b"".join(
        (
            body[span.time_start - 1 : span.time_start],
            encode_varint(wrap_int64(span.timestamp_delta + shift_ms)),
            body[span.time_end : span.end],
        )
    )
    return encode_varint(len(content)) + content


def _scan_record(data: bytes | memoryview, start: int) -> RecordSpan:
    length, position = read_varint(data, start)
    end = position + length
    if length < 0 or end > len(data):
        raise _corrupt(f"record of impossible length {length}")
    time_start = position + 1
    timestamp_delta, time_end = read_varlong(data, time_start)
    offset_delta, position = read_varint(data, time_end)
    key_start, position = _skip_sized(data, position, end)
    key = None if key_start is None else bytes(data[key_start:position])
    value_start, position = _skip_sized(data, position, end)
    if _skip_headers(data, position, end) != end:
        raise _corrupt("record length does not match its content")
    return RecordSpan(
        start, time_start, time_end, end, timestamp_delta, offset_delta, key, value_start is not None
    )


def _skip_sized(data: bytes | memoryview, position: int, end: int) -> tuple[int | None, int]:
    """Where the field's bytes begin (None for a null field) and where they end."""
    length, position = read_varint(data, position)
    if length == -1:
        return None, position
    if length < 0 or position + length > end:
        raise _corrupt(f"record field of impossible length {length}")
    return position, position + length


def _skip_headers(data: bytes | memoryview, position: int, end: int) -> int:
    count, position = read_varint(data, position)
    if count < 0 or count > (end - position) // 2:
        raise _corrupt(f"record with an impossible count of {count} headers")
    for _ in range(count):
        key_start, position = _skip_sized(data, position, end)
        if key_start is None:
            raise _corrupt("record header without a key")
        _, position = _skip_sized(data, position, end)
    return position


def _corrupt(message: str) -> ApiError:
    return ApiError(ErrorCode.corrupt_message, message)
