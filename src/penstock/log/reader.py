"""Reads a log by offset and by timestamp.

A read returns whole batches in constant work: an index lookup or a remembered position, then a short scan. A
timestamp lookup finds the batch through the time index and decodes only that batch. The log does not check that a
batch contains the max timestamp in its header. Where many batches do not, a search decompresses a bounded number of
bytes and then trusts the header: a reader that starts too early misses nothing.
"""

import logging
from collections.abc import Iterable, Iterator
from errno import ENOENT
from functools import partial
from typing import Final

from penstock.log.index_files import (
    largest_timestamp,
    offset_index,
    rebuild_index_files,
    time_index,
    transaction_index,
)
from penstock.log.indexes import AbortedTransaction, CorruptIndex, TransactionIndex
from penstock.log.producer_snapshots import rebuild_transaction_indexes
from penstock.log.segment import (
    INDEX_INTERVAL_READ_BYTES,
    LogOffsetMetadata,
    LogSegment,
    LogSegments,
    LogSlice,
    TimestampAndOffset,
    iter_batch_headers,
    read_batch,
    skip_damaged_ranges,
)
from penstock.log.segment_files import FilePool
from penstock.protocol.compression import DecompressedTooLarge
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import (
    BATCH_HEADER,
    BATCH_HEADER_BYTES,
    LOG_APPEND_TIME,
    LOG_OVERHEAD_BYTES,
    BatchHeader,
    open_batch,
    scan_records,
    wrap_int64,
)

#: Positions remembered for sequential readers; when there would be more, all are dropped and found by index again.
HINTS_MAX: Final = 64

_logger = logging.getLogger("penstock.log")

PositionHints = dict[int, tuple[LogSegment, int]]
SegmentPosition = tuple[LogSegment, int]


class _WrongIndex(Exception):
    """The batch is not where the index says."""


