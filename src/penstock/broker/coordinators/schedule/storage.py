"""What a schedule shard does in threads: its index of due times, loading it from the log, and reading held records
back.

Each source has a ladder queue of due times, with its blocks in an unnamed temporary file. The file can be rebuilt
from the log, so it does not outlive the shard. Threads change the ladder queue; due times that arrive meanwhile wait
beside it.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.log.validation import read_validated
from penstock.protocol.record_batch import Record, decode_records, iter_batches
from penstock.scheduling.ladder_queue import BLOCK_ENTRIES, LadderQueue
from penstock.scheduling.schedule_log import (
    DUE_BYTES,
    NOTHING_RELEASED,
    DueEntry,
    ScheduleSource,
    SourceState,
    StoredBlock,
    read_stored_block,
    source_of,
    unpack_due,
)
from penstock.scheduling.schedule_shard import ScheduleShard

if TYPE_CHECKING:
    from penstock.log.log import Log
    from penstock.log.segment import LogOffsetMetadata


_BLOCK_BYTES = BLOCK_ENTRIES * DUE_BYTES


class BlockFile:
    """Blocks of equal size, usable in any thread.

    The file is closed only when it is no longer referenced, because a thread may outlive the shard that it works for.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd: int | None = None
        self._free: list[int] = []
        self._end = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<BlockFile of {self._end} blocks, {len(self._free)} free>"

    def write(self, block: bytes) -> int:
        assert len(block) == _BLOCK_BYTES
        with self._lock:
            if self._fd is None:
                self._fd, path = tempfile.mkstemp(prefix=".schedule-", dir=self._directory)
                os.unlink(path)
                weakref.finalize(self, os.close, self._fd)
            if self._free:
                block_id = self._free.pop()
            else:
                block_id, self._end = self._end, self._end + 1
        os.pwrite(self._fd, block, block_id * _BLOCK_BYTES)
        return block_id

    def read(self, block_id: int) -> bytes:
        assert self._fd is not None
        return os.pread(self._fd, _BLOCK_BYTES, block_id * _BLOCK_BYTES)

    def free(self, block_id: int) -> None:
        with self._lock:
            self._free.append(block_id)


#: Due times per source that may wait in memory before they are added to the ladder queue.
_ARRIVALS_MAX: Final = 2048


class SourceDueIndex:
    def __init__(self, blocks: BlockFile) -> None:
        self.ladder = LadderQueue(blocks)
        self.ladder_first_ms: int | None = None
        self._arrived: list[bytes] = []
        self._arrived_first_ms: int | None = None

    @property
    def first_due_ms(self) -> int | None:
        """A lower bound for the next due time; None when nothing is held."""
        firsts = [ms for ms in (self.ladder_first_ms, self._arrived_first_ms) if ms is not None]
        return min(firsts, default=None)

    def add_arrivals(self, dues: Sequence[bytes]) -> None:
        """Runs on the event loop."""
        self._arrived += dues
        first_ms = unpack_due(min(dues)).due_ms
        if self._arrived_first_ms is None or first_ms < self._arrived_first_ms:
            self._arrived_first_ms = first_ms

    @property
    def arrived_count(self) -> int:
        return len(self._arrived)

    def drain_arrivals(self) -> list[bytes]:
        """Runs on the event loop. Returns the due times that a thread must add before it uses the ladder queue."""
        self.ladder_first_ms = self.first_due_ms  # correct even if the thread fails
        arrived, self._arrived = self._arrived, []
        self._arrived_first_ms = None
        return arrived

    def settle(self, arrived: list[bytes]) -> int | None:
        """Blocking: add the due times and return the earliest of all."""
        self.ladder.add(arrived)
        first = self.ladder.first()
        return None if first is None else unpack_due(first).due_ms

    def next_dues(
        self, arrived: list[bytes], state: SourceState, now_ms: int, limit: int
    ) -> tuple[list[DueEntry], int | None]:
        """Blocking: return the due entries after the open plan, and the due time of the first entry after that plan.

        Planned entries stay in the ladder queue until the plan is completed.
        """
        planned = state.plan.record_count if state.plan is not None else 0
        keys = self._after_mark(arrived, state, limit + planned)[planned:]
        dues = list(map(unpack_due, keys))
        return [due for due in dues if due.due_ms <= now_ms], dues[0].due_ms if dues else None

    def planned_dues(self, arrived: list[bytes], state: SourceState) -> list[DueEntry]:
        """Blocking: return the entries of the open plan."""
        assert state.plan is not None
        return list(map(unpack_due, self._after_mark(arrived, state, state.plan.record_count)))

    def _after_mark(self, arrived: list[bytes], state: SourceState, limit: int) -> Sequence[bytes]:
        self.ladder.add(arrived)
        if state.mark != NOTHING_RELEASED:
            self.ladder.drop_upto(state.mark.packed())
        return self.ladder.peek(limit)

    def groups(self, arrived: list[bytes], limit: int) -> list[int]:
        """Blocking: remove the next entries and return the offsets of their stored blocks."""
        self.ladder.add(arrived)
        keys = self.ladder.peek(limit)
        if keys:
            self.ladder.drop_upto(keys[-1])
        return sorted({unpack_due(key).offset for key in keys})


