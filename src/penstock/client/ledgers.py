"""What every ledger does, and the step by which a position moves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from penstock.client.errors import ClientError
from penstock.client.stores.base import DedupeStore

__all__ = ["Fenced", "Holder", "Ledger", "LedgerTransaction", "Place", "Position", "Positions", "Step"]

#: Topic and partition.
Place = tuple[str, int]


class Fenced(ClientError):
    """Somebody else has taken the place, or has moved its position: nothing of the transaction is kept."""


class Position(NamedTuple):
    #: The next offset to handle; None where nothing was handled yet.
    offset: int | None
    #: Of the ownership that has just begun.
    epoch: int


class Holder(NamedTuple):
    """A row of the table, for whoever is fenced."""

    offset: int | None
    epoch: int
    owner: str


class Step(NamedTuple):
    group: str
    place: Place
    from_offset: int | None
    to_offset: int
    epoch: int


class Ledger(Protocol):
    """Any number of threads may use one ledger. Every method raises StoreUnavailable, StoreError."""

    def positions(self, group: str, places: Sequence[Place]) -> dict[Place, int | None]:
        """The next offset of each; None where nothing was handled yet."""

    def take(self, group: str, places: Sequence[Place], owner: str) -> dict[Place, Position]:
        """On assignment: from now on every older owner of these places is fenced.

        A transaction of an older owner that has advanced is waited for, and its position is the one returned.
        """

    def transaction(self) -> AbstractContextManager[LedgerTransaction]:
        """Committed when the block ends, rolled back when it raises.

        Raises StoreUnavailable when the database went away: nobody knows then whether it was committed, and `positions`
        tells. Raises TransactionSpoiled, and rolls back, where a commit would not have kept what the block did.
        """

    def marks(self) -> DedupeStore:
        """Ids in the same database, to be claimed in transactions of the ledger. It is closed with the ledger."""

    def close(self) -> None:
        """Nothing is open afterwards."""


class Positions(Protocol):
    """The table of positions in one dialect of SQL, inside a transaction."""

    def move(self, connection: Any, step: Step) -> bool:
        """Whether position and epoch were as the step says, and the position was moved."""

    def holder(self, connection: Any, step: Step) -> Holder | None: ...


class LedgerTransaction:
    """Open until its block ends. What is done through `connection` and the steps are kept together, or not at all.

    The row of a place is locked from `advance` to the end of the block, so advance last, after the work.
    """

    def __init__(self, connection: Any, positions: Positions) -> None:
        #: Of the driver: `sqlite3` or `psycopg`. Its transaction is not the user's to end.
        self.connection = connection
        #: Why this transaction will not be committed, whatever the block does with the exception.
        self.fenced: Fenced | None = None
        self._positions = positions

    def advance(self, group: str, place: Place, from_offset: int | None, to_offset: int, epoch: int) -> None:
        """Compare and set. Raises Fenced when another owner or another position is there."""
        assert to_offset > (-1 if from_offset is None else from_offset), (
            f"{place}: {from_offset} to {to_offset}"
        )
        step = Step(group, place, from_offset, to_offset, epoch)
        if not self._positions.move(self.connection, step):
            self.fenced = Fenced(_why(step, self._positions.holder(self.connection, step)))
            raise self.fenced


def _why(step: Step, holder: Holder | None) -> str:
    topic, partition = step.place
    where = f"{topic}[{partition}] of {step.group}"
    if holder is None:
        return f"{where}: nobody has taken it, or its row was deleted"
    if holder.epoch != step.epoch:
        return f"{where} was taken over by {holder.owner} (epoch {holder.epoch}, ours was {step.epoch})"
    return f"{where} is at {holder.offset}, not at {step.from_offset}"
