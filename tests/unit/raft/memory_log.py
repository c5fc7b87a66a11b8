"""A log in memory, with a synced and an unsynced part, as the quorum's rules see one.

It keeps its whole history, also what lies before its start, so that tests can compare what nodes have.
"""

from __future__ import annotations

import pickle
from typing import NamedTuple

from penstock.raft.types import ControlRecord, OffsetAndEpoch, Voters, VoterSet


class Entry(NamedTuple):
    epoch: int
    value: str | ControlRecord

    def __str__(self) -> str:
        if isinstance(self.value, Voters):
            return f"voters {','.join(str(id) for id in self.value.voters.ids)}"
        return self.value if isinstance(self.value, str) else type(self.value).__name__


class MemoryLog:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.start_offset = 0
        self.durable_offset = 0
        self.snapshot: OffsetAndEpoch | None = None
        #: Counts what cut the log: a sync that began before says nothing of what came after.
        self.cuts = 0

    def __str__(self) -> str:
        shown = [f"{offset}:{entry}/{entry.epoch}" for offset, entry in enumerate(self.entries)]
        return " ".join(shown[self.start_offset :])

    @property
    def end_offset(self) -> int:
        return len(self.entries)

    @property
    def last_epoch(self) -> int:
        return self.entries[-1].epoch if self.entries else -1

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        if epoch < 0 or epoch > self.last_epoch:
            return -1, -1
        end = self.start_offset
        while end < self.end_offset and self.entries[end].epoch <= epoch:
            end += 1
        if epoch == self.last_epoch:
            return epoch, self.end_offset
        return (self.entries[end - 1].epoch if end > self.start_offset else epoch), end

    # What its owner does with it

    def append(self, entries: list[Entry]) -> int:
        offset = self.end_offset
        self.entries += entries
        return offset

    def read(self, offset: int, count_max: int = 1000) -> bytes:
        assert offset >= self.start_offset, "that is gone from the log"
        return pickle.dumps(self.entries[offset : offset + count_max])

    def sync(self, offset: int) -> None:
        self.durable_offset = max(self.durable_offset, min(offset, self.end_offset))

    def truncate(self, offset: int) -> None:
        assert self.start_offset <= offset < self.end_offset
        self.cuts += 1
        del self.entries[offset:]
        self.durable_offset = min(self.durable_offset, offset)

    def lose_unsynced(self) -> None:
        del self.entries[self.durable_offset :]

    def take_snapshot(self, offset: int, start_offset: int) -> None:
        """The log may start before the end of its newest snapshot."""
        assert start_offset <= offset <= self.durable_offset
        self.snapshot = OffsetAndEpoch(offset, self.entries[offset - 1].epoch)
        self.start_offset = start_offset

    def read_snapshot(self, id: OffsetAndEpoch) -> bytes | None:
        if id != self.snapshot:
            return None
        return pickle.dumps(self.entries[: id.offset])

    def install(self, id: OffsetAndEpoch, data: bytes) -> None:
        self.cuts += 1
        self.entries = pickle.loads(data)
        assert (self.end_offset, self.last_epoch) == id
        self.snapshot, self.start_offset, self.durable_offset = id, id.offset, id.offset

    def voter_sets(self, start: int = 0) -> list[tuple[int, VoterSet]]:
        return [
            (offset, entry.value.voters)
            for offset, entry in enumerate(self.entries[start:], start)
            if isinstance(entry.value, Voters)
        ]
