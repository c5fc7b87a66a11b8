"""Opening a log: nothing is read after a clean end; after any other, the unsynced part is checked and cut."""

import logging
import os
from pathlib import Path
from typing import NamedTuple

from penstock.log import epochs as epoch_files
from penstock.log import snapshots
from penstock.log.aborted import AbortedIndex
from penstock.log.checkpoints import sync_directory
from penstock.log.config import LogConfig
from penstock.log.epochs import EpochCache
from penstock.log.files import FilePool
from penstock.log.index import DamagedIndex
from penstock.log.leftovers import existing_files, finish_interrupted_work
from penstock.log.lookup import (
    aborted_index,
    first_timestamp,
    offset_index,
    time_index,
    write_indexes,
)
from penstock.log.names import (
    EPOCH_CHECKPOINT,
    INDEX,
    LOG,
    PARTITION_METADATA,
    TIME_INDEX,
    TRANSACTION_INDEX,
    parse_offset_file,
)
from penstock.log.positions import LogPosition
from penstock.log.producers import Producers
from penstock.log.replay import prune_snapshots, reindex_aborted, restore_producers
from penstock.log.segment import Segment
from penstock.log.segments import SegmentList
from penstock.log.walk import checksum_holds, walk
from penstock.protocol.records import BatchHeader

_logger = logging.getLogger("penstock.log")


class CorruptLog(Exception):
    """Damage in the part of a log that was synced: not ours to cut, as it held acknowledged records."""


class Loaded(NamedTuple):
    segments: SegmentList
    start_offset: int
    end_offset: int
    producers: Producers
    epochs: EpochCache
    #: Segments from before its first one have gone, and nobody has deleted them.
    is_beheaded: bool = False


def load(
    directory: Path,
    config: LogConfig,
    *,
    files: FilePool,
    clean: bool,
    recovery_point: int,
    start_offset: int,
    now_ms: int,
    producer_expiry_ms: int,
) -> Loaded:
    """Raises CorruptLog for what cannot be mended, OSError for what cannot be read."""
    directory.mkdir(parents=True, exist_ok=True)
    deleted = finish_interrupted_work(directory)
    segments = SegmentList(_list_segments(directory, now_ms))
    epochs = epoch_files.load(directory / EPOCH_CHECKPOINT)
    if not segments.items:
        _warn_if_short(directory, start_offset, recovery_point)
        producers = Producers(producer_expiry_ms)
        producers.is_complete = start_offset == recovery_point == 0
        return _start_at(directory, start_offset, now_ms, producers, epochs or EpochCache())
    if epochs is None:
        # Of what recovery checks, it learns the epochs itself.
        known = segments.items if clean else segments.items[: segments.slot_of(recovery_point)]
        epochs = _rebuilt_epochs(known, files)
    end_offset = _resume(segments.last, files, config) if clean else None
    if end_offset is None:
        segments, end_offset = _recover(segments, epochs, files, config, recovery_point, start_offset)
    _warn_if_short(directory, end_offset, recovery_point)
    producers = Producers(producer_expiry_ms)
    if start_offset > end_offset:
        return _restart_beyond_end(directory, segments, start_offset, now_ms, producers, epochs)
    first = segments.first.base_offset
    is_beheaded = first > start_offset and not any(base < first for base in deleted)
    start_offset = max(start_offset, first)
    epochs.truncate_end(end_offset)
    epochs.truncate_start(start_offset)
    # What a replica has learned since it was made cannot have expired before it is as old as that takes.
    is_young = now_ms - _made_ms(directory) < producer_expiry_ms
    producers.is_complete = start_offset == 0 and is_young and not config.cleanup_compact
    restore_producers(producers, directory, segments, files, start_offset, end_offset, now_ms)
    prune_snapshots(directory, segments, end_offset)
    return Loaded(segments, start_offset, end_offset, producers, epochs, is_beheaded)


def _made_ms(directory: Path) -> int:
    """When this replica was made; long ago where nothing tells."""
    try:
        return os.stat(directory / PARTITION_METADATA).st_mtime_ns // 1_000_000
    except FileNotFoundError:
        return 0


