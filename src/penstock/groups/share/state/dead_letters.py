"""Dead letters: how many a group may write now, and how they are encoded.

The circuit breaker of a group limits its dead letters by rate and by their share of the finished records. The limits
stop a flood, for example when consumers reject a whole topic because a system behind them is down. Dead letters over a
limit wait; none is dropped. A few are allowed in every window whatever the share is, so that single poison messages of
a group with little traffic do not wait, and so that a group that has to wait continues in the end. The limits hold for
the dead letters that one coordinator writes.

A dead letter is a copy of the record with headers for its source and the reason. Key, value and the record's own
headers are copied as bytes out of the source batch and are not decoded.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple

from penstock.groups.share.state.share_state import (
    DEAD_LETTER_LIMIT,
    DEAD_LETTER_LOCK_EXPIRED,
    DEAD_LETTER_REJECTED,
    SharePartitionKey,
    StateRange,
)
from penstock.protocol import wire
from penstock.protocol.compression import BytesLike, Codec, compress
from penstock.protocol.dead_letter_headers import (
    DELIVERY_COUNT_HEADER,
    ERROR_CLASS_HEADER,
    ERROR_MESSAGE_HEADER,
    ERROR_STACK_HEADER,
    GROUP_HEADER,
    OFFSET_HEADER,
    PARTITION_HEADER,
    REASON_HEADER,
    TIMESTAMP_HEADER,
    TOPIC_HEADER,
    WITHOUT_RECORD_HEADER,
)
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import (
    LOG_APPEND_TIME,
    BatchHeader,
    checksum,
    iter_batches,
    open_batch,
    pack_new_batch,
    wrap_int64,
)
from penstock.protocol.share_failures import WorkerError
from penstock.protocol.wire import read_varint, read_varlong

#: Counts are kept per second, for about one minute with traffic.
_SECOND_MS: Final = 1_000
_SECONDS_MAX: Final = 61


class FinishedInSecond(NamedTuple):
    """How many records of each group became final in the second that began at `at_ms`."""

    at_ms: int
    counts: dict[str, int]


class FinishedCounts:
    __slots__ = ("_finished", "_second_ms")

    def __init__(self) -> None:
        self._second_ms = 0
        self._finished: deque[FinishedInSecond] = deque(maxlen=_SECONDS_MAX)

    def now(self, now_ms: int) -> None:
        """Set the time of the records that `finish` counts from here on."""
        self._second_ms = now_ms - now_ms % _SECOND_MS

    def finish(self, group: str, count: int) -> None:
        if not self._finished or self._finished[-1].at_ms != self._second_ms:
            self._finished.append(FinishedInSecond(self._second_ms, {}))
        counts = self._finished[-1].counts
        counts[group] = counts.get(group, 0) + count

    def take(self) -> tuple[FinishedInSecond, ...]:
        finished = tuple(self._finished)
        self._finished.clear()
        return finished


#: How long finished records and dead letters count.
_WINDOW_MS: Final = 60_000
_SLOTS: Final = 60
#: Dead letters that are allowed in a window whatever their share of the finished records is.
FREE_PER_WINDOW: Final = 10
#: How long to wait before the next try when no dead letter was allowed.
_RETRY_MS: Final = 1_000


class _SlidingSum:
    """A sum over the last minute, in slots of a second."""

    __slots__ = ("_slots", "total")

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self.total = 0

    def add(self, count: int, at_ms: int) -> None:
        slot = _slot(at_ms)
        self._slots[slot] = self._slots.get(slot, 0) + count
        self.total += count
        if len(self._slots) > 2 * _SLOTS:  # not queried for a long time
            self.forget_before(at_ms)

    def take_back(self, count: int, added_at_ms: int) -> None:
        """Subtract a part of what was added at that time, unless its slot has already left the window."""
        if _slot(added_at_ms) in self._slots:
            self.add(-count, added_at_ms)

    def forget_before(self, now_ms: int) -> None:
        oldest = _slot(now_ms) - _SLOTS
        for slot in [slot for slot in self._slots if slot <= oldest]:
            self.total -= self._slots.pop(slot)


def _slot(at_ms: int) -> int:
    return at_ms * _SLOTS // _WINDOW_MS


class DeadLetterBreaker:
    __slots__ = ("_dead_lettered", "_finished", "_tokens", "_tokens_at_ms", "rate_max", "share_max")

    def __init__(self, rate_max: float | None = None, share_max: float | None = None) -> None:
        """`rate_max` is dead letters per second, `share_max` their part of the finished records; None is no limit."""
        self.rate_max = rate_max
        self.share_max = share_max
        self._finished = _SlidingSum()
        self._dead_lettered = _SlidingSum()
        self._tokens = self._burst
        self._tokens_at_ms: int | None = None

    def __repr__(self) -> str:
        return f"<Breaker of {self.rate_max}/s and {self.share_max}, {self._tokens:.1f} tokens>"

    @property
    def _burst(self) -> float:
        """Up to one second of the rate may be written at once."""
        return max(self.rate_max or 0.0, 1.0)

    def configure(self, rate_max: float | None, share_max: float | None) -> None:
        if (rate_max, share_max) != (self.rate_max, self.share_max):
            self.rate_max, self.share_max = rate_max, share_max
            self._tokens = min(self._tokens, self._burst)

    def finished(self, count: int, at_ms: int) -> None:
        """Count records of the group that were acknowledged or archived at that time."""
        self._finished.add(count, at_ms)

    def take(self, wanted: int, now_ms: int) -> int:
        """Return how many of the wanted dead letters may be written now.

        They count at once, because another share partition may call this before they are written.
        """
        self._refill(now_ms)
        self._finished.forget_before(now_ms)
        self._dead_lettered.forget_before(now_ms)
        allowed = wanted
        if self.rate_max is not None:
            allowed = min(allowed, int(self._tokens))
        if self.share_max is not None:
            bound = max(int(self.share_max * self._finished.total), FREE_PER_WINDOW)
            allowed = min(allowed, max(bound - self._dead_lettered.total, 0))
        if self.rate_max is not None:
            self._tokens -= allowed  # only with a rate: a rate that is set later must not begin below zero
        self._dead_lettered.add(allowed, now_ms)
        return allowed

    def give_back(self, count: int, taken_at_ms: int) -> None:
        """Return a part of an allowance that is not written after all."""
        if self.rate_max is not None:
            self._tokens = min(self._tokens + count, self._burst)
        self._dead_lettered.take_back(count, taken_at_ms)

    def wait_ms(self) -> int:
        """Return how long to wait before the next `take` when none was allowed."""
        if self.rate_max and self._tokens < 1:
            return min(int((1 - self._tokens) / self.rate_max * 1000) + 1, _RETRY_MS)
        return _RETRY_MS

    def _refill(self, now_ms: int) -> None:
        if self.rate_max is None:
            return
        if self._tokens_at_ms is not None:
            passed_ms = max(now_ms - self._tokens_at_ms, 0)
            self._tokens = min(self._tokens + self.rate_max * passed_ms / 1000, self._burst)
        self._tokens_at_ms = now_ms


class SourceRecord(NamedTuple):
    """`key_and_value` are encoded with their lengths, `headers` without their count.

    `cause` is the dead-letter state (the reason) and the delivery count.
    """

    offset: int
    cause: tuple[int, int]
    timestamp_ms: int
    key_and_value: bytes
    headers_count: int
    headers: bytes
    #: The compression of its source batch.
    codec: Codec


RECORD_GONE: Final = "gone from the source"
RECORD_UNREADABLE: Final = "cannot be read"
RECORD_DAMAGED: Final = "damaged in the source"
RECORD_LEFT_OUT: Final = "too large beside the others"


class UnreadableSourceRecord(NamedTuple):
    """A record that cannot be decoded (the broker does not decode records when it appends them), or is damaged."""

    offset: int
    cause: tuple[int, int]
    why: str = RECORD_UNREADABLE


class SourceScan:
    """Finds the wanted records in a piece of a log. `seen_upto` is the offset after the last batch that was read.

    `wanted` is sorted; each range has its dead-letter state and delivery count. The scan stops before a batch with a
    wrong checksum, because another replica may have the correct batch.
    """

    def __init__(self, data: BytesLike, wanted: Sequence[StateRange], max_bytes: int) -> None:
        self._data = data
        self._wanted = wanted
        self._index = 0  # the first wanted range that may still be found
        self._max_bytes = max_bytes
        self._found_upto = 0  # the offset after the last record that was found
        self.seen_upto = 0

    def __iter__(self) -> Iterator[SourceRecord | UnreadableSourceRecord]:
        wanted = self._wanted
        for header, batch in iter_batches(self._data):
            while self._index < len(wanted) and wanted[self._index][1] < header.base_offset:
                self._index += 1
            if self._index < len(wanted) and wanted[self._index][0] <= header.last_offset:
                if header.crc != checksum(batch):
                    return
                if not header.is_control:
                    yield from self._of_batch(header, batch)
            self.seen_upto = header.last_offset + 1
            if self._index == len(wanted):
                return

    def _of_batch(
        self, header: BatchHeader, batch: BytesLike
    ) -> Iterator[SourceRecord | UnreadableSourceRecord]:
        try:
            yield from self._of_readable(header, batch)
        except ApiError:
            for first, last, reason, count in islice(self._wanted, self._index, None):
                if first > header.last_offset:
                    break
                first = max(first, self._found_upto, header.base_offset)
                for offset in range(first, min(last, header.last_offset) + 1):
                    yield UnreadableSourceRecord(offset, (reason, count))

    def _of_readable(
        self, header: BatchHeader, batch: BytesLike
    ) -> Iterator[SourceRecord | UnreadableSourceRecord]:
        """Raises CORRUPT_MESSAGE."""
        opened, body = open_batch(batch, self._max_bytes)
        data, codec, wanted, index = bytes(body), header.codec, self._wanted, self._index
        first, last, reason, count = wanted[index]
        is_dense = opened.record_count == opened.last_offset_delta + 1
        offset, end = header.base_offset - 1, 0
        for _ in range(opened.record_count):
            length, start = read_varint(data, end)
            end = start + length
            if length < 0 or end > len(data):
                raise ApiError(ErrorCode.corrupt_message, f"record of impossible length {length}")
            offset = offset + 1 if is_dense else _offset_of(data, start, header)
            while offset > last:
                index += 1
                if index == len(wanted):
                    self._index = index
                    return
                first, last, reason, count = wanted[index]
            if offset >= first:
                self._found_upto = offset + 1
                copied = _copied_fields(data, start, end)
                cause = (reason, count)
                if copied is None:
                    yield UnreadableSourceRecord(offset, cause)
                else:
                    yield SourceRecord(offset, cause, _timestamp(header, copied[0]), *copied[1:], codec)
        self._index = index


def _offset_of(data: bytes, start: int, header: BatchHeader) -> int:
    _, position = read_varlong(data, start + 1)
    return header.base_offset + read_varint(data, position)[0]


def _copied_fields(data: bytes, start: int, end: int) -> tuple[int, bytes, int, bytes] | None:
    """Return the timestamp delta, the encoded key and value, and the headers with their count.

    Returns None for an incomplete record.
    """
    try:
        time_delta, position = read_varlong(data, start + 1)
        _, fields_at = read_varint(data, position)
        fields_end = _end_of_sized(data, _end_of_sized(data, fields_at))
        headers_count, headers_at = read_varint(data, fields_end)
        if _end_of_headers(data, headers_at, end, headers_count) != end:
            return None
    except ApiError:
        return None
    return time_delta, data[fields_at:fields_end], headers_count, data[headers_at:end]


def _timestamp(header: BatchHeader, time_delta: int) -> int:
    if header.attributes & LOG_APPEND_TIME:
        return header.max_timestamp
    return wrap_int64(header.base_timestamp + time_delta)


def _end_of_sized(data: bytes, position: int) -> int:
    """Return the position after a key or value, which may be null."""
    length, position = read_varint(data, position)
    if length < -1:
        raise ApiError(ErrorCode.corrupt_message, f"impossible length {length}")
    return position + max(length, 0)


def _end_of_headers(data: bytes, position: int, end: int, count: int) -> int:
    """Return the position after `count` headers. An incomplete header would damage the batch that it is copied to."""
    if not 0 <= count <= end - position:
        raise ApiError(ErrorCode.corrupt_message, f"impossible number of headers {count}")
    for _ in range(count):
        length, position = read_varint(data, position)
        if length < 0:
            raise ApiError(ErrorCode.corrupt_message, "a header without a name")
        position = _end_of_sized(data, position + length)
    return position


_REASONS: Final = {
    DEAD_LETTER_LIMIT: ("limit", "delivered as often as the group allows"),
    DEAD_LETTER_REJECTED: ("rejected", "rejected by a consumer"),
    DEAD_LETTER_LOCK_EXPIRED: (
        "lock expired",
        "delivered as often as the group allows, the last time unanswered",
    ),
}
#: The headers that every dead letter has: the last is the timestamp, or why the dead letter has no record.
_HEADER_COUNT: Final = 8
#: No attributes, and a timestamp delta of 0.
_RECORD_HEAD: Final = b"\x00\x00"
_NULL: Final = b"\x01"

#: Cached, because the same lengths and counts occur again and again.
_varint = lru_cache(maxsize=1 << 14)(wire.encode_varint)


def _sized(value: bytes) -> bytes:
    return _varint(len(value)) + value


@cache
def _header_key(name: str) -> bytes:
    return _sized(name.encode())


def _header(name: str, value: str) -> bytes:
    return _header_key(name) + _sized(value.encode())


class DeadLetterBatch:
    """The encoded dead letters of one plan, in the order of their offsets."""

    def __init__(
        self,
        key: SharePartitionKey,
        topic: str,
        *,
        now_ms: int,
        copies_record: bool,
        bytes_max: int,
        errors: Mapping[int, tuple[int, WorkerError]] = MappingProxyType({}),
    ) -> None:
        """`errors` are the delivery count and error that a worker reported, by offset."""
        self._errors = errors
        self._now_ms = now_ms
        self._copies_record = copies_record
        self._bytes_max = bytes_max
        self._group = key.group
        self._before_offset = (
            _header(TOPIC_HEADER, topic)
            + _header(PARTITION_HEADER, str(key.partition))
            + _header_key(OFFSET_HEADER)
        )
        self._cause_headers: dict[tuple[int, int], bytes] = {}
        self._parts: list[bytes] = []
        self._size = 0
        self.count = 0
        #: The compression of the source batches; the dead letters get the same.
        self.codec = Codec.NONE
        #: The source offsets of the dead letters, as ranges.
        self.offsets: list[tuple[int, int]] = []

    @property
    def is_full(self) -> bool:
        return self._size >= self._bytes_max

    def fill(self, found: Iterable[SourceRecord | UnreadableSourceRecord]) -> int | None:
        """Add records until the batch is full. Return the offset of the first record that did not fit, or None."""
        for one in found:
            if self.is_full:
                return one.offset
            self.add(one)
        return None

    def repeat(
        self,
        owed: Iterator[tuple[int, tuple[int, int]]],
        found: Iterable[SourceRecord | UnreadableSourceRecord],
    ) -> None:
        """Add exactly one dead letter for each owed offset, up to the last record found.

        The plan is already stored, so the number of its records must not change: an offset whose record is missing
        gets a dead letter without the record.
        """
        for one in found:
            for offset, cause in owed:
                if offset < one.offset:
                    self.add_without(offset, cause, RECORD_GONE)
                    continue
                if self.is_full:
                    self.add_without(offset, cause, RECORD_LEFT_OUT)
                else:
                    self.add(one)
                break

    def add(self, copy: SourceRecord | UnreadableSourceRecord) -> None:
        if isinstance(copy, UnreadableSourceRecord):
            self.add_without(copy.offset, copy.cause, copy.why)
            return
        self.codec = copy.codec or self.codec
        time = b"%d" % copy.timestamp_ms
        common_headers, count = self._common_headers(copy.offset, copy.cause)
        headers = (common_headers, _header_key(TIMESTAMP_HEADER), _sized(time))
        if self._copies_record:
            self._put(
                copy.offset,
                copy.key_and_value,
                _varint(copy.headers_count + count),
                copy.headers,
                *headers,
            )
        else:
            self._put(copy.offset, _NULL + _NULL, _varint(count), *headers)

    def add_without(self, offset: int, cause: tuple[int, int], why: str, name: bytes | None = None) -> None:
        """Add a dead letter without its record. `name` is its key, for topics that require one."""
        key_and_value = (_NULL if name is None else _sized(name)) + _NULL
        headers, count = self._common_headers(offset, cause)
        self._put(offset, key_and_value, _varint(count), headers, _header(WITHOUT_RECORD_HEADER, why))

    def _common_headers(self, offset: int, cause: tuple[int, int]) -> tuple[bytes, int]:
        """Return all headers but the last, and the number of headers with it."""
        delivery_count, error = self._errors.get(offset, (-1, None))
        if error is not None and delivery_count == cause[1]:
            return self._before_offset + _sized(b"%d" % offset) + self._worker_error_headers(
                cause, error
            ), _HEADER_COUNT + 2
        headers = self._cause_headers.get(cause)
        if headers is None:
            reason, explanation = _REASONS[cause[0]]
            headers = self._cause_headers[cause] = (
                _header(GROUP_HEADER, self._group)
                + _header(DELIVERY_COUNT_HEADER, str(cause[1]))
                + _header(ERROR_MESSAGE_HEADER, explanation)
                + _header(REASON_HEADER, reason)
            )
        return self._before_offset + _sized(b"%d" % offset) + headers, _HEADER_COUNT

    def _worker_error_headers(self, cause: tuple[int, int], error: WorkerError) -> bytes:
        reason, _ = _REASONS[cause[0]]
        return (
            _header(GROUP_HEADER, self._group)
            + _header(DELIVERY_COUNT_HEADER, str(cause[1]))
            + _header(ERROR_MESSAGE_HEADER, error.message)
            + _header(ERROR_CLASS_HEADER, error.name)
            + _header(ERROR_STACK_HEADER, error.stack)
            + _header(REASON_HEADER, reason)
        )

    def _put(self, offset: int, *parts: bytes) -> None:
        body = b"".join((_RECORD_HEAD, _varint(self.count), *parts))
        self._parts += (_varint(len(body)), body)
        self._size += len(body)
        self.count += 1
        if self.offsets and self.offsets[-1][1] == offset - 1:
            self.offsets[-1] = (self.offsets[-1][0], offset)
        else:
            self.offsets.append((offset, offset))

    def batch(self, *, producer_id: int, epoch: int, sequence: int, codec: Codec = Codec.NONE) -> bytearray:
        return pack_new_batch(
            compress(codec, b"".join(self._parts)),
            self.count,
            self._now_ms,
            attributes=codec,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
        )


def ranges_with_cause(pending: Sequence[StateRange], offsets: Iterable[tuple[int, int]]) -> list[StateRange]:
    """Return these offsets with their state and delivery count. Both lists are sorted, and every offset is pending."""
    out: list[StateRange] = []
    index = 0
    for first, last in offsets:
        while first <= last:
            while pending[index][1] < first:
                index += 1
            _, end, reason, count = pending[index]
            out.append((first, min(last, end), reason, count))
            first = min(last, end) + 1
    return out


def offsets_with_cause(
    pending: Sequence[StateRange], offsets: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each of these offsets with its dead-letter state and delivery count."""
    return each_with_cause(ranges_with_cause(pending, offsets))


def each_with_cause(ranges: Iterable[StateRange]) -> Iterator[tuple[int, tuple[int, int]]]:
    for first, last, reason, count in ranges:
        for offset in range(first, last + 1):
            yield offset, (reason, count)
