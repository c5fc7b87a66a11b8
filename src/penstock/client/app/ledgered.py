"""Exactly once with a database: a message's result and its position are one transaction of that database.

Positions are read from the ledger when partitions are assigned, and moved by compare-and-set under an epoch that every
new owner raises: a member that does not know yet that it lost a partition changes nothing. The group's own positions
follow behind, for those who look at lag.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.client.app.contracts import AtLeastOnce, Session
from penstock.client.app.effectively import Marks
from penstock.client.app.figures import Figures
from penstock.client.app.handles import handle_named
from penstock.client.app.handling import NOT_HANDLED, Call
from penstock.client.app.places import Place, place_of
from penstock.client.ledgers import Fenced, Ledger, Position
from penstock.client.letters import origin_of, retry_level

__all__ = ["Book", "Ledgered", "entering"]

_LOG: Final = logging.getLogger("penstock.client")


class Book:
    """The positions of the partitions that this member has, as the ledger has them."""

    def __init__(self, ledger: Ledger, group: str, owner: str) -> None:
        self.ledger = ledger
        self.group = group
        self._owner = owner
        self._positions: dict[Place, Position] = {}
        #: Of which nothing was entered since they were taken.
        self._fresh: set[Place] = set()

    def take(self, places: Sequence[Place]) -> dict[Place, int]:
        taken = self.ledger.take(self.group, places, self._owner)
        self._positions.update(taken)
        self._fresh.update(places)
        return {place: at.offset for place, at in taken.items() if at.offset is not None}

    def forget(self, places: Sequence[Place]) -> None:
        for place in places:
            self._positions.pop(place, None)

    def may_be_twice(self, place: Place) -> bool:
        """Whoever had the place before may have sent a letter of its next message, and got no further.

        So that message may be in a retry topic too, and any message of a retry topic may be there a second time.
        """
        return place in self._fresh or retry_level(place[0]) is not None

    def is_behind(self, place: Place, offset: int) -> bool:
        """Whether the ledger has this message already."""
        known = self._positions.get(place)
        return known is not None and known.offset is not None and offset < known.offset

    def enter(self, transaction: Any, place: Place, offset: int) -> None:
        """In the transaction: this message is done. Raises Fenced."""
        known = self._positions.get(place)
        if known is None:
            raise Fenced(f"{place[0]}[{place[1]}] belongs to another member")
        transaction.advance(self.group, place, known.offset, offset + 1, known.epoch)

    def entered(self, place: Place, offset: int) -> None:
        """The transaction was committed; the place may have gone since."""
        known = self._positions.get(place)
        if known is not None:
            self._positions[place] = known._replace(offset=offset + 1)
        self._fresh.discard(place)


def entering(call: Call, book: Book, handle_name: str, marks: Marks | None, figures: Figures) -> Call:
    """The handler writes through the connection that it is given, and the position is part of the same transaction.

    With retries there are `marks`, also in that transaction, of those that may be there twice.
    """

    def is_new(transaction: Any, raw: Any, place: Place) -> bool:
        if marks is None or not book.may_be_twice(place):
            return True
        return marks.claim(marks.store.joined(transaction.connection), _first_place(raw))

    def handle(raw: Any) -> Any:
        place, offset = place_of(raw), raw.offset()
        if book.is_behind(place, offset):
            return NOT_HANDLED
        result: Any = NOT_HANDLED
        with book.ledger.transaction() as transaction:
            if is_new(transaction, raw, place):
                with handle_named(handle_name, transaction.connection) as given:
                    result = call(raw, **{handle_name: given})
            else:
                figures.add("duplicates")
            book.enter(transaction, place, offset)
        book.entered(place, offset)
        return result

    return handle


def _first_place(raw: Any) -> str:
    origin = origin_of(
        raw.headers(), topic=raw.topic(), partition=raw.partition(), offset=raw.offset(), timestamp_ms=0
    )
    return f"{origin.topic}:{origin.partition}:{origin.offset}"


class Ledgered(AtLeastOnce):
    def __init__(self, session: Session, commit_every_s: float, book: Book, marks: Marks | None) -> None:
        super().__init__(session, commit_every_s)
        self._book = book
        self._marks = marks
        self._fenced = False

    def failed(self, raw: Any, error: Exception) -> None:
        """A letter first, then the position; a fenced member sends none.

        Who is killed in between leaves a letter of a message that is handled again: of its results one is kept, by
        marks, and of its dead letters there may be two.
        """
        if isinstance(error, Fenced):
            self._fenced = True
            return
        place = place_of(raw)
        if self._fenced or place not in self._session.membership.places:
            return
        self._session.letterbox.failed(raw, error)
        self._session.letterbox.settle()
        try:
            with self._book.ledger.transaction() as transaction:
                self._book.enter(transaction, place, raw.offset())
            self._book.entered(place, raw.offset())
        except Fenced:
            self._fenced = True

    def process(self, batch: Sequence[Any]) -> None:
        self._session.runner.run(batch, self._arrived)
        if not self._fenced:
            self.tick()
        else:
            _LOG.warning("another member has taken partitions over; joining again")
            self._fenced = False
            self._session.figures.restarts += 1
            self._session.membership.rejoin()

    def tick(self) -> None:
        super().tick()
        if self._marks is not None:
            self._marks.expire_now_and_then()

    def assigned(self, places: Sequence[Place]) -> Mapping[Place, int]:
        return self._book.take(places)

    def revoked(self, places: Sequence[Place]) -> None:
        super().revoked(places)
        self._book.forget(places)

    def lost(self, places: Sequence[Place]) -> None:
        super().lost(places)
        self._book.forget(places)
