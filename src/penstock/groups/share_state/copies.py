"""Single records out of batches, as the bytes that they are, for who copies them elsewhere."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.groups.share_state.ranges import Range
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import LOG_APPEND_TIME, BatchHeader, iter_batches, open_batch, wrap_int64
from penstock.protocol.varint import read_varint, read_varlong


class Copy(NamedTuple):
    """`key_and_value` with their lengths, `headers` without their count; `fate` is a reason and a delivery count."""

    offset: int
    fate: tuple[int, int]
    timestamp_ms: int
    key_and_value: bytes
    headers_count: int
    headers: bytes


class Scan:
    """Looks for wanted records in a piece of a log. `seen_upto` is the offset behind what has been looked at.

    `wanted` are sorted, with what is known of them. Raises CORRUPT_MESSAGE while it goes on.
    """

    def __init__(self, data: BytesLike, wanted: Sequence[Range], max_bytes: int) -> None:
        self._data = data
        self._wanted = wanted
        self._place = 0  # of the first of them that may still come
        self._max_bytes = max_bytes
        self.seen_upto = 0

    def __iter__(self) -> Iterator[Copy]:
        wanted = self._wanted
        for header, batch in iter_batches(self._data):
            while self._place < len(wanted) and wanted[self._place][1] < header.base_offset:
                self._place += 1
            self.seen_upto = header.last_offset + 1
            if self._place == len(wanted):
                return
            if wanted[self._place][0] <= header.last_offset and not header.is_control:
                yield from self._of_batch(header, batch)

    def _of_batch(self, header: BatchHeader, batch: BytesLike) -> Iterator[Copy]:
        opened, body = open_batch(batch, self._max_bytes)
        data, wanted, place = bytes(body), self._wanted, self._place
        first, last, reason, count = wanted[place]
        is_dense = opened.record_count == opened.last_offset_delta + 1
        offset, end = header.base_offset - 1, 0
        for _ in range(opened.record_count):
            length, start = read_varint(data, end)
            end = start + length
            if length < 0 or end > len(data):
                raise ApiError(ErrorCode.corrupt_message, f"record of impossible length {length}")
            offset = offset + 1 if is_dense else _offset_of(data, start, header)
            while offset > last:
                place += 1
                if place == len(wanted):
                    self._place = place
                    return
                first, last, reason, count = wanted[place]
            if offset >= first:
                yield _copy(data, start, end, header, offset, (reason, count))
        self._place = place


def _offset_of(data: bytes, start: int, header: BatchHeader) -> int:
    _, position = read_varlong(data, start + 1)
    return header.base_offset + read_varint(data, position)[0]


def _copy(data: bytes, start: int, end: int, header: BatchHeader, offset: int, fate: tuple[int, int]) -> Copy:
    time_delta, position = read_varlong(data, start + 1)
    _, fields_at = read_varint(data, position)
    length, position = read_varint(data, fields_at)
    length, position = read_varint(data, position + max(length, 0))
    fields_end = position + max(length, 0)
    headers_count, position = read_varint(data, fields_end)
    if position > end or headers_count < 0:
        raise ApiError(ErrorCode.corrupt_message, f"record at offset {offset} does not hold what it says")
    is_append_time = header.attributes & LOG_APPEND_TIME
    timestamp_ms = header.max_timestamp if is_append_time else wrap_int64(header.base_timestamp + time_delta)
    return Copy(offset, fate, timestamp_ms, data[fields_at:fields_end], headers_count, data[position:end])
