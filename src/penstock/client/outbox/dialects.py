"""The outbox in SQLite and in PostgreSQL: connections, locks, and waiting for new rows.

SQLite: one machine and one writer at a time. Locks are files beside the database, taken with flock: the kernel
releases a lock when its process ends, and never before. A lease in a table would need a clock, and could expire while
its holder still works.

PostgreSQL: advisory locks, and NOTIFY when rows are committed. Locks, rows and notifications belong to one session. So
a relay that can still delete rows still holds the lock, and a session that is lost loses its locks. A pooler that
assigns sessions by transaction does not work, and the relay detects it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.client.databases.base import DatabaseLocation, StoreError, StoreUnavailable
from penstock.client.outbox.database import OutboxDatabase
from penstock.client.outbox.messages import (
    NOTIFY_CHANNEL,
    OUTBOX_TABLE,
    OutboxError,
    RelayInterrupted,
    psycopg_parameters,
)
from penstock.client.stores import require_driver

if TYPE_CHECKING:
    import psycopg

__all__ = ("PostgresOutbox", "SqliteOutbox", "connect_postgres", "translated_errors")


_SQLITE_POLL_S: Final = 0.05
#: Includes errors that may go away, such as a full or failing disk.
_SQLITE_ERRORS: Final = (sqlite3.OperationalError, sqlite3.DatabaseError)


class SqliteOutbox(OutboxDatabase):
    length = "LENGTH"
    age = "((julianday('now') - 2440587.5) * 86400.0 - {})"

    def __init__(self, path: Path, *, busy_timeout_s: float) -> None:
        if not path.exists():
            raise OutboxError(f"database {path} does not exist: create it with `penstock outbox init`")
        self._path = path.resolve()
        self._locks: dict[str, FileLock] = {}
        try:
            self._connection = sqlite3.connect(
                self._path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
            )
            # Deleted rows must not come back after a loss of power.
            self._connection.execute("PRAGMA synchronous = FULL")
            self._seen = self._version()
        except _SQLITE_ERRORS as error:
            raise _sqlite_error(error, self._path) from None

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, values or {}).fetchall()
        except _SQLITE_ERRORS as error:
            raise _sqlite_error(error, self._path) from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        if self._connection.in_transaction:
            yield
            return
        self.query("BEGIN IMMEDIATE")
        try:
            yield
            self.query("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._connection.rollback()
            raise

    def wait(self, seconds: float, stopping: threading.Event) -> None:
        """Polls data_version, which every commit of another connection changes and which is cheap to read."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (version := self._version()) != self._seen:
                self._seen = version
                return
            if stopping.wait(_SQLITE_POLL_S):
                return

    def close(self) -> None:
        self._connection.close()
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    def hold_table(self, *, alone: bool) -> bool:
        return self._lock("").hold(alone=alone)

    def release_table(self) -> None:
        self._lock("").release()

    def hold_shard(self, shard: int) -> bool:
        return self._lock(f"-{shard}").hold(alone=True)

    def check_held(self) -> None:
        for lock in self._locks.values():
            lock.check()

    def is_shard_held(self, shard: int) -> bool:
        if not self._lock_path(f"-{shard}").exists():
            return False
        lock = FileLock(self._lock_path(f"-{shard}"))
        is_free = lock.hold(alone=True)
        lock.release()
        return not is_free

    def _version(self) -> int:
        return int(self.query("PRAGMA data_version")[0][0])

    def _lock(self, which: str) -> FileLock:
        return self._locks.setdefault(which, FileLock(self._lock_path(which)))

    def _lock_path(self, which: str) -> Path:
        return self._path.with_name(f"{self._path.name}-outbox{which}.lock")


