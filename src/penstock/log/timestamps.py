"""Offsets by timestamp: the time index finds the batch, and only that batch is decoded."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.log.files import FilePool
from penstock.log.lookup import largest_timestamp, offset_index, time_index
from penstock.log.positions import TimestampMatch
from penstock.log.reader import damaged
from penstock.log.segment import Segment
from penstock.log.segments import SegmentList
from penstock.log.walk import past_holes, read_batch, walk
from penstock.protocol.records import BatchHeader, decode_records


class Search(NamedTuple):
    """Where to look: nothing below the start of the log counts, and no batch unfolds beyond the bound."""

    files: FilePool
    start_offset: int
    decoded_bytes_max: int


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
    for record in decode_records(read_batch(fd, position, header), search.decoded_bytes_max):
        if record.offset >= search.start_offset:
            yield TimestampMatch(record.timestamp, record.offset, header.leader_epoch)


def _best(best: TimestampMatch | None, matches: Iterable[TimestampMatch]) -> TimestampMatch | None:
    """The largest timestamp, and of several the one with the lowest offset."""
    for match in matches:
        if best is None or (match.timestamp, -match.offset) > (best.timestamp, -best.offset):
            best = match
    return best
