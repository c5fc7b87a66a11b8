"""Offsets by timestamp: the time index finds the batch, and only that batch is decoded.

Nobody has checked that a batch holds the timestamp which its header claims. Where many do not, a search unfolds a
bounded number of bytes, and then takes a header at its word: a reader that starts too early misses nothing.
"""

from collections.abc import Iterable, Iterator

from penstock.log.files import FilePool
from penstock.log.lookup import largest_timestamp, offset_index, time_index
from penstock.log.positions import TimestampMatch
from penstock.log.reader import damaged
from penstock.log.segment import Segment
from penstock.log.segments import SegmentList
from penstock.log.walk import past_holes, read_batch, walk
from penstock.protocol.compression import DecompressedTooLarge
from penstock.protocol.records import LOG_APPEND_TIME, BatchHeader, open_batch, wrap_int64
from penstock.protocol.scan import scan_records


class MoreToUnfold(Exception):
    """The search would have to unfold more than it may."""


class Search:
    """Where to look: nothing below the start of the log counts, and all batches together unfold to a bounded size.

    Beyond that a search raises MoreToUnfold, or, where `believes_headers`, answers with what a header claims.
    """

    __slots__ = ("believes_headers", "bytes_left", "files", "start_offset")

    def __init__(self, files: FilePool, start_offset: int, *, bytes_max: int, believes_headers: bool) -> None:
        self.files = files
        self.start_offset = start_offset
        self.bytes_left = bytes_max
        self.believes_headers = believes_headers


def first_at_or_after(segments: SegmentList, timestamp: int, search: Search) -> TimestampMatch | None:
    """The first record, in the log's order, whose timestamp is not below the given one."""
    for segment in segments.items[segments.slot_of(search.start_offset) :]:
        if largest_timestamp(segment, search.files) >= timestamp:
            found = _first_in(segment, timestamp, search)
            if found is not None:
                return found
    return None


def largest(segments: SegmentList, search: Search) -> TimestampMatch | None:
    """The first record that has the largest timestamp of the log."""
    candidates = segments.items[segments.slot_of(search.start_offset) :]
    best: TimestampMatch | None = None
    for segment in sorted(candidates, key=lambda item: largest_timestamp(item, search.files), reverse=True):
        timestamp = largest_timestamp(segment, search.files)
        if timestamp < (0 if best is None else best.timestamp):
            break
        found = _first_in(segment, timestamp, search) or _largest_left(segment, search)
        best = _best(best, () if found is None else (found,))
    return best


def _first_in(segment: Segment, timestamp: int, search: Search) -> TimestampMatch | None:
    after = time_index(segment, search.files).offset_before(timestamp)
    start, end = offset_index(segment, search.files).position_at_or_below(after), segment.size
    file = search.files.pin(segment)
    try:
        for position, header in walk(file.fd, start, end, holes=segment.holes):
            if header.max_timestamp >= timestamp and not header.is_control:
                for match in _matches(file.fd, position, header, search):
                    if match.timestamp >= timestamp:
                        return match
            start = position + header.size
    finally:
        search.files.unpin(file)
    if past_holes(start, segment.holes) < end:
        raise damaged(segment, start)
    return None


def _largest_left(segment: Segment, search: Search) -> TimestampMatch | None:
    """For a segment whose largest timestamp is a marker's, or that of a record which no longer counts."""
    best: TimestampMatch | None = None
    largest_batch: tuple[int, BatchHeader] | None = None
    file = search.files.pin(segment)
    try:
        for position, header in walk(file.fd, 0, segment.size, holes=segment.holes):
            if header.is_control or header.record_count == 0 or header.last_offset < search.start_offset:
                continue
            if header.base_offset < search.start_offset:
                # The header does not say what is left of the batch that the log starts within.
                best = _best(best, _matches(file.fd, position, header, search))
            elif largest_batch is None or header.max_timestamp > largest_batch[1].max_timestamp:
                largest_batch = position, header
        if largest_batch is not None:
            best = _best(best, _matches(file.fd, *largest_batch, search))
    finally:
        search.files.unpin(file)
    return best


def _matches(fd: int, position: int, header: BatchHeader, search: Search) -> Iterator[TimestampMatch]:
    body = _unfolded(fd, position, header, search)
    if body is None:
        offset = max(header.base_offset, search.start_offset)
        yield TimestampMatch(header.max_timestamp, offset, header.leader_epoch)
        return
    has_append_time = header.attributes & LOG_APPEND_TIME
    for span in scan_records(header, body):
        offset = header.base_offset + span.offset_delta
        if offset >= search.start_offset:
            timestamp = wrap_int64(header.base_timestamp + span.timestamp_delta)
            found = header.max_timestamp if has_append_time else timestamp
            yield TimestampMatch(found, offset, header.leader_epoch)


def _unfolded(fd: int, position: int, header: BatchHeader, search: Search) -> bytes | memoryview | None:
    """None where the header has to be believed. Raises MoreToUnfold."""
    if search.bytes_left > 0:
        try:
            _, body = open_batch(read_batch(fd, position, header), search.bytes_left)
        except DecompressedTooLarge:
            pass
        else:
            search.bytes_left -= len(body)
            return body
    if not search.believes_headers:
        raise MoreToUnfold
    return None


def _best(best: TimestampMatch | None, matches: Iterable[TimestampMatch]) -> TimestampMatch | None:
    """The largest timestamp, and of several the one with the lowest offset."""
    for match in matches:
        if best is None or (match.timestamp, -match.offset) > (best.timestamp, -best.offset):
            best = match
    return best
