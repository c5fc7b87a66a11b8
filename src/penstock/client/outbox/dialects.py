"""An outbox in SQLite: one machine, one writer at a time, and locks of the operating system.

Locks are files beside the database, locked with flock: the kernel gives a lock back when its process ends, in
whatever way, and never before. A lease in a table would need a clock, and could end while its holder still works.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.client.outbox.databases.base import Database
from penstock.client.outbox.errors import Disturbed, OutboxError

__all__ = ["SqliteDatabase"]

_LOOK_S: Final = 0.05
#: Not enough room, a disk that fails, a file that was damaged: not ours to mend, but it may pass.
_PASSING: Final = (sqlite3.OperationalError, sqlite3.DatabaseError)


class SqliteDatabase(Database):
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
        except _PASSING as error:
            raise _explained(error, self._path) from None

    def query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(sql, values or {}).fetchall()
        except _PASSING as error:
            raise _explained(error, self._path) from None

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
            if stopping.wait(_LOOK_S):
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
            raise Disturbed(f"somebody has removed {self._path}, which keeps relays apart")

    def _is_in_place(self) -> bool:
        """Others could lock a file that has taken the place of ours."""
        assert self._file is not None
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        ours = os.fstat(self._file)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _explained(error: sqlite3.Error, path: Path) -> OutboxError | Disturbed:
    words = str(error)
    if "no such table" in words or "no such column" in words:
        return OutboxError(f"{path}: {words}; `penstock outbox init --database sqlite:///{path}` makes it")
    if "not a database" in words or "unable to open" in words or "readonly" in words:
        return OutboxError(f"{path}: {words}")
    return Disturbed(f"{path}: {words}")
