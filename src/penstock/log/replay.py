"""Reading a log again for what it says of its producers and their transactions."""

from collections.abc import Callable
from pathlib import Path

from penstock.log import snapshots
from penstock.log.aborted import AbortedIndex
from penstock.log.config import INT64_MAX
from penstock.log.files import FilePool
from penstock.log.lookup import modified_ms
from penstock.log.producers import Producers, trace_of
from penstock.log.segment import Segment
from penstock.log.segments import SegmentList
from penstock.log.transactions import Ended
from penstock.log.walk import read_batch, walk
from penstock.protocol.records import parse_end_marker


def restore_producers(
    producers: Producers,
    directory: Path,
    segments: SegmentList,
    files: FilePool,
    start_offset: int,
    end_offset: int,
    now_ms: int,
) -> None:
    """The newest usable snapshot, and what the log says after it."""
    position, states = snapshots.load_newest(directory, end_offset) or (start_offset, {})
    producers.restore(states.items(), now_ms)
    if position < end_offset:
        for segment in segments.items[segments.slot_of(position) :]:
            _replay(producers, segment, files, position)
        producers.expire(now_ms)
    producers.transactions.truncate(end_offset)


def prune_snapshots(directory: Path, segments: SegmentList, end_offset: int) -> None:
    """Keep those at the segments' bases, for truncation, and the newest, for the next start."""
    offsets = snapshots.list_offsets(directory)
    newest = max((offset for offset in offsets if offset <= end_offset), default=None)
    keep = {newest, *segments.bases}
    snapshots.remove(directory, (offset for offset in offsets if offset > end_offset or offset not in keep))


def reindex_aborted(
    segments: SegmentList, wanted: list[Segment], files: FilePool, start_offset: int
) -> list[AbortedIndex]:
    """Find the aborted transactions of neighbouring segments anew in the log."""
    directory, base_offset = wanted[0].directory, wanted[0].base_offset
    position, states = snapshots.load_newest(directory, base_offset) or (start_offset, {})
    producers = Producers(INT64_MAX)
    producers.restore(states.items(), 0)
    for segment in segments.items[segments.slot_of(position) :]:
        if segment.base_offset < base_offset:
            _replay(producers, segment, files, position)
    indexes: list[AbortedIndex] = []
    for segment in wanted:
        indexes.append(aborted := AbortedIndex())
        _replay(producers, segment, files, position, aborted.note)
        segment.aborted, segment.has_aborted = aborted, len(aborted) > 0
    return indexes


def _replay(
    producers: Producers,
    segment: Segment,
    files: FilePool,
    from_offset: int,
    note_ended: Callable[[Ended], None] = lambda _: None,
) -> None:
    touched_ms = modified_ms(segment)
    file = files.pin(segment)
    try:
        for position, header in walk(file.fd, 0, segment.size, holes=segment.holes):
            if header.producer_id < 0 or header.last_offset < from_offset:
                continue
            # Record timestamps may lie far in the past; the file at least says when it was written.
            seen_ms = max(header.max_timestamp, touched_ms)
            if header.is_control:
                marker = parse_end_marker(read_batch(file.fd, position, header))
                if marker is not None and (
                    ended := producers.learn_marker(marker, header.base_offset, seen_ms)
                ):
                    note_ended(ended)
            else:
                trace = trace_of(
                    header.base_sequence, header.base_offset, header.last_offset_delta, header.max_timestamp
                )
                producers.learn(
                    header.producer_id, header.producer_epoch, trace, header.is_transactional, seen_ms
                )
    finally:
        files.unpin(file)
