"""An outbox in PostgreSQL: advisory locks, and rows that are told of when they are committed.

Locks, rows and notifications belong to one session. So whoever can still delete rows still has the lock, and a session
that is lost takes its locks with it. A pooler that hands out sessions by transaction will not do, and is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from penstock.client.outbox.connections import named
from penstock.client.outbox.databases.base import Database
from penstock.client.outbox.errors import Disturbed, OutboxError
from penstock.client.outbox.schema import CHANNEL, TABLE

if TYPE_CHECKING:
    import psycopg

__all__ = ["PostgresDatabase", "connect", "explained"]

_CONNECT_S: Final = 10
_SLICE_S: Final = 0.25
_ALL_RELAYS: Final = "relays"
#: A server that is gone without a word is noticed within half a minute.
_KEEPALIVES: Final = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


class PostgresDatabase(Database):
    length = "OCTET_LENGTH"
    age = "CAST(EXTRACT(EPOCH FROM clock_timestamp() - {}) AS double precision)"

    def __init__(self, url: str) -> None:
        self._connection = connect(url)
        self._held: dict[str, int] = {}
        self._oid = 0
        # Rows that were published must not come back after a crash.
        self.query("SET synchronous_commit = on")
        self.query(f"LISTEN {CHANNEL}")
        self._find_table()

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        import psycopg

        try:
            # Without parameters a % is a %.
            cursor = self._connection.execute(named(sql), values) if values else self._connection.execute(sql)
            return cursor.fetchall() if cursor.description is not None else []
        except psycopg.Error as error:
            raise explained(error) from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        import psycopg

        try:
            with self._connection.transaction():
                yield
        except psycopg.Error as error:
            raise explained(error) from None

    def wait(self, seconds: float, stopping: threading.Event) -> None:
        import psycopg

        deadline = time.monotonic() + seconds
        try:
            while (left_s := deadline - time.monotonic()) > 0 and not stopping.is_set():
                for _ in self._connection.notifies(timeout=min(left_s, _SLICE_S), stop_after=1):
                    return
        except psycopg.Error as error:
            raise explained(error) from None

    def close(self) -> None:
        self._connection.close()

    def hold_table(self, *, alone: bool) -> bool:
        return self._hold(_ALL_RELAYS, "pg_try_advisory_lock" if alone else "pg_try_advisory_lock_shared")

    def release_table(self) -> None:
        """In whichever way it is held."""
        key = self._held.pop(_ALL_RELAYS)
        self.query(
            "SELECT CASE WHEN mode = 'ExclusiveLock' THEN pg_advisory_unlock(:key) "
            "ELSE pg_advisory_unlock_shared(:key) END FROM pg_locks WHERE " + _OURS,
            {"key": key, **_halves(key)},
        )

    def hold_shard(self, shard: int) -> bool:
        return self._hold(f"shard {shard}", "pg_try_advisory_lock")

    def check_held(self) -> None:
        for what, key in self._held.items():
            if not self.query(f"SELECT 1 FROM pg_locks WHERE {_OURS}", _halves(key)):
                raise Disturbed(
                    f"the lock of {what} is lost: a relay needs a session of its own, "
                    "which no pooler gives to others between transactions"
                )

    def is_shard_held(self, shard: int) -> bool:
        values = _halves(self._key(f"shard {shard}"))
        return bool(self.query(f"SELECT 1 FROM pg_locks WHERE {_GRANTED}", values))

    def _hold(self, what: str, function: str) -> bool:
        key = self._key(what)
        ((is_ours,),) = self.query(f"SELECT {function}(:key)", {"key": key})
        if is_ours:
            self._held[what] = key
        return bool(is_ours)

    def _key(self, what: str) -> int:
        """Of the table, whatever schema it is in, so that relays of another table are let alone."""
        digest = hashlib.blake2b(f"{TABLE} {self._oid} {what}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)

    def _find_table(self) -> None:
        ((oid,),) = self.query(f"SELECT CAST(to_regclass('{TABLE}') AS oid)")
        if oid is None:
            raise OutboxError(f"the database has no table {TABLE}: `penstock outbox init` makes it")
        self._oid = int(oid)


#: A lock by the two halves of its number.
_GRANTED: Final = (
    "locktype = 'advisory' AND granted AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND CAST(classid AS bigint) = :high AND CAST(objid AS bigint) = :low"
)
_OURS: Final = f"{_GRANTED} AND pid = pg_backend_pid()"


def _halves(key: int) -> dict[str, int]:
    number = key & ((1 << 64) - 1)
    return {"high": number >> 32, "low": number & 0xFFFFFFFF}


def connect(url: str) -> psycopg.Connection[tuple[Any, ...]]:
    try:
        import psycopg
    except ImportError:
        raise OutboxError("PostgreSQL needs psycopg: pip install 'penstock[postgres]'") from None
    try:
        return psycopg.connect(
            url,
            autocommit=True,
            connect_timeout=_CONNECT_S,
            application_name="penstock outbox relay",
            **_KEEPALIVES,  # type: ignore[arg-type]
        )
    except psycopg.ProgrammingError as error:
        raise OutboxError(f"the database's address makes no sense: {_first_line(error)}") from None
    except psycopg.OperationalError as error:
        raise Disturbed(f"the database does not answer: {_first_line(error)}") from None


def explained(error: psycopg.Error) -> OutboxError | Disturbed:
    """Classes 42 (no such table or column, no right to it), 22 and 23 do not pass by waiting."""
    words = _first_line(error)
    if error.sqlstate == "42P01":
        return OutboxError(f"{words}: `penstock outbox init` makes the tables")
    if error.sqlstate is not None and error.sqlstate[:2] in ("22", "23", "42"):
        return OutboxError(f"the database refuses: {words}")
    return Disturbed(f"the database: {words}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
