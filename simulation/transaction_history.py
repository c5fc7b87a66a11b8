"""What transactional clients did and were told, and what follows from it for everybody who reads what is committed."""

from __future__ import annotations

from typing import Any, NamedTuple

from simulation.ledger import Violation
from simulation.replica import Key
from simulation.simlog import Batch


class Copy(NamedTuple):
    """A record that a copier made of an input record."""

    source: Key
    offset: int


class Written(NamedTuple):
    """A record of a transaction. Equal contents may be written by several: `place` tells them apart."""

    transaction: int
    place: int
    content: Any


class TransactionHistory:
    def __init__(self) -> None:
        self._count = 0
        #: Acknowledged records of each transaction.
        self._written: dict[int, list[tuple[Key, Written]]] = {}
        #: Transactions that somebody wanted to commit, after all their records had been acknowledged.
        self._wanted: dict[int, None] = {}
        self._told: dict[int, bool] = {}
        self._copies: dict[Copy, None] = {}
        self._seen: dict[tuple[Key, Written], None] = {}

    def begins(self) -> int:
        self._count += 1
        self._written[self._count] = []
        return self._count

    def wrote(self, transaction: int, key: Key, values: tuple[Written, ...]) -> None:
        self._written[transaction].extend((key, value) for value in values)

    def decides(self, transaction: int, *, commit: bool) -> None:
        if commit:
            self._wanted[transaction] = None

    def told(self, transaction: int, *, committed: bool) -> None:
        """Its client was told that it is committed, or aborted."""
        known = self._told.setdefault(transaction, committed)
        if known != committed:
            raise Violation("a transaction has one outcome", f"{transaction}: told both")

    def seen(self, key: Key, value: Written) -> None:
        """By a reader of what is committed."""
        transaction = value.transaction
        if transaction not in self._wanted or self._told.get(transaction) is False:
            raise Violation(
                "read_committed shows committed transactions only",
                f"{value} in {key}, told {self._told.get(transaction)}",
            )
        if (key, value) in self._seen:
            raise Violation("read_committed shows each record once", f"{value} in {key}")
        self._seen[key, value] = None
        if isinstance(value.content, Copy):
            self._copied(value.content)

    @property
    def copies_seen(self) -> int:
        return len(self._copies)

    def _copied(self, copy: Copy) -> None:
        if copy in self._copies:
            raise Violation("each input is copied exactly once", f"{copy} came again")
        self._copies[copy] = None

    def finish(self, inputs: dict[Key, int]) -> None:
        """Everything committed was read. `inputs`: how many input records there are."""
        for transaction, written in self._written.items():
            self._all_or_nothing(transaction, written)
        for source, count in inputs.items():
            offsets = sorted(copy.offset for copy in self._copies if copy.source == source)
            if offsets != list(range(count)):
                raise Violation("each input is copied exactly once", f"{count} of {source}: {offsets}")

    def _all_or_nothing(self, transaction: int, written: list[tuple[Key, Written]]) -> None:
        visible = [each for each in written if each in self._seen]
        if visible and len(visible) != len(written):
            missing = [each for each in written if each not in self._seen]
            raise Violation("a transaction is all or nothing", f"{transaction}: {missing} are missing")
        if self._told.get(transaction) and len(visible) != len(written):
            raise Violation("a transaction that was committed is there", f"{transaction}: {written}")


class CommittedView:
    """What a client leaves out of one answer: it is told which transactions were aborted, and where they began."""

    def __init__(self, aborted: tuple[tuple[int, int], ...]) -> None:
        self._coming = sorted(aborted, key=lambda one: one[1], reverse=True)
        self._out: set[int] = set()

    def shows(self, batch: Batch) -> bool:
        while self._coming and self._coming[-1][1] <= batch.base_offset:
            self._out.add(self._coming.pop()[0])
        if batch.marker is not None:
            self._out.discard(batch.marker.producer_id)
            return False
        return not batch.is_control and not (batch.is_transactional and batch.producer_id in self._out)
