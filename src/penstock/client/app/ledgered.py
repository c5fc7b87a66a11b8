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
from penstock.client.app.handles import handle_named
from penstock.client.app.handling import Call
from penstock.client.app.membership import Place
from penstock.client.app.outages import raise_outage
from penstock.client.ledgers import Fenced, Ledger, Position

__all__ = ["Book", "Ledgered", "entering"]

_LOG: Final = logging.getLogger("penstock.client")


class Book:
    """The positions of the partitions that this member has, as the ledger has them."""

    def __init__(self, ledger: Ledger, group: str, owner: str) -> None:
        self.ledger = ledger
        self.group = group
        self._owner = owner
        self._positions: dict[Place, Position] = {}

    def take(self, places: Sequence[Place]) -> dict[Place, int]:
        taken = self.ledger.take(self.group, places, self._owner)
        self._positions.update(taken)
        return {place: at.offset for place, at in taken.items() if at.offset is not None}

    def forget(self, places: Sequence[Place]) -> None:
        for place in places:
            self._positions.pop(place, None)

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
        """The transaction was committed."""
        self._positions[place] = self._positions[place]._replace(offset=offset + 1)


def entering(call: Call, book: Book, handle_name: str) -> Call:
    """The handler writes through the connection that it is given, and the position is part of the same transaction."""

    def handle(raw: Any) -> Any:
        place, offset = (raw.topic(), raw.partition()), raw.offset()
        if book.is_behind(place, offset):
            return None
        with book.ledger.transaction() as transaction:
            with handle_named(handle_name, transaction.connection) as given:
                result = call(raw, **{handle_name: given})
            book.enter(transaction, place, offset)
        book.entered(place, offset)
        return result

    return handle


class Ledgered(AtLeastOnce):
    def __init__(self, session: Session, commit_every_s: float, book: Book) -> None:
        super().__init__(session, commit_every_s)
        self._book = book
        self._fenced = False

    def failed(self, raw: Any, error: Exception) -> None:
        """A letter first, then the position; a fenced member sends none. Raises what is no fault of the message."""
        raise_outage(error)
        if isinstance(error, Fenced):
            self._fenced = True
            return
        place = raw.topic(), raw.partition()
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
        super().process(batch)
        if self._fenced:
            _LOG.warning("another member has taken partitions over; joining again")
            self._fenced = False
            self._session.figures.restarts += 1
            self._session.membership.rejoin()

    def assigned(self, places: Sequence[Place]) -> Mapping[Place, int]:
        return self._book.take(places)

    def revoked(self, places: Sequence[Place]) -> None:
        super().revoked(places)
        self._book.forget(places)

    def lost(self, places: Sequence[Place]) -> None:
        super().lost(places)
        self._book.forget(places)