def resume_indexing(segment: Segment, files: FilePool, config: LogConfig, end: int) -> int | None:
    """Take up a segment for writing where its indexes leave off; None when the batches do not reach `end`.

    Raises DamagedIndex for its transactions.
    """
    offsets, times = offset_index(segment, files), time_index(segment, files)
    aborted = aborted_index(segment, files) if segment.has_aborted else None
    files.keep_index(segment)
    segment.offsets, segment.times, segment.aborted = offsets, times, aborted
    segment.size = offsets.positions[-1] if len(offsets) else 0
    timestamp, relative = times.last_entry()
    segment.max_timestamp, segment.max_timestamp_offset = timestamp, segment.base_offset + relative
    segment.bytes_since_entry = 0
    end_offset = segment.base_offset
    indexed_offset = end_offset + offsets.offsets[-1] if len(offsets) else None
    file = files.pin(segment)
    try:
        for _, header in walk(file.fd, segment.size, end):
            if header.base_offset < end_offset or indexed_offset not in (None, header.last_offset):
                return None
            indexed_offset = None
            segment.note(header.last_offset, header.max_timestamp, header.size, config)
            end_offset = header.last_offset + 1
    finally:
        files.unpin(file)
    first_timestamp(segment, files)
    return end_offset if segment.size == end else None


def discard_segments(segments: list[Segment], files: FilePool) -> None:
    """Unlink at once and durably, the last first, so that a crash on the way leaves a log without a hole."""
    for segment in reversed(segments):
        files.forget(segment)
        for path in reversed(existing_files([segment])):
            path.unlink(missing_ok=True)
    if segments:
        sync_directory(segments[0].directory)


def _list_segments(directory: Path, now_ms: int) -> list[Segment]:
    found: dict[int, Segment] = {}
    companions: list[tuple[int, Path]] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            parsed = parse_offset_file(entry.name)
            if parsed is None or parsed[2]:
                continue
            if parsed[1] == LOG:
                size = entry.stat().st_size
                found[parsed[0]] = Segment(directory, parsed[0], size=size, created_ms=now_ms)
            elif parsed[1] in (INDEX, TIME_INDEX, TRANSACTION_INDEX):
                companions.append((parsed[0], Path(entry.path)))
    for base_offset, path in companions:
        if base_offset not in found:
            path.unlink()
        elif path.suffix == TRANSACTION_INDEX:
            found[base_offset].has_aborted = path.stat().st_size > 0
    return [found[base_offset] for base_offset in sorted(found)]


def _start_at(directory: Path, offset: int, now_ms: int, producers: Producers, epochs: EpochCache) -> Loaded:
    segment = Segment(directory, offset, created_ms=now_ms)
    segment.start_indexing()
    with open(segment.path, "wb"):
        pass
    sync_directory(directory)
    snapshots.remove(directory, snapshots.list_offsets(directory))
    epochs.clear()
    return Loaded(SegmentList([segment]), offset, offset, producers, epochs)


def _restart_beyond_end(
    directory: Path,
    segments: SegmentList,
    start_offset: int,
    now_ms: int,
    producers: Producers,
    epochs: EpochCache,
) -> Loaded:
    """Everything that is left lies below the start of the log."""
    _logger.warning(
        "log restarted at its start offset", extra={"directory": str(directory), "offset": start_offset}
    )
    producers.is_complete = False
    for segment in reversed(segments.items):
        for path in existing_files([segment]):
            path.unlink()
    return _start_at(directory, start_offset, now_ms, producers, epochs)


def _resume(segment: Segment, files: FilePool, config: LogConfig) -> int | None:
    end = segment.size
    try:
        end_offset = resume_indexing(segment, files, config, end)
    except DamagedIndex:
        end_offset = None
    if end_offset is None:
        # The index may be what is wrong; recovery reads the log alone and knows.
        segment.size = end
        _logger.warning("clean log does not add up, recovering", extra={"file": str(segment.path)})
    return end_offset


def _recover(
    segments: SegmentList,
    epochs: EpochCache,
    files: FilePool,
    config: LogConfig,
    recovery_point: int,
    start_offset: int,
) -> tuple[SegmentList, int]:
    """Check every batch from the recovery point's segment on; cut at the first that does not hold."""
    first = segments.slot_of(recovery_point)
    if first > 0 and segments.items[first].base_offset == recovery_point:
        # The one before was rolled right there, and may not have been indexed any more.
        first -= not segments.items[first - 1].index_files[1].exists()
    expected = segments.items[first].base_offset
    marked: list[Segment] = []
    for slot in range(first, len(segments)):
        segment = segments.items[slot]
        file_bytes = segment.size
        expected = max(expected, segment.base_offset)
        expected = _check_segment(segment, epochs, files, config, recovery_point, expected, marked)
        if segment.size != file_bytes:
            dropped = segments.items[slot + 1 :]
            _cut(segment, file_bytes, dropped, expected, recovery_point, files)
            segments = SegmentList(segments.items[: slot + 1])
            break
    if marked:
        reindex_aborted(segments, segments.items[first:], files, start_offset)
    _make_durable(segments.items[first:])
    return segments, expected


