"""What a store or ledger raises inside a handler, and whose fault it is."""

from __future__ import annotations

from penstock.client.app.settings import ApplicationError
from penstock.client.stores import StoreError, StoreUnavailable, TransactionSpoiled

__all__ = ["raise_outage"]


def raise_outage(error: Exception) -> None:
    """Raises what is no fault of the message: an outage that may pass, or a set-up that cannot work.

    A transaction that the handler has spoiled is its own failure, as any other exception.
    """
    if isinstance(error, StoreUnavailable):
        raise error
    if isinstance(error, StoreError) and not isinstance(error, TransactionSpoiled):
        raise ApplicationError(str(error)) from error
