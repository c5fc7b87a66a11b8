"""Single records out of batches, as the bytes that they are, for who copies them elsewhere."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from penstock.groups.share_state.ranges import Range
from penstock.protocol.compression import BytesLike, Codec
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import (
    LOG_APPEND_TIME,
    BatchHeader,
    checksum,
    iter_batches,
    open_batch,
    wrap_int64,
)
from penstock.protocol.varint import read_varint, read_varlong


class Copy(NamedTuple):
    """`key_and_value` with their lengths, `headers` without their count; `fate` is a reason and a delivery count."""

    offset: int
    fate: tuple[int, int]
    timestamp_ms: int
    key_and_value: bytes
    headers_count: int
    headers: bytes
    #: Of the batch that it is from.
    codec: Codec


class Unreadable(NamedTuple):
    """A record that nobody can read: a broker takes what a producer sends without a look inside."""

    offset: int
    fate: tuple[int, int]


class Scan:
    """Looks for wanted records in a piece of a log. `seen_upto` is the offset behind what has been looked at.

    `wanted` are sorted, with what is known of them. It ends before a batch that is not as it was appended: another
    replica may have it.
    """

    def __init__(self, data: BytesLike, wanted: Sequence[Range], max_bytes: int) -> None:
        self._data = data
        self._wanted = wanted
        self._place = 0  # of the first of them that may still come
        self._max_bytes = max_bytes
        self._found_upto = 0  # behind the last of them that was found
        self.seen_upto = 0

    def __iter__(self) -> Iterator[Copy | Unreadable]:
        wanted = self._wanted
        for header, batch in iter_batches(self._data):
            while self._place < len(wanted) and wanted[self._place][1] < header.base_offset:
                self._place += 1
            if self._place < len(wanted) and wanted[self._place][0] <= header.last_offset:
                if header.crc != checksum(batch):
                    return
                if not header.is_control:
                    yield from self._of_batch(header, batch)
            self.seen_upto = header.last_offset + 1
            if self._place == len(wanted):
                return

    def _of_batch(self, header: BatchHeader, batch: BytesLike) -> Iterator[Copy | Unreadable]:
        try:
            yield from self._of_readable(header, batch)
        except ApiError:
            for first, last, reason, count in islice(self._wanted, self._place, None):
                if first > header.last_offset:
                    break
                first = max(first, self._found_upto, header.base_offset)
                for offset in range(first, min(last, header.last_offset) + 1):
                    yield Unreadable(offset, (reason, count))

    def _of_readable(self, header: BatchHeader, batch: BytesLike) -> Iterator[Copy | Unreadable]:
        """Raises CORRUPT_MESSAGE."""
        opened, body = open_batch(batch, self._max_bytes)
        data, codec, wanted, place = bytes(body), header.codec, self._wanted, self._place
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
                self._found_upto = offset + 1
                copied = _copied(data, start, end)
                fate = (reason, count)
                if copied is None:
                    yield Unreadable(offset, fate)
                else:
                    yield Copy(offset, fate, _timestamp(header, copied[0]), *copied[1:], codec)
        self._place = place


def _offset_of(data: bytes, start: int, header: BatchHeader) -> int:
    _, position = read_varlong(data, start + 1)
    return header.base_offset + read_varint(data, position)[0]


def _copied(data: bytes, start: int, end: int) -> tuple[int, bytes, int, bytes] | None:
    """Its time after the batch's, and what a copy has of it; None for one that is not whole."""
    try:
        time_delta, position = read_varlong(data, start + 1)
        _, fields_at = read_varint(data, position)
        fields_end = _behind(data, _behind(data, fields_at))
        headers_count, headers_at = read_varint(data, fields_end)
        if _behind_headers(data, headers_at, end, headers_count) != end:
            return None
    except ApiError:
        return None
    return time_delta, data[fields_at:fields_end], headers_count, data[headers_at:end]


def _timestamp(header: BatchHeader, time_delta: int) -> int:
    if header.attributes & LOG_APPEND_TIME:
        return header.max_timestamp
    return wrap_int64(header.base_timestamp + time_delta)


def _behind(data: bytes, position: int) -> int:
    """Where a key or value ends, which may be null."""
    length, position = read_varint(data, position)
    if length < -1:
        raise ApiError(ErrorCode.corrupt_message, f"impossible length {length}")
    return position + max(length, 0)


def _behind_headers(data: bytes, position: int, end: int, count: int) -> int:
    """Where so many headers end. One that is not whole would spoil the batch that it is copied to."""
    if not 0 <= count <= end - position:
        raise ApiError(ErrorCode.corrupt_message, f"{count} headers cannot be")
    for _ in range(count):
        length, position = read_varint(data, position)
        if length < 0:
            raise ApiError(ErrorCode.corrupt_message, "a header without a name")
        position = _behind(data, position + length)
    return position
