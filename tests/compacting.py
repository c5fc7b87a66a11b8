"""Helpers for tests that compact a real log: append to it, read all of it, clean it."""

import struct
from pathlib import Path

from penstock.log.compaction.cleaner import CleanableLog, CleaningReport, LogCleaner
from penstock.log.config import LogConfig
from penstock.log.log import Log
from penstock.log.segment_files import FilePool
from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import (
    CONTROL,
    TRANSACTIONAL,
    BatchHeader,
    Record,
    checksum,
    decode_records,
    encode_batch,
    iter_batches,
)

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000
BOUND = 1 << 24
PARTITION = ("table", 0)

Pair = tuple[bytes | None, bytes | None]


def compacted_config(**changes: object) -> LogConfig:
    settings: dict[str, object] = {
        "cleanup_compact": True,
        "cleanup_delete": False,
        "min_cleanable_dirty_ratio": 0.0,
        "delete_retention_ms": DAY_MS,
        "index_interval_bytes": 64,
    }
    return LogConfig(**(settings | changes))  # type: ignore[arg-type]


def open_log(directory: Path, *, clean: bool = False, **changes: object) -> Log:
    return Log.open(directory, compacted_config(**changes), files=FilePool(), clean=clean, now_ms=NOW_MS)


def append(
    log: Log,
    *pairs: Pair,
    codec: Codec = Codec.NONE,
    timestamp: int = NOW_MS,
    producer: tuple[int, int, int] = (-1, -1, -1),
    transactional: bool = False,
) -> int:
    """One batch of keys and values; `producer` is id, epoch and base sequence. Returns its base offset."""
    batch = encode_batch(
        [Record(n, timestamp + n, key, value) for n, (key, value) in enumerate(pairs)],
        codec=codec,
        attributes=TRANSACTIONAL if transactional else 0,
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=producer[2],
    )
    return log.append(memoryview(batch), leader_epoch=1, now_ms=NOW_MS).base_offset


def append_marker(log: Log, producer_id: int, epoch: int, *, commit: bool) -> int:
    record = Record(0, NOW_MS, struct.pack(">hh", 0, int(commit)), struct.pack(">hi", 0, 7))
    batch = encode_batch(
        [record], attributes=CONTROL | TRANSACTIONAL, producer_id=producer_id, producer_epoch=epoch
    )
    return log.append(memoryview(batch), leader_epoch=1, now_ms=NOW_MS, internal=True).base_offset


def roll(log: Log) -> None:
    """Close the active segment, so that all before it may be cleaned."""
    if log.active_segment.size:
        log.roll(NOW_MS)


def batches(log: Log, from_offset: int | None = None) -> list[tuple[BatchHeader, bytes]]:
    """Everything a reader gets from an offset on; every checksum must hold."""
    offset = log.start_offset if from_offset is None else from_offset
    found: list[tuple[BatchHeader, bytes]] = []
    while offset < log.end_offset:
        part = log.read(offset, 1 << 16, log.end)
        assert part.next_offset > offset or not part.data
        if not part.data:
            break
        for header, batch in iter_batches(part.data):
            assert header.crc == checksum(batch)
            found.append((header, bytes(batch)))
        offset = part.next_offset
    return found


def records(log: Log, from_offset: int | None = None) -> list[Record]:
    """The data that a reader sees, control batches left out."""
    start = log.start_offset if from_offset is None else from_offset
    data = (
        decode_records(batch, BOUND) for header, batch in batches(log, from_offset) if not header.is_control
    )
    return [record for batch in data for record in batch if record.offset >= start]


def pairs(log: Log) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(record.offset, record.key, record.value) for record in records(log)]


def clean(
    log: Log,
    cleaner: LogCleaner | None = None,
    *,
    now_ms: int = NOW_MS,
    stable_offset: int | None = None,
) -> CleaningReport | None:
    """One pass, and the replaced files removed as the node would."""
    chosen = cleaner or LogCleaner(log.directory.parent, dedupe_buffer_bytes=1 << 20)
    stable = log.end_offset if stable_offset is None else stable_offset
    logs = {PARTITION: CleanableLog(log, stable, log.end_offset)}
    report = chosen.clean_filthiest_log(logs, now_ms=now_ms)
    for path in report.unlink if report else ():
        path.unlink()
    return report