class DueIndex:
    """The index that a shard replays into: in a thread while the shard loads, then (`is_live`) on the event loop."""

    def __init__(self, blocks: BlockFile) -> None:
        self._blocks = blocks
        self.by_source: dict[ScheduleSource, SourceDueIndex] = {}
        self.is_live = False

    def add(self, source: ScheduleSource, dues: Sequence[bytes]) -> None:
        if not dues:
            return
        index = self.by_source.get(source)
        if index is None:
            index = self.by_source[source] = SourceDueIndex(self._blocks)
        if self.is_live:
            index.add_arrivals(dues)
        else:
            index.ladder.add(dues)

    def has_excess_arrivals(self, source: ScheduleSource) -> bool:
        """Whether more due times wait beside the ladder queue than should be kept there."""
        index = self.by_source.get(source)
        return index is not None and index.arrived_count > _ARRIVALS_MAX

    def forget(self, source: ScheduleSource) -> None:
        self.by_source.pop(source, None)

    def begin(self) -> None:
        """Blocking: end the loading."""
        for index in self.by_source.values():
            index.ladder_first_ms = index.settle([])
        self.is_live = True


_READ_BYTES: Final = 256 << 10
#: Pause after each read, because the event loop needs the interpreter (GIL) too.
_PAUSE_S: Final = 0.0002


def load_sources(shard: ScheduleShard, log: Log, end: LogOffsetMetadata) -> None:
    """Replay source states, also uncommitted ones: they will be committed, or this node loses the leadership."""
    for record, is_group in _read_records(log, end):
        if not is_group:
            shard.replay(record.offset, record.key or b"", record.value)


def load_groups(shard: ScheduleShard, log: Log, end: LogOffsetMetadata) -> None:
    """Replay stored blocks after the sources, so that entries that are already released are skipped."""
    for record, is_group in _read_records(log, end):
        if is_group:
            shard.replay(record.offset, record.key or b"", record.value)


def _read_records(log: Log, end: LogOffsetMetadata) -> Iterator[tuple[Record, bool]]:
    offset = log.start_offset
    while offset < end.offset:
        piece = read_validated(log, offset, _READ_BYTES, end)
        assert piece.next_offset > offset, f"nothing to read at {offset} of {end.offset}"
        for header, batch in iter_batches(piece.data):
            if header.is_control:
                continue
            for record in decode_records(batch, log.config.decoded_bytes_max):
                assert record.key is not None
                yield record, source_of(record.key)[1]
        offset = piece.next_offset
        time.sleep(_PAUSE_S)


def read_groups(log: Log, dues: Iterable[DueEntry]) -> Iterator[tuple[int, StoredBlock]]:
    """Yield the stored blocks of these entries by offset; read each batch once.

    Raises KeyError if one is missing, and ApiError if it is damaged.
    """
    batch: dict[int, bytes | None] = {}
    for offset in sorted({due.offset for due in dues}):
        if offset not in batch:
            piece = read_validated(log, offset, 1, log.end)
            _, found = next(iter_batches(piece.data))
            records = decode_records(found, log.config.decoded_bytes_max)
            batch = {record.offset: record.value for record in records}
        value = batch[offset]
        assert value is not None, f"a tombstone at {offset}"
        yield offset, read_stored_block(value)
