"""Offsets by timestamp: the time index finds the batch, and only that batch is decoded."""

from collections.abc import Iterator

from penstock.log.files import FilePool
from penstock.log.lookup import largest_timestamp, offset_index, time_index
from penstock.log.positions import TimestampMatch
from penstock.log.segment import Segment
from penstock.log.segments import SegmentList
from penstock.log.walk import read_batch, walk
from penstock.protocol.records import BatchHeader, Record, decode_records


def first_at_or_after(
    segments: SegmentList, files: FilePool, timestamp: int, start_offset: int, decoded_bytes_max: int
) -> TimestampMatch | None:
    """The first record, in the log's order, whose timestamp is not below the given one."""
    for segment in segments.items[segments.slot_of(start_offset) :]:
        if largest_timestamp(segment, files) < timestamp:
            continue
        after = time_index(segment, files).offset_before(timestamp)
        for header, records in _candidates(segment, files, after, timestamp, decoded_bytes_max):
            for record in records:
                if record.timestamp >= timestamp and record.offset >= start_offset:
                    return TimestampMatch(record.timestamp, record.offset, header.leader_epoch)
    return None


def largest(
    segments: SegmentList, files: FilePool, start_offset: int, decoded_bytes_max: int
) -> TimestampMatch | None:
    """The first record that has the largest timestamp of the log."""
    candidates = segments.items[segments.slot_of(start_offset) :]
    segment = max(candidates, key=lambda item: largest_timestamp(item, files))
    timestamp = largest_timestamp(segment, files)
    if timestamp < 0:
        return None
    return first_at_or_after(segments, files, timestamp, start_offset, decoded_bytes_max)


def _candidates(
    segment: Segment, files: FilePool, after: int, timestamp: int, decoded_bytes_max: int
) -> Iterator[tuple[BatchHeader, list[Record]]]:
    start = offset_index(segment, files).position_at_or_below(after)
    file = files.pin(segment)
    try:
        for position, header in walk(file.fd, start, segment.size):
            if header.max_timestamp >= timestamp and not header.is_control:
                yield header, decode_records(read_batch(file.fd, position, header), decoded_bytes_max)
    finally:
        files.unpin(file)
