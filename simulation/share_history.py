"""What became of the records of share groups, as an outside observer wrote it down."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from penstock.groups.share.partition.share_partition_state import (
    ACCEPT,
    REJECT,
    RENEW,
    AcknowledgementBatch,
    AcquiredBatch,
)
from penstock.groups.share.state.share_state import DEAD_LETTER_REJECTED
from simulation.ledger import Violation
from simulation.replica import Key


class Shared(NamedTuple):
    """One record, as one group sees it."""

    group: str
    key: Key
    offset: int


class DeadLetter(NamedTuple):
    """What a dead-letter topic of a world holds."""

    record: Shared
    reason: int
    delivery_count: int


class Lock(NamedTuple):
    """By the clock of the leader of that epoch."""

    leader_epoch: int
    member: str
    until_ms: int


class ShareHistory:
    def __init__(self, *, at_most_once: frozenset[str], limit: int, lock_ms: int) -> None:
        self.at_most_once = at_most_once
        self.limit = limit
        self.lock_ms = lock_ms
        self.delivered: Counter[Shared] = Counter()
        self._locks: dict[Shared, Lock] = {}
        #: Records whose end was stored and confirmed, with the leader epoch of that.
        self._accepted: dict[Shared, int] = {}
        self._rejected: dict[Shared, None] = {}
        #: Accepted by a member, whether it ever heard that this is stored or not.
        self._said: dict[Shared, None] = {}
        self._buried: dict[Shared, None] = {}

    # --- what leaders do ---

    def acquired(
        self, group: str, key: Key, epoch: int, member: str, ranges: list[AcquiredBatch], now_ms: int
    ) -> None:
        for first, last, _ in ranges:
            for offset in range(first, last + 1):
                record = Shared(group, key, offset)
                self._check_free(record, epoch, member, now_ms)
                self._locks[record] = Lock(epoch, member, now_ms + self.lock_ms)
                self.delivered[record] += 1
                if group in self.at_most_once and self.delivered[record] > 1:
                    raise Violation("at most once: never handed out twice", f"{record} to {member}")

    def _check_free(self, record: Shared, epoch: int, member: str, now_ms: int) -> None:
        lock = self._locks.get(record)
        if lock is not None and lock.leader_epoch == epoch and lock.until_ms > now_ms:
            raise Violation("one lock at a time", f"{record} to {member} at {now_ms}, {lock}")
        if self._accepted.get(record, epoch + 1) <= epoch:
            raise Violation("what was accepted never comes again", f"{record} to {member} in epoch {epoch}")

    def said(
        self, group: str, key: Key, member: str, batches: list[AcknowledgementBatch], now_ms: int
    ) -> None:
        """A leader has taken these acknowledgements."""
        for offset, kind in _each(batches):
            record = Shared(group, key, offset)
            lock = self._locks.pop(record, None)
            if kind == RENEW and lock is not None:
                self._locks[record] = lock._replace(until_ms=now_ms + self.lock_ms)
            elif kind == REJECT:
                self._rejected[record] = None
            elif kind == ACCEPT:
                self._said[record] = None

    def gone(self, group: str, key: Key, epoch: int, member: str) -> None:
        """A member has left: what it held is free."""
        for record, lock in tuple(self._locks.items()):
            if (record.group, record.key) == (group, key) and lock[:2] == (epoch, member):
                del self._locks[record]

    def confirmed(self, group: str, key: Key, epoch: int, batches: list[AcknowledgementBatch]) -> None:
        """Their member is told that it is so."""
        for offset, kind in _each(batches):
            record = Shared(group, key, offset)
            if kind == ACCEPT:
                self._accepted.setdefault(record, epoch)

    # --- the dead-letter topic ---

    def buried(self, letter: DeadLetter) -> None:
        """Committed there."""
        record = letter.record
        if record in self._buried:
            raise Violation("a dead letter is there exactly once", f"{letter}")
        if record in self._accepted:
            raise Violation("what was accepted is not buried", f"{letter}")
        is_due = self.delivered[record] >= self.limit
        if letter.reason == DEAD_LETTER_REJECTED:
            is_due = record in self._rejected
        if not is_due:
            raise Violation("nothing is given up before its limit", f"{letter}: {self.delivered[record]}")
        self._buried[record] = None

    def finish(self, group: str, key: Key, end_offset: int) -> None:
        """All records below the end are final: each was accepted, or is a dead letter."""
        for offset in range(end_offset):
            record = Shared(group, key, offset)
            if record not in self._said and record not in self._buried:
                raise Violation("no record is lost", f"{record}, delivered {self.delivered[record]} times")


def _each(batches: list[AcknowledgementBatch]) -> list[tuple[int, int]]:
    return [
        (offset, types[0] if len(types) == 1 else types[offset - first])
        for first, last, types in batches
        for offset in range(first, last + 1)
    ]
