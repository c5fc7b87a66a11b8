"""The tables of an outbox, as SQL for each kind of database."""

from __future__ import annotations

from typing import Final

from penstock.client.outbox.errors import OutboxError

__all__ = ["CHANNEL", "POSTGRESQL", "SQLITE", "TABLE", "schema"]

POSTGRESQL: Final = "postgresql"
SQLITE: Final = "sqlite"
TABLE: Final = "penstock_outbox"
#: Where transactions that added rows are told of.
CHANNEL: Final = "penstock_outbox"

_NOW_SQLITE: Final = "((julianday('now') - 2440587.5) * 86400.0)"
_MESSAGE_POSTGRESQL: Final = """\
    shard_hash integer NOT NULL CHECK (shard_hash >= 0),
    topic text NOT NULL,
    partition integer,
    key bytea,
    value bytea,
    headers text NOT NULL DEFAULT '[]',
    message_id text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()"""
_MESSAGE_SQLITE: Final = f"""\
    shard_hash INTEGER NOT NULL CHECK (shard_hash >= 0),
    topic TEXT NOT NULL,
    partition INTEGER,
    key BLOB,
    value BLOB,
    headers TEXT NOT NULL DEFAULT '[]',
    message_id TEXT NOT NULL,
    created_at REAL NOT NULL DEFAULT {_NOW_SQLITE}"""
#: By which rows behind a rejected one of their key are found.
_REJECTED_INDEX: Final = (
    "CREATE INDEX IF NOT EXISTS penstock_outbox_rejected_hash ON penstock_outbox_rejected (shard_hash)"
)
_RELAY: Final = """\
CREATE TABLE IF NOT EXISTS penstock_outbox_relay (
    singleton integer PRIMARY KEY CHECK (singleton = 1),
    identity text NOT NULL,
    name text NOT NULL,
    shards integer NOT NULL
)"""

_STATEMENTS: Final = {
    POSTGRESQL: (
        # Rows come and go: without this, what is deleted is swept up only after a fifth of the table.
        f"""\
CREATE TABLE IF NOT EXISTS {TABLE} (
    id bigserial PRIMARY KEY,
{_MESSAGE_POSTGRESQL}
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000)""",
        f"""\
CREATE TABLE IF NOT EXISTS penstock_outbox_rejected (
    id bigint PRIMARY KEY,
{_MESSAGE_POSTGRESQL},
    reason text NOT NULL,
    rejected_at timestamptz NOT NULL DEFAULT clock_timestamp()
)""",
        _REJECTED_INDEX,
        _RELAY,
    ),
    SQLITE: (
        # AUTOINCREMENT never gives an id twice.
        f"""\
CREATE TABLE IF NOT EXISTS {TABLE} (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
{_MESSAGE_SQLITE}
)""",
        f"""\
CREATE TABLE IF NOT EXISTS penstock_outbox_rejected (
    id INTEGER PRIMARY KEY,
{_MESSAGE_SQLITE},
    reason TEXT NOT NULL,
    rejected_at REAL NOT NULL DEFAULT {_NOW_SQLITE}
)""",
        _REJECTED_INDEX,
        _RELAY,
    ),
}


def schema(dialect: str) -> tuple[str, ...]:
    """The statements that make the tables where they are missing: `postgresql` or `sqlite`. Raises OutboxError."""
    if dialect not in _STATEMENTS:
        raise OutboxError(f"an outbox is in PostgreSQL or SQLite, not in {dialect}")
    return _STATEMENTS[dialect]
