"""Positions of a group in a database of the user's, so that a handler's result and its position are one transaction.

`open_ledger(url)` opens one, in SQLite or PostgreSQL. Whoever is given a partition takes its position there, which
fences whoever had it before: positions move by compare-and-set on the position and the epoch of the owner.
"""

from penstock.client.ledgers.base import Fenced, Ledger, LedgerTransaction, Place, Position
from penstock.client.ledgers.opening import open_ledger
from penstock.client.ledgers.tables import schema

__all__ = ["Fenced", "Ledger", "LedgerTransaction", "Place", "Position", "open_ledger", "schema"]