class FileLock:
    """A file that processes lock, exclusively or shared. The empty file is not deleted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def hold(self, *, alone: bool) -> bool:
        """Takes the lock. Does not wait; returns whether it succeeded."""
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise OutboxError(f"{self._path} cannot be created: {error.strerror}") from None
        try:
            fcntl.flock(self._file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if self._is_in_place():
            return True
        self.release()
        return False

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def check(self) -> None:
        if self._file is not None and not self._is_in_place():
            raise RelayInterrupted(f"{self._path}, the lock between relays, was removed")

    def _is_in_place(self) -> bool:
        """Whether the path still names the locked file. Otherwise another relay could lock a new file there."""
        assert self._file is not None
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        ours = os.fstat(self._file)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _sqlite_error(error: sqlite3.Error, path: Path) -> OutboxError | RelayInterrupted:
    text = str(error)
    if "no such table" in text or "no such column" in text:
        return OutboxError(
            f"{path}: {text}: create it with `penstock outbox init --database sqlite:///{path}`"
        )
    if "not a database" in text or "unable to open" in text or "readonly" in text:
        return OutboxError(f"{path}: {text}")
    return RelayInterrupted(f"{path}: {text}")


_NOTIFY_WAIT_S: Final = 0.25
_TABLE_LOCK: Final = "relays"
#: They detect a vanished server within half a minute.
_CONNECTION_DEFAULTS: Final = {
    "application_name": "penstock outbox relay",
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}


class PostgresOutbox(OutboxDatabase):
    length = "OCTET_LENGTH"
    age = "CAST(EXTRACT(EPOCH FROM clock_timestamp() - {}) AS double precision)"

    def __init__(self, location: DatabaseLocation) -> None:
        self._connection = connect_postgres(location)
        self._held: dict[str, int] = {}
        self._oid = 0
        # Deleted rows must not come back after a crash.
        self.query("SET synchronous_commit = on")
        self.query(f"LISTEN {NOTIFY_CHANNEL}")
        self._find_table()

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        with translated_errors():
            # Without parameters, psycopg does not interpret %.
            cursor = (
                self._connection.execute(psycopg_parameters(sql), values)
                if values
                else self._connection.execute(sql)
            )
            return cursor.fetchall() if cursor.description is not None else []

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        with translated_errors(), self._connection.transaction():
            yield

    def wait(self, seconds: float, stopping: threading.Event) -> None:
        deadline = time.monotonic() + seconds
        with translated_errors():
            while (left_s := deadline - time.monotonic()) > 0 and not stopping.is_set():
                for _ in self._connection.notifies(timeout=min(left_s, _NOTIFY_WAIT_S), stop_after=1):
                    return

    def close(self) -> None:
        self._connection.close()

    def hold_table(self, *, alone: bool) -> bool:
        return self._hold(_TABLE_LOCK, "pg_try_advisory_lock" if alone else "pg_try_advisory_lock_shared")

    def release_table(self) -> None:
        """Releases the lock, whether shared or exclusive."""
        key = self._held.pop(_TABLE_LOCK)
        self.query(
            "SELECT CASE WHEN mode = 'ExclusiveLock' THEN pg_advisory_unlock(:key) "
            "ELSE pg_advisory_unlock_shared(:key) END FROM pg_locks WHERE " + _OWN_LOCK,
            {"key": key, **_lock_key_halves(key)},
        )

    def hold_shard(self, shard: int) -> bool:
        return self._hold(f"shard {shard}", "pg_try_advisory_lock")

    def check_held(self) -> None:
        for what, key in self._held.items():
            if not self.query(f"SELECT 1 FROM pg_locks WHERE {_OWN_LOCK}", _lock_key_halves(key)):
                raise RelayInterrupted(
                    f"the lock of {what} is lost: a relay needs its own session, without a pooler that assigns "
                    "sessions by transaction"
                )

    def is_shard_held(self, shard: int) -> bool:
        values = _lock_key_halves(self._key(f"shard {shard}"))
        return bool(self.query(f"SELECT 1 FROM pg_locks WHERE {_GRANTED_LOCK}", values))

    def _hold(self, what: str, function: str) -> bool:
        key = self._key(what)
        ((is_ours,),) = self.query(f"SELECT {function}(:key)", {"key": key})
        if is_ours:
            self._held[what] = key
        return bool(is_ours)

    def _key(self, what: str) -> int:
        """Returns the number of a lock. It depends on the table, so that relays of other schemas are independent."""
        digest = hashlib.blake2b(f"{OUTBOX_TABLE} {self._oid} {what}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)

    def _find_table(self) -> None:
        ((oid,),) = self.query(f"SELECT CAST(to_regclass('{OUTBOX_TABLE}') AS oid)")
        if oid is None:
            raise OutboxError(f"table {OUTBOX_TABLE} is missing: create it with `penstock outbox init`")
        self._oid = int(oid)


#: pg_locks shows the number of a lock as two halves.
_GRANTED_LOCK: Final = (
    "locktype = 'advisory' AND granted AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND CAST(classid AS bigint) = :high AND CAST(objid AS bigint) = :low"
)
_OWN_LOCK: Final = f"{_GRANTED_LOCK} AND pid = pg_backend_pid()"


def _lock_key_halves(key: int) -> dict[str, int]:
    number = key & ((1 << 64) - 1)
    return {"high": number >> 32, "low": number & 0xFFFFFFFF}


def connect_postgres(location: DatabaseLocation) -> psycopg.Connection[tuple[Any, ...]]:
    try:
        require_driver(location, "psycopg", "postgres")
        from penstock.client.databases.postgres import connect  # psycopg is optional

        return connect(location, **_CONNECTION_DEFAULTS)
    except StoreUnavailable as error:
        raise RelayInterrupted(str(error)) from None
    except StoreError as error:
        raise OutboxError(str(error)) from None


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Turns errors of psycopg into OutboxError and RelayInterrupted.

    A retry does not fix classes 42 (missing table, column or right), 22 and 23.
    """
    import psycopg  # optional

    from penstock.client.databases.postgres import first_line

    try:
        yield
    except psycopg.Error as error:
        text = first_line(error)
        if error.sqlstate == "42P01":
            raise OutboxError(f"{text}: create the tables with `penstock outbox init`") from None
        if error.sqlstate is not None and error.sqlstate[:2] in ("22", "23", "42"):
            raise OutboxError(f"the database refuses the statement: {text}") from None
        raise RelayInterrupted(f"database error: {text}") from None
