"""What every dedupe store does, and what can go wrong with one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from penstock.client.errors import ClientError

__all__ = ["DedupeStore", "StoreError", "StoreUnavailable", "Transaction", "TransactionSpoiled"]


class StoreError(ClientError):
    """A store that cannot work as it is: a sentence for whoever set it up."""


class StoreUnavailable(StoreError):
    """The store does not answer, or not now. What was asked for may have been done, or not; ask again later."""


class TransactionSpoiled(StoreError):
    """The code inside has ended the transaction or tried to, or went on after a statement failed: nothing is kept.

    The only StoreError that is the fault of that code.
    """


class Transaction(Protocol):
    """Open until its block ends. What is done through `connection` and the claims are kept together, or not at all."""

    @property
    def connection(self) -> Any:
        """Of the driver: `sqlite3` or `psycopg`. Its transaction is not the user's to end."""

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        """Mark it; False if it is marked already. Whoever asks while another's claim is open waits for its end."""

    def claim_all(self, scope: str, ids: Sequence[str], ttl_s: float) -> set[str]:
        """Those of a batch that were not marked, and now are."""


class DedupeStore(Protocol):
    """Any number of threads may use one store. Every method raises StoreUnavailable, StoreError."""

    #: Whether result and mark can be one transaction.
    shares_transactions: bool

    def seen(self, scope: str, ids: Sequence[str]) -> set[str]:
        """Those that are marked and not too old. A scope is a group."""

    def mark(self, scope: str, ids: Sequence[str], ttl_s: float) -> None:
        """From now on they are seen, for so long; if they were marked before, the new time counts."""

    def claim(self, scope: str, id: str, ttl_s: float) -> bool:
        """Mark it alone, in no transaction. Of all who claim an id at a time, one is told True."""

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Committed when the block ends, rolled back when it raises.

        Raises StoreUnavailable when the database went away, whatever the block made of that: nobody knows then whether
        it was committed, and the claim tells when it is tried again. Raises TransactionSpoiled, and rolls back, where
        a commit would not have kept what the block did.
        """

    def joined(self, connection: Any) -> Transaction:
        """The transaction that is open on a connection to the same database, of a ledger for instance."""

    def expire(self, now: float | None = None) -> int:
        """Forget what is too old by the store's own clock, or at `now`; how many that were."""

    def close(self) -> None:
        """Nothing is open afterwards."""
