"""The outbox in SQLite and in PostgreSQL: connections, locks, and waiting for new rows.

SQLite: one machine and one writer at a time. Locks are files beside the database, taken with flock: the kernel
releases a lock when its process ends, in whatever way, and never before. A lease in a table would need a clock, and
could end while its holder still works.

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

from penstock.client.outbox.database import OutboxDatabase
from penstock.client.outbox.messages import (
    NOTIFY_CHANNEL,
    OUTBOX_TABLE,
    OutboxError,
    RelayInterrupted,
    psycopg_parameters,
)

if TYPE_CHECKING:
    import psycopg

__all__ = ("PostgresOutbox", "SqliteOutbox", "connect_postgres", "postgres_error")


_SQLITE_POLL_S: Final = 0.05
#: Not enough room, a disk that fails, a file that was damaged: not ours to mend, but it may pass.
_SQLITE_ERRORS: Final = (sqlite3.OperationalError, sqlite3.DatabaseError)


class SqliteOutbox(OutboxDatabase):
    length = "LENGTH"
    age = "((julianday('now') - 2440587.5) * 86400.0 - {})"

    def __init__(self, path: Path, *, busy_timeout_s: float) -> None:
        if not path.exists():
            raise OutboxError(f"there is no database {path}: `penstock outbox init` makes one")
        self._path = path.resolve()
        self._locks: dict[str, FileLock] = {}
        try:
            self._connection = sqlite3.connect(
                self._path, timeout=busy_timeout_s, isolation_level=None, check_same_thread=False
            )
            # Rows that were published must not come back after a loss of power.
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
        """Others' commits change a number that costs next to nothing to read."""
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
    """A file that processes lock, alone or together with others. It stays behind, empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def hold(self, *, alone: bool) -> bool:
        """Does not wait."""
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise OutboxError(f"{self._path} cannot be made: {error.strerror}") from None
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
            raise RelayInterrupted(f"somebody has removed {self._path}, which keeps relays apart")

    def _is_in_place(self) -> bool:
        """Others could lock a file that has taken the place of ours."""
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
        return OutboxError(f"{path}: {text}; `penstock outbox init --database sqlite:///{path}` makes it")
    if "not a database" in text or "unable to open" in text or "readonly" in text:
        return OutboxError(f"{path}: {text}")
    return RelayInterrupted(f"{path}: {text}")


_CONNECT_S: Final = 10
_NOTIFY_WAIT_S: Final = 0.25
_TABLE_LOCK: Final = "relays"
#: A server that is gone without a word is noticed within half a minute.
_KEEPALIVES: Final = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


class PostgresOutbox(OutboxDatabase):
    length = "OCTET_LENGTH"
    age = "CAST(EXTRACT(EPOCH FROM clock_timestamp() - {}) AS double precision)"

    def __init__(self, url: str) -> None:
        self._connection = connect_postgres(url)
        self._held: dict[str, int] = {}
        self._oid = 0
        # Rows that were published must not come back after a crash.
        self.query("SET synchronous_commit = on")
        self.query(f"LISTEN {NOTIFY_CHANNEL}")
        self._find_table()

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        import psycopg

        try:
            # Without parameters a % is a %.
            cursor = (
                self._connection.execute(psycopg_parameters(sql), values)
                if values
                else self._connection.execute(sql)
            )
            return cursor.fetchall() if cursor.description is not None else []
        except psycopg.Error as error:
            raise postgres_error(error) from None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        import psycopg

        try:
            with self._connection.transaction():
                yield
        except psycopg.Error as error:
            raise postgres_error(error) from None

    def wait(self, seconds: float, stopping: threading.Event) -> None:
        import psycopg

        deadline = time.monotonic() + seconds
        try:
            while (left_s := deadline - time.monotonic()) > 0 and not stopping.is_set():
                for _ in self._connection.notifies(timeout=min(left_s, _NOTIFY_WAIT_S), stop_after=1):
                    return
        except psycopg.Error as error:
            raise postgres_error(error) from None

    def close(self) -> None:
        self._connection.close()

    def hold_table(self, *, alone: bool) -> bool:
        return self._hold(_TABLE_LOCK, "pg_try_advisory_lock" if alone else "pg_try_advisory_lock_shared")

    def release_table(self) -> None:
        """In whichever way it is held."""
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
                    f"the lock of {what} is lost: a relay needs a session of its own, "
                    "which no pooler gives to others between transactions"
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
        """Of the table, whatever schema it is in, so that relays of another table are let alone."""
        digest = hashlib.blake2b(f"{OUTBOX_TABLE} {self._oid} {what}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)

    def _find_table(self) -> None:
        ((oid,),) = self.query(f"SELECT CAST(to_regclass('{OUTBOX_TABLE}') AS oid)")
        if oid is None:
            raise OutboxError(f"the database has no table {OUTBOX_TABLE}: `penstock outbox init` makes it")
        self._oid = int(oid)


#: A lock by the two halves of its number.
_GRANTED_LOCK: Final = (
    "locktype = 'advisory' AND granted AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND CAST(classid AS bigint) = :high AND CAST(objid AS bigint) = :low"
)
_OWN_LOCK: Final = f"{_GRANTED_LOCK} AND pid = pg_backend_pid()"


def _lock_key_halves(key: int) -> dict[str, int]:
    number = key & ((1 << 64) - 1)
    return {"high": number >> 32, "low": number & 0xFFFFFFFF}


def connect_postgres(url: str) -> psycopg.Connection[tuple[Any, ...]]:
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
        raise RelayInterrupted(f"the database does not answer: {_first_line(error)}") from None


def postgres_error(error: psycopg.Error) -> OutboxError | RelayInterrupted:
    """Classes 42 (no such table or column, no right to it), 22 and 23 do not pass by waiting."""
    text = _first_line(error)
    if error.sqlstate == "42P01":
        return OutboxError(f"{text}: `penstock outbox init` makes the tables")
    if error.sqlstate is not None and error.sqlstate[:2] in ("22", "23", "42"):
        return OutboxError(f"the database refuses: {text}")
    return RelayInterrupted(f"the database: {text}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
