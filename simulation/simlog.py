"""A log in memory: batches with epochs and producers, a part of it synced, and what a power loss leaves of it.

Batches are values shared by all replicas. Each place in a log has a chain number that stands for everything before
it, so that two logs are compared at an offset by comparing two integers.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from penstock.log.indexes import TransactionIndex
from penstock.log.leader_epochs import LeaderEpochCache
from penstock.log.producer_state import ProducerStateManager, batch_metadata
from penstock.protocol.record_batch import EndMarker

_NEVER_MS: Final = 1 << 60
NO_PRODUCER: Final = -1


class Batch(NamedTuple):
    """`serial` tells apart what was written by different hands at the same place."""

    serial: int
    base_offset: int
    next_offset: int
    epoch: int
    payload: tuple[Any, ...]
    producer_id: int = NO_PRODUCER
    producer_epoch: int = -1
    sequence: int = -1
    is_control: bool = False
    is_transactional: bool = False
    #: The end of a transaction; a batch without data then.
    marker: EndMarker | None = None

    def __repr__(self) -> str:
        return f"#{self.serial}[{self.base_offset}..{self.next_offset - 1}]e{self.epoch}"


def linked(chain: int, serial: int) -> int:
    """The chain number after one more batch."""
    return hash((chain, serial))


class SimLog:
    __slots__ = (
        "_first_chain",
        "_ghosts",
        "_sync_ends",
        "aborted",
        "bases",
        "batches",
        "believed_offset",
        "chains",
        "damaged",
        "end_offset",
        "epochs",
        "high_watermark",
        "is_synced_to_count",
        "lost_from",
        "name",
        "producers",
        "snapshot",
        "start_offset",
        "synced_offset",
    )

    def __init__(self, name: Any, *, is_synced_to_count: bool = True) -> None:
        self.name = name
        #: Flush policy `ack`: only what is synced counts for anything.
        self.is_synced_to_count = is_synced_to_count
        self.high_watermark = 0
        #: The newest snapshot, where the log has such: an offset and an epoch.
        self.snapshot: Any = None
        self.damaged: dict[int, None] = {}
        #: From here on the disk has nothing, whatever the page cache shows: an fsync failed and went unheard.
        self.lost_from: int | None = None
        #: Up to here the process believes to have synced, rightly or not.
        self.believed_offset = 0
        self._sync_ends: list[int] = []
        self._ghosts: tuple[int, list[Batch]] = (0, [])
        self._reset(0, 0)

    def __repr__(self) -> str:
        return (
            f"<SimLog {self.name} {self.start_offset}..{self.end_offset} synced {self.synced_offset} "
            f"hw {self.high_watermark} {self.epochs.entries()}>"
        )

    def _reset(self, offset: int, chain: int) -> None:
        self.batches: list[Batch] = []
        self.bases: list[int] = []
        self.chains: list[int] = []
        self.start_offset = self.end_offset = self.synced_offset = offset
        self.epochs = LeaderEpochCache()
        self.producers = ProducerStateManager(_NEVER_MS)
        self.aborted = TransactionIndex()
        self._first_chain = chain

    # --- reading ---

    @property
    def durable_offset(self) -> int:
        if not self.is_synced_to_count:
            return self.end_offset
        return max(self.synced_offset, self.believed_offset)

    @property
    def kept_offset(self) -> int:
        """What a power loss now would leave at least; all of it where the promise is not about power."""
        if not self.is_synced_to_count:
            return self.end_offset
        return self.synced_offset if self.lost_from is None else min(self.synced_offset, self.lost_from)

    @property
    def last_epoch(self) -> int:
        if self.epochs.latest >= 0:
            return self.epochs.latest
        return int(self.snapshot.epoch) if self.snapshot is not None else 0

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        return self.epochs.end_offset_for(epoch, self.end_offset)

    def epoch_at(self, offset: int) -> int:
        return self.epochs.epoch_at(offset)

    def chain_at(self, offset: int) -> int | None:
        """Stands for everything below the offset; None where no batch ends there."""
        place = bisect_left(self.bases, offset)
        if place == len(self.bases) and offset != self.end_offset:
            return None
        if place < len(self.bases) and self.bases[place] != offset:
            return None
        return self.chains[place - 1] if place else self._first_chain

    def read(self, offset: int, upto: int, batches_max: int = 1 << 30) -> list[Batch]:
        """Whole batches from the one that holds `offset`, none of which reaches beyond `upto`."""
        place = max(0, bisect_right(self.bases, offset) - 1)
        found = []
        for batch in self.batches[place : place + batches_max]:
            if batch.next_offset > upto:
                break
            if batch.next_offset > offset:
                found.append(batch)
        return found

    @property
    def last_stable_offset(self) -> int:
        """Where read_committed ends: before the oldest transaction that is open, or whose end is not committed."""
        unstable = self.producers.transactions.first_unstable_offset(self.high_watermark)
        return self.high_watermark if unstable is None else min(self.high_watermark, unstable)

    def aborted_in(self, start_offset: int, upto_offset: int) -> tuple[tuple[int, int], ...]:
        """Producer id and first offset of the aborted transactions with data in this stretch."""
        found: list[tuple[int, int]] = []
        self.aborted.collect(start_offset, upto_offset, found)
        return tuple(found)

    def is_damaged(self, batches: Sequence[Batch]) -> bool:
        return bool(self.damaged) and any(batch.base_offset in self.damaged for batch in batches)

    # --- writing ---

    def append(self, batch: Batch) -> None:
        assert batch.base_offset == self.end_offset, (self, batch)
        before = self.chains[-1] if self.chains else self._first_chain
        self.chains.append(linked(before, batch.serial))
        self.batches.append(batch)
        self.bases.append(batch.base_offset)
        self.end_offset = batch.next_offset
        if batch.epoch > self.epochs.latest:
            self.epochs.assign(batch.epoch, batch.base_offset)
        self._learn(batch)

    def truncate(self, offset: int) -> None:
        """Batches that reach beyond the offset go, as a whole."""
        if offset >= self.end_offset:
            return
        keep = bisect_right(self.bases, offset) - 1
        keep = max(0, keep if keep >= 0 and self.batches[keep].next_offset > offset else keep + 1)
        end = self.bases[keep] if keep < len(self.bases) else self.end_offset
        if self.synced_offset > end:
            # Until the next sync a power loss may bring back what was cut off.
            self._ghosts = (end, [b for b in self.batches[keep:] if b.next_offset <= self.synced_offset])
        self._cut(keep, max(end, self.start_offset))

    def _cut(self, keep: int, end: int) -> None:
        for base in self.bases[keep:]:
            self.damaged.pop(base, None)
        del self.batches[keep:], self.bases[keep:], self.chains[keep:]
        self.end_offset = end
        self.synced_offset = min(self.synced_offset, end)
        self.believed_offset = min(self.believed_offset, end)
        self._sync_ends = [min(each, end) for each in self._sync_ends]
        self.epochs.truncate_end(end)
        self.producers_truncated()

    def restart(self, offset: int, chain: int) -> None:
        """Everything goes; the log continues elsewhere, after what `chain` stands for."""
        self.damaged.clear()
        self.lost_from, self.believed_offset = None, 0
        self._sync_ends = [0 for _ in self._sync_ends]
        self._ghosts = (0, [])
        self._reset(offset, chain)
        self.producers.is_complete = offset == 0

    def raise_start(self, offset: int) -> None:
        """Whole batches below the offset go."""
        offset = min(offset, self.end_offset)
        if offset <= self.start_offset:
            return
        gone = bisect_right(self.bases, offset)
        if gone and self.batches[gone - 1].next_offset > offset:
            gone -= 1
        for base in self.bases[:gone]:
            self.damaged.pop(base, None)
        if gone:
            self._first_chain = self.chains[gone - 1]
            del self.batches[:gone], self.bases[:gone], self.chains[:gone]
        self.start_offset = offset
        self.producers.is_complete = False
        self.synced_offset = max(self.synced_offset, offset)
        self.epochs.truncate_start(offset)

    def producers_truncated(self) -> None:
        self.relearn_producers()

    def relearn_producers(self) -> None:
        self.producers.clear()
        self.aborted = TransactionIndex()
        for batch in self.batches:
            self._learn(batch)

    def _learn(self, batch: Batch) -> None:
        if batch.marker is not None:
            ended = self.producers.learn_marker(batch.marker, batch.base_offset, 0)
            if ended is not None:
                self.aborted.note(ended)
        elif batch.producer_id != NO_PRODUCER:
            last_delta = batch.next_offset - batch.base_offset - 1
            trace = batch_metadata(batch.sequence, batch.base_offset, last_delta, 0)
            is_transactional = batch.is_transactional
            self.producers.learn(batch.producer_id, batch.producer_epoch, trace, is_transactional, 0)

    # --- syncing ---

    def sync_begins(self) -> None:
        self._sync_ends.append(self.end_offset)

    def sync_ends(self) -> None:
        """What was there when it began is safe now, unless it was cut off meanwhile."""
        self.synced_offset = max(self.synced_offset, self._sync_ends.pop(0))
        self._ghosts = (0, [])

    def power_lost(self, draw: Callable[[int], int]) -> None:
        """Of what was not synced any part may be gone; the batch that was torn fails its checksum."""
        self._sync_ends.clear()
        self.believed_offset = 0
        if self.lost_from is not None:
            self.synced_offset = min(self.synced_offset, self.lost_from)
            self.lost_from = None
        first_unsynced = bisect_left(self.bases, self.synced_offset)
        keep = first_unsynced + draw(len(self.batches) - first_unsynced + 1)
        cut_at, ghosts = self._ghosts
        self._ghosts = (0, [])
        end = self.bases[keep] if keep < len(self.bases) else self.end_offset
        self._cut(keep, end)
        if ghosts and end == cut_at and ghosts[0].base_offset == cut_at and draw(2):
            for batch in ghosts:
                self.append(batch)
            self.synced_offset = self.end_offset

    def reopened(self) -> None:
        """Another process reads the log: what it knows of producers it learns from there."""
        self.relearn_producers()

    def process_died(self) -> None:
        """The page cache stays; syncs under way are forgotten."""
        self._sync_ends.clear()
