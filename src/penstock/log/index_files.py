"""Indexes on demand: loaded from their files, checked, and rebuilt from the log when they do not hold."""

import logging
import os
from pathlib import Path

from penstock.log.aborted import AbortedIndex
from penstock.log.checkpoints import write_synced
from penstock.log.config import LogConfig
from penstock.log.files import FilePool
from penstock.log.index import TIME_ENTRY_BYTES, DamagedIndex, OffsetIndex, TimeIndex
from penstock.log.segment import UNKNOWN, Segment
from penstock.log.walk import NEAR_BYTES, walk

_logger = logging.getLogger("penstock.log")
_REBUILD_CONFIG = LogConfig()


def offset_index(segment: Segment, files: FilePool) -> OffsetIndex:
    index = segment.offsets
    return _load(segment, files)[0] if index is None else index


def time_index(segment: Segment, files: FilePool) -> TimeIndex:
    index = segment.times
    return _load(segment, files)[1] if index is None else index


def aborted_index(segment: Segment, files: FilePool) -> AbortedIndex:
    """Raises DamagedIndex: only who knows the transactions before this segment can make it anew."""
    index = segment.aborted
    if index is not None:
        return index
    if not segment.has_aborted:
        return AbortedIndex()
    suffix = segment.suffix
    index = AbortedIndex.decode(_content(segment.transaction_index_file), segment.base_offset)
    if segment.suffix != suffix:
        raise DamagedIndex("renamed while it was read, so this may be another segment's")
    files.aborted_loaded(segment, index)
    return index


def largest_timestamp(segment: Segment, files: FilePool) -> int:
    """-1 when no batch of the segment has one."""
    if segment.max_timestamp == UNKNOWN:
        _learn_largest_timestamp(segment, files)
    return segment.max_timestamp


def retention_timestamp(segment: Segment, files: FilePool) -> int:
    """When the segment was last added to, by its records or else by its file."""
    timestamp = largest_timestamp(segment, files)
    return timestamp if timestamp >= 0 else modified_ms(segment)


def modified_ms(segment: Segment) -> int:
    return segment.path.stat().st_mtime_ns // 1_000_000


def first_timestamp(segment: Segment, files: FilePool) -> int:
    """The largest timestamp of the first batch, which decides when the segment has grown old."""
    if segment.first_timestamp == UNKNOWN and segment.size:
        file = files.pin(segment)
        try:
            segment.first_timestamp = next(
                (
                    header.max_timestamp
                    for _, header in walk(
                        file.fd, 0, segment.size, chunk_bytes=NEAR_BYTES, holes=segment.holes
                    )
                ),
                -1,
            )
        finally:
            files.unpin(file)
    return segment.first_timestamp


def write_indexes(segment: Segment) -> None:
    """Synced, because nothing rebuilds the indexes below the recovery point unless they look wrong."""
    segment.finish_indexing()
    offsets, times = segment.loaded_indexes
    index_path, time_path = segment.index_files
    try:
        _write_aborted(segment)
        write_synced(index_path, offsets.encode())
        write_synced(time_path, times.encode())
    except OSError:
        # The first half of an index could pass for a whole one.
        for path in (index_path, time_path, segment.transaction_index_file):
            path.unlink(missing_ok=True)
        raise


def _write_aborted(segment: Segment) -> None:
    """Few segments have one; of an earlier self, cut or compacted since, nothing may stay."""
    if segment.has_aborted:
        assert segment.aborted is not None
        write_synced(segment.transaction_index_file, segment.aborted.encode())
    else:
        segment.transaction_index_file.unlink(missing_ok=True)


def rebuild(
    segment: Segment, files: FilePool, config: LogConfig = _REBUILD_CONFIG
) -> tuple[OffsetIndex, TimeIndex]:
    """Index a closed segment anew from its batches, beside whatever readers use until it is done."""
    fresh = Segment(segment.directory, segment.base_offset, suffix=segment.suffix)
    fresh.start_indexing()
    file = files.pin(segment)
    try:
        for position, header in walk(file.fd, 0, segment.size, holes=segment.holes):
            fresh.size = position
            fresh.note(header.last_offset, header.max_timestamp, header.size, config)
    finally:
        files.unpin(file)
    fresh.finish_indexing()
    segment.max_timestamp, segment.max_timestamp_offset = fresh.max_timestamp, fresh.max_timestamp_offset
    return fresh.loaded_indexes


def reindex(segment: Segment, files: FilePool) -> None:
    """The index of a closed segment was caught in a lie: the files go, so that nobody loads them again."""
    _logger.warning("index rebuilt", extra={"file": str(segment.path), "reason": "does not match the log"})
    for path in segment.index_files:
        path.unlink(missing_ok=True)
    files.index_loaded(segment, *rebuild(segment, files))


def _load(segment: Segment, files: FilePool) -> tuple[OffsetIndex, TimeIndex]:
    suffix = segment.suffix
    index_path, time_path = segment.index_files
    try:
        offsets = OffsetIndex.decode(_content(index_path), segment.size)
        times = TimeIndex.decode(_content(time_path))
        if segment.suffix != suffix:
            raise DamagedIndex("renamed while it was read, so this may be another segment's")
    except DamagedIndex as error:
        _logger.warning("index rebuilt", extra={"file": str(segment.path), "reason": str(error)})
        offsets, times = rebuild(segment, files)
    files.index_loaded(segment, offsets, times)
    return offsets, times


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DamagedIndex("missing") from None


def _learn_largest_timestamp(segment: Segment, files: FilePool) -> None:
    """The last entry of the time index is enough, and one small read."""
    if segment.size == 0:
        segment.max_timestamp = -1
        return
    try:
        with open(segment.index_files[1], "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0 or size % TIME_ENTRY_BYTES:
                raise DamagedIndex(f"time index of {size} bytes")
            last = os.pread(file.fileno(), TIME_ENTRY_BYTES, size - TIME_ENTRY_BYTES)
            timestamp, relative = TimeIndex.decode(last).last_entry()
    except (FileNotFoundError, DamagedIndex):
        rebuild(segment, files)
    else:
        segment.max_timestamp_offset = segment.base_offset + relative
        segment.max_timestamp = timestamp
