"""Dedupe stores of effectively-once: which messages a group has handled, for as long as they may come again.

`open_store(url)` opens one. SQLite and PostgreSQL keep marks in a table of the user's database, so that a result and
its mark can be one transaction; Redis keeps marks alone.
"""

from penstock.client.stores.base import (
    DedupeStore,
    StoreError,
    StoreUnavailable,
    Transaction,
    TransactionSpoiled,
)
from penstock.client.stores.opening import open_store
from penstock.client.stores.tables import schema

__all__ = [
    "DedupeStore",
    "StoreError",
    "StoreUnavailable",
    "Transaction",
    "TransactionSpoiled",
    "open_store",
    "schema",
]