class LogReader:
    """Searches a log's segments. Thread-safe: the lists that it uses only grow."""

    __slots__ = ("_hints", "files", "segments")

    def __init__(self, segments: LogSegments, files: FilePool) -> None:
        self.files = files
        self.segments = segments
        self._hints: PositionHints = {}

    def use(self, segments: LogSegments) -> None:
        """The files have changed: drops the remembered positions. A read in progress keeps its own view."""
        self.segments = segments
        self._hints = {}

    def read(
        self, offset: int, max_bytes: int, upto: LogOffsetMetadata, at_least_one: bool, nowait: bool
    ) -> LogSlice:
        hints = self._hints
        hint = hints.get(offset)
        if hint is not None and hint[1] < hint[0].size and not hint[0].damaged_ranges:
            segment, position = hint
        else:
            found = self.find(offset, upto, nowait)
            if found is None:
                return LogSlice(b"", offset)
            segment, position = found
        limit, next_offset = self._limit(segment, upto, nowait)
        if segment.damaged_ranges:
            limit, next_offset = _before_damaged_range(segment, position, limit, next_offset)
        if limit <= position:
            return LogSlice(b"", offset)
        file = self.files.pin(segment)
        try:
            if limit - position <= max_bytes:
                data = self.files.read(file.fd, limit - position, position, nowait)
            else:
                data, next_offset = self._cut(segment, file.fd, position, max_bytes, at_least_one, nowait)
        finally:
            self.files.unpin(file)
        if data:
            if len(hints) >= HINTS_MAX:
                hints.clear()
            hints[next_offset] = (segment, position + len(data))
        return LogSlice(data, next_offset if data else offset)

    def find(self, offset: int, upto: LogOffsetMetadata, nowait: bool = False) -> SegmentPosition | None:
        """Returns the first batch that ends at or after an offset; None if there is none below `upto`."""
        segments = self.segments
        for slot in range(segments.slot_of(offset), len(segments)):
            segment = segments.items[slot]
            if segment.base_offset >= upto.offset and segment.base_offset > upto.segment_base:
                return None
            position = self._find_in(segment, offset, nowait)
            if position is not None:
                return segment, position
        return None

    def aborted_in(
        self, start_offset: int, upto_offset: int, nowait: bool, log_start_offset: int
    ) -> tuple[AbortedTransaction, ...]:
        """Finds aborted transactions with data between two offsets; a marker may be segments away from its data."""
        segments = self.segments
        found: list[AbortedTransaction] = []
        for segment in segments.items[segments.slot_of(start_offset) :]:
            if not segment.has_aborted:
                continue
            if nowait and segment.aborted is None:
                raise BlockingIOError
            if self.transaction_index(segment, log_start_offset).collect(start_offset, upto_offset, found):
                break
        return tuple(found)

    def transaction_index(self, segment: LogSegment, log_start_offset: int) -> TransactionIndex:
        """Rebuilds the index from the log if the file is corrupt."""
        try:
            return transaction_index(segment, self.files)
        except CorruptIndex as error:
            if segment.retired or segment.is_deleted:
                raise FileNotFoundError(ENOENT, "the segment has left its log", str(segment.path)) from None
            _logger.warning("index rebuilt", extra={"file": str(segment.path), "reason": str(error)})
        return rebuild_transaction_indexes(self.segments, [segment], self.files, log_start_offset)[0]

    def _find_in(self, segment: LogSegment, offset: int, nowait: bool) -> int | None:
        if offset <= segment.base_offset and not segment.damaged_ranges:
            return 0 if segment.size else None
        if nowait and segment.offsets is None:
            raise BlockingIOError
        try:
            return self._walk_to(segment, offset, nowait)
        except _WrongIndex:
            if nowait:
                raise BlockingIOError from None
        rebuild_index_files(segment, self.files)
        return self._walk_to(segment, offset, nowait)

    def _walk_to(self, segment: LogSegment, offset: int, nowait: bool) -> int | None:
        """Raises if the batches do not reach the end of the segment: skipping damage would skip records too."""
        end, base_offset = segment.size, segment.base_offset
        indexed, reached = offset_index(segment, self.files).entry_at_or_below(offset - base_offset)
        file = self.files.pin(segment)
        try:
            read_at = partial(self.files.read, nowait=nowait)
            for position, header in iter_batch_headers(
                file.fd,
                reached,
                end,
                chunk_bytes=INDEX_INTERVAL_READ_BYTES,
                read_at=read_at,
                damaged_ranges=segment.damaged_ranges,
            ):
                if indexed not in (-1, header.last_offset - base_offset):
                    break
                if header.last_offset >= offset:
                    return position
                indexed, reached = -1, position + header.size
        finally:
            self.files.unpin(file)
        if indexed >= 0 and segment.next_base is not None:
            raise _WrongIndex
        if skip_damaged_ranges(reached, segment.damaged_ranges) < end:
            raise damaged_read(segment, reached)
        return None

    def _limit(self, segment: LogSegment, upto: LogOffsetMetadata, nowait: bool) -> tuple[int, int]:
        """Returns how far a segment may be read, and the offset there."""
        following = segment.next_base
        if following is not None and following <= upto.offset:
            return segment.size, following
        if segment.base_offset == upto.segment_base and not segment.cleaned:
            return upto.position, upto.offset
        # The segment was compacted after `upto` was determined, so that position is no longer valid.
        position = self._find_in(segment, upto.offset, nowait)
        return (segment.size if position is None else position), upto.offset

    def _cut(
        self, segment: LogSegment, fd: int, position: int, max_bytes: int, at_least_one: bool, nowait: bool
    ) -> tuple[bytes | bytearray, int]:
        """Returns at most `max_bytes` of whole batches; with `at_least_one`, the first batch whatever its size."""
        if nowait and segment.offsets is None:
            raise BlockingIOError
        data = self.files.read(fd, max(max_bytes, BATCH_HEADER_BYTES), position, nowait)
        base_offset, length, _, _, _, _, delta, *_ = BATCH_HEADER.unpack_from(data)
        first_bytes = length + LOG_OVERHEAD_BYTES
        if first_bytes < BATCH_HEADER_BYTES:
            raise damaged_read(segment, position)
        if first_bytes > max_bytes:
            if not at_least_one:
                return b"", -1
            return self._whole(segment, fd, position, first_bytes, nowait), base_offset + delta + 1
        boundary = offset_index(segment, self.files).boundary_at_or_below(
            position + max_bytes - BATCH_HEADER_BYTES
        )
        end, next_offset = _end_of_last_batch(data, max(boundary - position, 0), max_bytes)
        if end == 0:
            raise damaged_read(segment, position)
        if isinstance(data, bytearray):
            del data[end:]
            return data, next_offset
        return data[:end], next_offset

    def _whole(
        self, segment: LogSegment, fd: int, position: int, size: int, nowait: bool
    ) -> bytes | bytearray:
        if position + size > segment.size:
            raise damaged_read(segment, position)
        return self.files.read(fd, size, position, nowait)


