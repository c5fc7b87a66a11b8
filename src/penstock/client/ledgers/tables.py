"""The table of positions, as SQL: what is run where it is missing, and what users take into their migrations."""

from __future__ import annotations

from typing import Final

from penstock.client.stores.locating import Kind
from penstock.client.stores.tables import Table, statements

__all__ = ["POSITIONS", "schema"]

POSITIONS: Final = Table(
    name="penstock_positions",
    told_by="penstock.client.ledgers.schema",
    statements={
        Kind.SQLITE: (
            """\
CREATE TABLE IF NOT EXISTS penstock_positions (
    group_id TEXT NOT NULL,
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL,
    next_offset INTEGER,
    epoch INTEGER NOT NULL,
    owner TEXT NOT NULL,
    updated_at REAL NOT NULL,
    PRIMARY KEY (group_id, topic, partition)
) WITHOUT ROWID""",
        ),
        Kind.POSTGRESQL: (
            """\
CREATE TABLE IF NOT EXISTS penstock_positions (
    group_id text COLLATE "C" NOT NULL,
    topic text COLLATE "C" NOT NULL,
    partition integer NOT NULL,
    next_offset bigint,
    epoch bigint NOT NULL,
    owner text NOT NULL,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (group_id, topic, partition)
)""",
        ),
    },
)


def schema(dialect: str) -> tuple[str, ...]:
    """The statements that make a ledger's table in "sqlite" or "postgresql"."""
    return statements(POSITIONS, dialect)