def _warn_if_short(directory: Path, end_offset: int, recovery_point: int) -> None:
    """Files have gone that were on disk once. There is nothing left to refuse, but somebody should know."""
    if end_offset < recovery_point:
        extra = {"directory": str(directory), "end": end_offset, "recovery_point": recovery_point}
        _logger.warning("log ends below its recovery point", extra=extra)


def _check_segment(
    segment: Segment,
    epochs: EpochCache,
    files: FilePool,
    config: LogConfig,
    recovery_point: int,
    expected: int,
    marked: list[Segment],
) -> int:
    """Index a segment anew up to the first batch that does not hold. Returns the offset there.

    One that may hold markers of transactions is added to `marked`.
    """
    file_bytes = segment.size
    files.keep_index(segment)
    segment.start_indexing()
    file = files.pin(segment)
    try:
        for position, header in walk(file.fd, 0, file_bytes):
            if not _holds(file.fd, position, header, segment, expected, recovery_point):
                break
            if header.leader_epoch > epochs.latest:
                epochs.assign(header.leader_epoch, header.base_offset)
            segment.note(header.last_offset, header.max_timestamp, header.size, config)
            expected = header.last_offset + 1
            if header.is_control and segment not in marked:
                marked.append(segment)
    finally:
        files.unpin(file)
    return expected


def _holds(
    fd: int, position: int, header: BatchHeader, segment: Segment, expected: int, recovery_point: int
) -> bool:
    if (
        header.base_offset < expected
        or header.last_offset_delta < 0
        or not segment.can_hold(header.last_offset)
    ):
        return False
    return header.last_offset < recovery_point or checksum_holds(fd, position, header)


def _cut(
    segment: Segment,
    file_bytes: int,
    dropped: list[Segment],
    end_offset: int,
    recovery_point: int,
    files: FilePool,
) -> None:
    if end_offset < recovery_point:
        raise CorruptLog(
            f"{segment.path} is damaged at position {segment.size}, offset {end_offset}, "
            f"below the recovery point {recovery_point}"
        )
    _logger.warning(
        "torn tail cut",
        extra={
            "file": str(segment.path),
            "bytes_cut": file_bytes - segment.size,
            "segments_dropped": [item.path.name for item in dropped],
            "end_offset": end_offset,
        },
    )
    discard_segments(dropped, files)
    os.truncate(segment.path, segment.size)


def _make_durable(segments: list[Segment]) -> None:
    """What was recovered may be in the page cache only; from here on it counts as synced."""
    for segment in segments:
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
        if segment is not segments[-1]:
            write_indexes(segment)
    sync_directory(segments[0].directory)


def _rebuilt_epochs(segments: list[Segment], files: FilePool) -> EpochCache:
    epochs = EpochCache()
    end_offset = 0
    for segment in segments:
        file = files.pin(segment)
        try:
            for _, header in walk(file.fd, 0, segment.size):
                if header.leader_epoch > epochs.latest and header.base_offset >= end_offset:
                    epochs.assign(header.leader_epoch, header.base_offset)
                end_offset = header.last_offset + 1
        finally:
            files.unpin(file)
    return epochs


def shortened(
    segment: Segment, end: LogPosition, aborted: AbortedIndex, files: FilePool, config: LogConfig
) -> Segment:
    """Cut the file durably, keep what the indexes say of the rest, and learn its end."""
    offsets, times = offset_index(segment, files), time_index(segment, files)
    files.forget(segment)
    fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, end.position)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    offsets.truncate(end.position)
    times.truncate(max(end.offset - segment.base_offset, 0))
    aborted.truncate(end.offset)
    kept = Segment(segment.directory, segment.base_offset, created_ms=segment.created_ms)
    kept.offsets, kept.times, kept.aborted = offsets, times, aborted
    kept.has_aborted = len(aborted) > 0
    reached = resume_indexing(kept, files, config, end.position)
    assert reached is not None, (segment, end)
    return kept
