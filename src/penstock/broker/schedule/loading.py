"""Loading a shard from its log, and reading held records back from it. Blocking, for threads."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from penstock.protocol.records import Record, decode_records, iter_batches
from penstock.scheduling.records import Due, Group, read_group, source_of
from penstock.scheduling.shard import ScheduleShard

if TYPE_CHECKING:
    from penstock.log.log import Log
    from penstock.log.positions import LogPosition

_READ_BYTES: Final = 256 << 10
#: The event loop needs the interpreter too: rest this long after each read.
_REST_S: Final = 0.0002


def load_sources(shard: ScheduleShard, log: Log, end: LogPosition) -> None:
    """All that is in the log counts: what is not committed yet will be, or this node leads no more."""
    for record, is_group in _records(log, end):
        if not is_group:
            shard.replay(record.offset, record.key or b"", record.value)


def load_groups(shard: ScheduleShard, log: Log, end: LogPosition) -> None:
    """Once the sources are known: what they have released already is not taken in."""
    for record, is_group in _records(log, end):
        if is_group:
            shard.replay(record.offset, record.key or b"", record.value)


def _records(log: Log, end: LogPosition) -> Iterator[tuple[Record, bool]]:
    offset = log.start_offset
    while offset < end.offset:
        piece = log.read(offset, _READ_BYTES, end)
        assert piece.next_offset > offset, f"nothing to read at {offset} of {end.offset}"
        for header, batch in iter_batches(piece.data):
            if header.is_control:
                continue
            for record in decode_records(batch, log.config.decoded_bytes_max):
                assert record.key is not None
                yield record, source_of(record.key)[1]
        offset = piece.next_offset
        time.sleep(_REST_S)


def read_groups(log: Log, dues: Iterable[Due]) -> Iterator[tuple[int, Group]]:
    """The groups of these, by offset, each batch read once. Raises KeyError for what is not there."""
    batch: dict[int, bytes | None] = {}
    for offset in sorted({due.offset for due in dues}):
        if offset not in batch:
            piece = log.read(offset, 1, log.end)
            _, found = next(iter_batches(piece.data))
            records = decode_records(found, log.config.decoded_bytes_max)
            batch = {record.offset: record.value for record in records}
        value = batch[offset]
        assert value is not None, f"a tombstone at {offset}"
        yield offset, read_group(value)