def _end_of_last_batch(data: bytes | bytearray, at: int, max_bytes: int) -> tuple[int, int]:
    """Scans from a batch boundary. Returns the end of the last whole batch and the offset after it; 0 for damage."""
    next_offset = -1
    while at + BATCH_HEADER_BYTES <= max_bytes:
        base_offset, length, _, _, _, _, delta, *_ = BATCH_HEADER.unpack_from(data, at)
        if length + LOG_OVERHEAD_BYTES < BATCH_HEADER_BYTES:
            return 0, -1
        if at + length + LOG_OVERHEAD_BYTES > max_bytes:
            return at, base_offset
        at += length + LOG_OVERHEAD_BYTES
        next_offset = base_offset + delta + 1
    return at, next_offset


def _before_damaged_range(
    segment: LogSegment, position: int, limit: int, next_offset: int
) -> tuple[int, int]:
    """Ends a slice where damage begins."""
    for damaged_range in segment.damaged_ranges:
        if position < damaged_range.position < limit:
            return damaged_range.position, damaged_range.offset
    return limit, next_offset


class DamagedRead(ApiError):
    """Bytes that are not what was written, in the segment that holds `offset`.

    `Log.scan_for_damage` finds out which records are lost. Then a read of one of those raises a plain CORRUPT_MESSAGE.
    """

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(ErrorCode.corrupt_message, message)
        self.offset = offset


def damaged_read(segment: LogSegment, position: int) -> DamagedRead:
    return DamagedRead(f"{segment.path} is damaged at position {position}", segment.base_offset)


def damaged_records(offset: int, piece: LogSlice, reason: str) -> DamagedRead:
    """For a slice that was read from `offset` on. It may start in a later segment, if compaction has left a gap."""
    found = int.from_bytes(piece.data[:8], "big")  # the base offset, which may be damaged, too
    place = max(offset, min(found, piece.next_offset - 1))
    return DamagedRead(f"damaged at or after offset {offset}: {reason}", place)


class DecompressionLimitReached(Exception):
    """The search would have to decompress more than it may."""


class TimestampSearch:
    """The limits of a search: it ignores records below the log start offset, and decompresses a bounded size in all.

    Beyond that it raises DecompressionLimitReached or, with `trusts_headers`, returns what a header claims.
    """

    __slots__ = ("bytes_left", "files", "start_offset", "trusts_headers")

    def __init__(self, files: FilePool, start_offset: int, *, bytes_max: int, trusts_headers: bool) -> None:
        self.files = files
        self.start_offset = start_offset
        self.bytes_left = bytes_max
        self.trusts_headers = trusts_headers


def find_offset_by_timestamp(
    segments: LogSegments, timestamp: int, search: TimestampSearch
) -> TimestampAndOffset | None:
    """Returns the first record, in log order, whose timestamp is not below the given one."""
    for segment in segments.items[segments.slot_of(search.start_offset) :]:
        if largest_timestamp(segment, search.files) >= timestamp:
            found = _find_timestamp_in(segment, timestamp, search)
            if found is not None:
                return found
    return None


