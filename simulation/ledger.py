"""What was committed in one log, as an outside observer wrote it down: it only grows, and never changes."""

from bisect import bisect_left, bisect_right
from typing import Any

from simulation.simlog import NO_PRODUCER, Batch, SimLog, linked


class Violation(AssertionError):
    """A promise was broken. `invariant` names it."""

    def __init__(self, invariant: str, story: str) -> None:
        super().__init__(f"{invariant}: {story}")
        self.invariant = invariant
        self.story = story


class Ledger:
    __slots__ = ("_bases", "_chains", "_next_sequences", "batches", "end_offset", "name", "shown_offset")

    def __init__(self, name: Any) -> None:
        self.name = name
        self.batches: list[Batch] = []
        self.end_offset = 0
        #: Up to where clients know that there is something: acknowledged, read, or told as the latest offset.
        self.shown_offset = 0
        self._bases: list[int] = []
        self._chains: list[int] = []
        self._next_sequences: dict[tuple[int, int], int] = {}

    def __repr__(self) -> str:
        return f"<Ledger {self.name} to {self.end_offset}, shown {self.shown_offset}>"

    @property
    def chain(self) -> int:
        return self._chains[-1] if self._chains else 0

    def chain_at(self, offset: int) -> int | None:
        """Stands for everything below the offset; None where no batch ends there."""
        if offset == self.end_offset:
            return self.chain
        place = bisect_left(self._bases, offset)
        if place == len(self._bases) or self._bases[place] != offset:
            return None
        return self._chains[place - 1] if place else 0

    def batch_at(self, offset: int) -> Batch | None:
        if offset >= self.end_offset:
            return None
        return self.batches[bisect_right(self._bases, offset) - 1]

    def reaches(self, log: SimLog) -> bool:
        """Whether the log holds everything that was committed."""
        return log.end_offset >= self.end_offset and log.chain_at(self.end_offset) == self.chain

    def extend(self, log: SimLog, upto: int) -> None:
        """A replica holds everything below `upto` for committed."""
        if upto <= self.end_offset:
            if log.start_offset <= upto and log.chain_at(upto) != self.chain_at(upto):
                raise Violation("committed data changed", f"{log} differs from {self} below {upto}")
            return
        if log.chain_at(self.end_offset) != self.chain:
            raise Violation("committed data changed", f"{log} commits up to {upto} but lacks {self}")
        for batch in log.read(self.end_offset, upto):
            self._add(batch)
        if self.end_offset != upto:
            raise Violation(
                "committed data changed", f"{log} commits {upto}, inside a batch or beyond its end"
            )

    def cut(self, offset: int) -> int:
        """An unclean election that was asked for and reported: what it lost is struck out. Returns how much."""
        before = self.end_offset
        while self.batches and self.batches[-1].next_offset > offset:
            self.end_offset = self.batches.pop().base_offset
            self._bases.pop()
            self._chains.pop()
        self.shown_offset = min(self.shown_offset, self.end_offset)
        self._next_sequences.clear()
        for batch in self.batches:
            if batch.producer_id != NO_PRODUCER and batch.sequence >= 0:
                self._next_sequences[batch.producer_id, batch.producer_epoch] = _following(batch)
        return before - self.end_offset

    def _add(self, batch: Batch) -> None:
        if batch.producer_id != NO_PRODUCER and batch.sequence >= 0:
            self._check_sequence(batch)
        self._chains.append(linked(self.chain, batch.serial))
        self.batches.append(batch)
        self._bases.append(batch.base_offset)
        self.end_offset = batch.next_offset

    def _check_sequence(self, batch: Batch) -> None:
        producer = (batch.producer_id, batch.producer_epoch)
        expected = self._next_sequences.get(producer, 0)
        if batch.sequence < expected:
            raise Violation(
                "idempotent producer duplicated", f"{self.name}: {batch} repeats {batch.sequence}"
            )
        if batch.sequence > expected:
            raise Violation(
                "order of a producer broken",
                f"{self.name}: {batch} has sequence {batch.sequence}, expected {expected}",
            )
        self._next_sequences[producer] = _following(batch)


def _following(batch: Batch) -> int:
    return batch.sequence + batch.next_offset - batch.base_offset
