"""Effectively once: a message that was handled is known by its id when it comes again.

Where the handler takes a database connection, its result and the mark are one transaction, and nothing is doubled.
Where it does not, the mark follows the result: what was handled and not marked yet comes again after a crash.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from penstock.client.app.contracts import AtLeastOnce, Session
from penstock.client.app.figures import Figures
from penstock.client.app.handles import handle_named
from penstock.client.app.handling import NOT_HANDLED, Call
from penstock.client.app.message import id_of
from penstock.client.app.outages import raise_outage
from penstock.client.letters import origin_of
from penstock.client.stores import DedupeStore, StoreError

__all__ = ["EffectivelyOnce", "Marks", "marking", "within_transaction"]

_EXPIRE_EVERY_S: Final = 60.0


class Marks:
    """Ids that were handled and are to be marked; threads of handlers share it."""

    def __init__(self, store: DedupeStore, scope: str, ttl_s: float) -> None:
        self.store = store
        self._scope = scope
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        #: In their order; the values mean nothing.
        self._handled: dict[str, None] = {}
        self._expired_s = time.monotonic()

    def add(self, message_id: str) -> None:
        with self._lock:
            self._handled[message_id] = None

    def keep(self) -> None:
        """Durable when this returns. Raises StoreUnavailable, and then they are kept for the next time."""
        with self._lock:
            handled, self._handled = self._handled, {}
        try:
            if handled:
                self.store.mark(self._scope, list(handled), self._ttl_s)
        except BaseException:
            with self._lock:
                self._handled = handled | self._handled
            raise

    def seen(self, ids: Sequence[str]) -> set[str]:
        with self._lock:
            mine = [each for each in ids if each in self._handled]
        found: set[str] = self.store.seen(self._scope, ids)
        return found.union(mine)

    def claim(self, transaction: Any, message_id: str) -> bool:
        return bool(transaction.claim(self._scope, message_id, self._ttl_s))

    def expire_now_and_then(self) -> None:
        now_s = time.monotonic()
        if now_s - self._expired_s > _EXPIRE_EVERY_S:
            self._expired_s = now_s
            self.store.expire()


def marking(call: Call, marks: Marks) -> Call:
    """The mark after the result."""

    def handle(raw: Any) -> Any:
        result = call(raw)
        marks.add(id_of(raw))
        return result

    return handle


def marking_async(call: Call, marks: Marks) -> Call:
    async def handle(raw: Any) -> Any:
        result = await call(raw)
        marks.add(id_of(raw))
        return result

    return handle


def within_transaction(call: Call, marks: Marks, handle_name: str, figures: Figures) -> Call:
    """Result and mark in one: the handler writes through the connection that it is given."""

    def handle(raw: Any) -> Any:
        with marks.store.transaction() as transaction:
            if not marks.claim(transaction, id_of(raw)):
                figures.add("duplicates")
                return NOT_HANDLED
            with handle_named(handle_name, transaction.connection) as given:
                return call(raw, **{handle_name: given})

    return handle


class EffectivelyOnce(AtLeastOnce):
    def __init__(self, session: Session, commit_every_s: float, marks: Marks, *, claims: bool) -> None:
        super().__init__(session, commit_every_s)
        self._marks = marks
        self._claims = claims

    def process(self, batch: Sequence[Any]) -> None:
        batch = self._without_failed(batch)
        super().process(batch if self._claims else self._new(batch))

    def failed(self, raw: Any) -> None:
        """A letter of it is on its way: it is marked when that is there, so that it gets no second one."""
        self._marks.add(_failure_id(raw))

    def _without_failed(self, batch: Sequence[Any]) -> Sequence[Any]:
        """What failed before and is read again, since its position was not committed in time."""
        ids = [_failure_id(raw) for raw in batch]
        known = self._seen(ids)
        if not known:
            return batch
        left = [raw for raw, failure_id in zip(batch, ids, strict=True) if failure_id not in known]
        self._session.figures.add("duplicates", len(batch) - len(left))
        return left

    def _seen(self, ids: Sequence[str]) -> set[str]:
        """Raises StoreUnavailable, and ApplicationError for a store that cannot work."""
        try:
            return self._marks.seen(ids)
        except StoreError as error:
            raise_outage(error)
            raise

    def _new(self, batch: Sequence[Any]) -> list[Any]:
        """Without those that are marked, in the lanes, or twice in this batch."""
        self._session.runner.check()
        ids = [id_of(raw) for raw in batch]
        known = self._seen(ids)
        in_hand = {id_of(raw): raw for raw in self._session.runner.pending()}
        new = []
        for raw, message_id in zip(batch, ids, strict=True):
            if message_id in known or (message_id in in_hand and not _follows(raw, in_hand[message_id])):
                self._session.figures.add("duplicates")
            else:
                known.add(message_id)
                new.append(raw)
        return new

    def tick(self) -> None:
        super().tick()
        self._marks.expire_now_and_then()

    def _settle(self) -> None:
        super()._settle()
        self._marks.keep()


def _follows(raw: Any, other: Any) -> bool:
    """Whether it is a later attempt at the other: that one has failed then, even if its lane has not noticed yet."""
    return _attempts(raw) > _attempts(other)


def _failure_id(raw: Any) -> str:
    """Of the record where it was read: its retry, and a dead letter that is replayed, are other records."""
    return f"failed {raw.topic()}:{raw.partition()}:{raw.offset()}"


def _attempts(raw: Any) -> int:
    return origin_of(raw.headers(), topic="", partition=0, offset=0, timestamp_ms=0).attempts
