"""The tables, as SQL: what is run where they are missing, and what users take into their migrations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.client.stores.base import StoreError
from penstock.client.stores.locating import Kind

__all__ = ["SEEN", "Table", "schema", "statements"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    name: str
    #: Where the statements for it are to be had, for error messages.
    told_by: str
    statements: Mapping[Kind, tuple[str, ...]]


SEEN: Final = Table(
    name="penstock_seen",
    told_by="penstock.client.stores.schema",
    statements={
        Kind.SQLITE: (
            """\
CREATE TABLE IF NOT EXISTS penstock_seen (
    scope TEXT NOT NULL,
    id TEXT NOT NULL,
    expires_at REAL NOT NULL,
    PRIMARY KEY (scope, id)
) WITHOUT ROWID""",
            "CREATE INDEX IF NOT EXISTS penstock_seen_expires_at ON penstock_seen (expires_at)",
        ),
        Kind.POSTGRESQL: (
            """\
CREATE TABLE IF NOT EXISTS penstock_seen (
    scope text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (scope, id)
)""",
            "CREATE INDEX IF NOT EXISTS penstock_seen_expires_at ON penstock_seen (expires_at)",
        ),
    },
)


def schema(dialect: str) -> tuple[str, ...]:
    """The statements that make a dedupe store's table in "sqlite" or "postgresql"."""
    return statements(SEEN, dialect)


def statements(table: Table, dialect: str) -> tuple[str, ...]:
    """Raises StoreError for a dialect that has none."""
    for kind, found in table.statements.items():
        if kind == dialect:
            return found
    raise StoreError(f"there is no SQL for {dialect!r}: the dialects are {', '.join(table.statements)}")
