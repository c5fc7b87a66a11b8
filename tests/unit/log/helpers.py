"""Logs and batches for tests."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.log.config import LogConfig
from penstock.log.log import Log, LogAppendInfo
from penstock.log.producer_state import VerificationGuard
from penstock.log.segment_files import FilePool
from penstock.protocol.record_batch import (
    BatchHeader,
    EndMarker,
    Record,
    decode_records,
    encode_batch,
    encode_end_marker,
    iter_batches,
)

NOW_MS = 1_700_000_000_000


def batch_of(
    *values: bytes,
    timestamp: int = NOW_MS,
    producer: tuple[int, int, int] | None = None,
    attributes: int = 0,
) -> memoryview:
    """A batch as a client sends it. `producer` is (id, epoch, sequence)."""
    producer_id, epoch, sequence = producer or (-1, -1, -1)
    records = [Record(place, timestamp, b"key", value) for place, value in enumerate(values)]
    return memoryview(
        encode_batch(
            records,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            attributes=attributes,
        )
    )


def marker_of(producer_id: int, epoch: int, *, commit: bool, coordinator_epoch: int = 3) -> memoryview:
    """The control batch that ends a transaction."""
    return memoryview(encode_end_marker(EndMarker(producer_id, epoch, coordinator_epoch, commit), NOW_MS))


def open_log(directory: Path, config: LogConfig | None = None, **options: object) -> Log:
    settings: dict[str, object] = {"files": FilePool(), "now_ms": NOW_MS, **options}
    return Log.open(directory, config or LogConfig(), **settings)  # type: ignore[arg-type]


def append(
    log: Log,
    *values: bytes,
    epoch: int = 0,
    now_ms: int = NOW_MS,
    guard: VerificationGuard | None = None,
    **options: object,
) -> LogAppendInfo:
    batch = batch_of(*values, **options)  # type: ignore[arg-type]
    return log.append(batch, leader_epoch=epoch, now_ms=now_ms, guard=guard)


def fill(log: Log, count: int, size: int = 100, **options: object) -> None:
    for _ in range(count):
        append(log, bytes(size), **options)


def flush(log: Log) -> None:
    flush_job = log.flush_begin()
    if flush_job is not None:
        flush_job.run()
        log.flush_done(flush_job)


def read_batches(
    log: Log, offset: int | None = None, max_bytes: int = 1 << 20
) -> list[tuple[BatchHeader, bytes]]:
    """Everything from an offset to the end, slice by slice as a consumer would."""
    found: list[tuple[BatchHeader, bytes]] = []
    position = log.start_offset if offset is None else offset
    while position < log.end_offset:
        piece = log.read(position, max_bytes, log.end)
        if not piece.data:
            break
        found += [(header, bytes(batch)) for header, batch in iter_batches(piece.data)]
        assert sum(len(batch) for _, batch in iter_batches(piece.data)) == len(piece.data)
        position = piece.next_offset
    return found


def values_in(log: Log, offset: int | None = None, max_bytes: int = 1 << 20) -> list[bytes | None]:
    batches = read_batches(log, offset, max_bytes)
    return [record.value for _, batch in batches for record in decode_records(batch, 1 << 20)]


def offsets_in(log: Log) -> list[int]:
    return [
        offset
        for header, _ in read_batches(log)
        for offset in range(header.base_offset, header.last_offset + 1)
    ]


def files_in(directory: Path, kind: str = "") -> Iterator[str]:
    return iter(sorted(path.name for path in directory.iterdir() if path.name.endswith(kind)))


def open_files(folder: Path) -> list[str]:
    """Return the files below a folder that this process has open, as often as it has; other tests leave some open."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder has gone already
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [name for name in names if name.startswith(str(folder))]
