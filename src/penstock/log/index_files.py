"""Index files on demand: loads and checks them, writes them, and rebuilds them from the log when they are missing
or corrupt.
"""

import logging
import os
from pathlib import Path

from penstock.log.config import LogConfig
from penstock.log.indexes import TIME_ENTRY_BYTES, CorruptIndex, OffsetIndex, TimeIndex, TransactionIndex
from penstock.log.segment import INDEX_INTERVAL_READ_BYTES, UNKNOWN_TIMESTAMP, LogSegment, iter_batch_headers
from penstock.log.segment_files import FilePool
from penstock.protocol.durable_files import write_synced

_logger = logging.getLogger("penstock.log")
_REBUILD_CONFIG = LogConfig()


def offset_index(segment: LogSegment, files: FilePool) -> OffsetIndex:
    index = segment.offsets
    return _load_indexes(segment, files)[0] if index is None else index


def time_index(segment: LogSegment, files: FilePool) -> TimeIndex:
    index = segment.times
    return _load_indexes(segment, files)[1] if index is None else index


def transaction_index(segment: LogSegment, files: FilePool) -> TransactionIndex:
    """Raises CorruptIndex: rebuilding it needs the transactions from before this segment."""
    index = segment.aborted
    if index is not None:
        return index
    if not segment.has_aborted:
        return TransactionIndex()
    suffix = segment.suffix
    index = TransactionIndex.decode(_content(segment.transaction_index_file), segment.base_offset)
    if segment.suffix != suffix:
        raise CorruptIndex("renamed while it was read, so this may be another segment's")
    files.transaction_index_loaded(segment, index)
    return index


def largest_timestamp(segment: LogSegment, files: FilePool) -> int:
    """Returns -1 if no batch of the segment has a timestamp."""
    if segment.max_timestamp == UNKNOWN_TIMESTAMP:
        _load_largest_timestamp(segment, files)
    return segment.max_timestamp


def retention_timestamp(segment: LogSegment, files: FilePool) -> int:
    """Returns when the segment was last written, according to its records or else to its file."""
    timestamp = largest_timestamp(segment, files)
    return timestamp if timestamp >= 0 else modified_ms(segment)


def modified_ms(segment: LogSegment) -> int:
    return segment.path.stat().st_mtime_ns // 1_000_000


def first_timestamp(segment: LogSegment, files: FilePool) -> int:
    """Returns the largest timestamp of the first batch, which decides how old the segment is."""
    if segment.first_timestamp == UNKNOWN_TIMESTAMP and segment.size:
        file = files.pin(segment)
        try:
            segment.first_timestamp = next(
                (
                    header.max_timestamp
                    for _, header in iter_batch_headers(
                        file.fd,
                        0,
                        segment.size,
                        chunk_bytes=INDEX_INTERVAL_READ_BYTES,
                        damaged_ranges=segment.damaged_ranges,
                    )
                ),
                -1,
            )
        finally:
            files.unpin(file)
    return segment.first_timestamp


def write_indexes(segment: LogSegment) -> None:
    """Syncs the files, because indexes below the recovery point are rebuilt only if they look corrupt."""
    segment.finish_indexing()
    offsets, times = segment.loaded_indexes
    index_path, time_path = segment.index_files
    try:
        _write_transaction_index(segment)
        write_synced(index_path, offsets.encode())
        write_synced(time_path, times.encode())
    except OSError:
        # Half of an index could pass for a whole one.
        for path in (index_path, time_path, segment.transaction_index_file):
            path.unlink(missing_ok=True)
        raise


def _write_transaction_index(segment: LogSegment) -> None:
    """Few segments have one. A file from before the segment was truncated or compacted must not stay."""
    if segment.has_aborted:
        assert segment.aborted is not None
        write_synced(segment.transaction_index_file, segment.aborted.encode())
    else:
        segment.transaction_index_file.unlink(missing_ok=True)


def rebuild_indexes(
    segment: LogSegment, files: FilePool, config: LogConfig = _REBUILD_CONFIG
) -> tuple[OffsetIndex, TimeIndex]:
    """Rebuilds the index of a closed segment from its batches; readers use the old index until it is done."""
    fresh = LogSegment(segment.directory, segment.base_offset, suffix=segment.suffix)
    fresh.start_indexing()
    file = files.pin(segment)
    try:
        for position, header in iter_batch_headers(
            file.fd, 0, segment.size, damaged_ranges=segment.damaged_ranges
        ):
            fresh.size = position
            fresh.note(header.last_offset, header.max_timestamp, header.size, config)
    finally:
        files.unpin(file)
    fresh.finish_indexing()
    segment.max_timestamp, segment.max_timestamp_offset = fresh.max_timestamp, fresh.max_timestamp_offset
    return fresh.loaded_indexes


def rebuild_index_files(segment: LogSegment, files: FilePool) -> None:
    """Call it if the index of a closed segment does not match the log. Deletes the files, so that none is loaded
    again."""
    _logger.warning("index rebuilt", extra={"file": str(segment.path), "reason": "does not match the log"})
    for path in segment.index_files:
        path.unlink(missing_ok=True)
    files.index_loaded(segment, *rebuild_indexes(segment, files))


def _load_indexes(segment: LogSegment, files: FilePool) -> tuple[OffsetIndex, TimeIndex]:
    suffix = segment.suffix
    index_path, time_path = segment.index_files
    try:
        offsets = OffsetIndex.decode(_content(index_path), segment.size)
        times = TimeIndex.decode(_content(time_path))
        if segment.suffix != suffix:
            raise CorruptIndex("renamed while it was read, so this may be another segment's")
    except CorruptIndex as error:
        _logger.warning("index rebuilt", extra={"file": str(segment.path), "reason": str(error)})
        offsets, times = rebuild_indexes(segment, files)
    files.index_loaded(segment, offsets, times)
    return offsets, times


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CorruptIndex("missing") from None


def _load_largest_timestamp(segment: LogSegment, files: FilePool) -> None:
    """Reads only the last entry of the time index."""
    if segment.size == 0:
        segment.max_timestamp = -1
        return
    try:
        with open(segment.index_files[1], "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0 or size % TIME_ENTRY_BYTES:
                raise CorruptIndex(f"time index of {size} bytes")
            last = os.pread(file.fileno(), TIME_ENTRY_BYTES, size - TIME_ENTRY_BYTES)
            timestamp, relative = TimeIndex.decode(last).last_entry()
    except (FileNotFoundError, CorruptIndex):
        rebuild_indexes(segment, files)
    else:
        segment.max_timestamp_offset = segment.base_offset + relative
        segment.max_timestamp = timestamp