def find_max_timestamp(segments: LogSegments, search: TimestampSearch) -> TimestampAndOffset | None:
    """Returns the first record that has the largest timestamp of the log."""
    candidates = segments.items[segments.slot_of(search.start_offset) :]
    best: TimestampAndOffset | None = None
    for segment in sorted(candidates, key=lambda item: largest_timestamp(item, search.files), reverse=True):
        timestamp = largest_timestamp(segment, search.files)
        if timestamp < (0 if best is None else best.timestamp):
            break
        found = _find_timestamp_in(segment, timestamp, search) or _max_timestamp_in(segment, search)
        best = _later_of(best, () if found is None else (found,))
    return best


def _find_timestamp_in(
    segment: LogSegment, timestamp: int, search: TimestampSearch
) -> TimestampAndOffset | None:
    after = time_index(segment, search.files).offset_before(timestamp)
    start, end = offset_index(segment, search.files).position_at_or_below(after), segment.size
    file = search.files.pin(segment)
    try:
        for position, header in iter_batch_headers(
            file.fd, start, end, damaged_ranges=segment.damaged_ranges
        ):
            if header.max_timestamp >= timestamp and not header.is_control:
                for match in _timestamps_in_batch(file.fd, position, header, search):
                    if match.timestamp >= timestamp:
                        return match
            start = position + header.size
    finally:
        search.files.unpin(file)
    if skip_damaged_ranges(start, segment.damaged_ranges) < end:
        raise damaged_read(segment, start)
    return None


def _max_timestamp_in(segment: LogSegment, search: TimestampSearch) -> TimestampAndOffset | None:
    """For a segment whose largest timestamp belongs to a marker, or to a record that no longer counts."""
    best: TimestampAndOffset | None = None
    largest_batch: tuple[int, BatchHeader] | None = None
    file = search.files.pin(segment)
    try:
        for position, header in iter_batch_headers(
            file.fd, 0, segment.size, damaged_ranges=segment.damaged_ranges
        ):
            if header.is_control or header.record_count == 0 or header.last_offset < search.start_offset:
                continue
            if header.base_offset < search.start_offset:
                # The header does not show what remains of the batch in which the log starts.
                best = _later_of(best, _timestamps_in_batch(file.fd, position, header, search))
            elif largest_batch is None or header.max_timestamp > largest_batch[1].max_timestamp:
                largest_batch = position, header
        if largest_batch is not None:
            best = _later_of(best, _timestamps_in_batch(file.fd, *largest_batch, search))
    finally:
        search.files.unpin(file)
    return best


def _timestamps_in_batch(
    fd: int, position: int, header: BatchHeader, search: TimestampSearch
) -> Iterator[TimestampAndOffset]:
    body = _decompressed_body(fd, position, header, search)
    if body is None:
        offset = max(header.base_offset, search.start_offset)
        yield TimestampAndOffset(header.max_timestamp, offset, header.leader_epoch)
        return
    has_append_time = header.attributes & LOG_APPEND_TIME
    for span in scan_records(header, body):
        offset = header.base_offset + span.offset_delta
        if offset >= search.start_offset:
            timestamp = wrap_int64(header.base_timestamp + span.timestamp_delta)
            found = header.max_timestamp if has_append_time else timestamp
            yield TimestampAndOffset(found, offset, header.leader_epoch)


def _decompressed_body(
    fd: int, position: int, header: BatchHeader, search: TimestampSearch
) -> bytes | memoryview | None:
    """Returns None if the header must be trusted. Raises DecompressionLimitReached."""
    if search.bytes_left > 0:
        try:
            _, body = open_batch(read_batch(fd, position, header), search.bytes_left)
        except DecompressedTooLarge:
            pass
        else:
            search.bytes_left -= len(body)
            return body
    if not search.trusts_headers:
        raise DecompressionLimitReached
    return None


def _later_of(
    best: TimestampAndOffset | None, matches: Iterable[TimestampAndOffset]
) -> TimestampAndOffset | None:
    """Returns the largest timestamp; among several, the one with the lowest offset."""
    for match in matches:
        if best is None or (match.timestamp, -match.offset) > (best.timestamp, -best.offset):
            best = match
    return best
