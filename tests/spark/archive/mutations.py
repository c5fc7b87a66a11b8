"""Mutations that remove one safeguard of the archive each. Worlds with enough seeds must detect every one."""

from collections.abc import Callable
from typing import Any
from unittest import mock

from deltalake import DeltaTable

from penstock.spark.archive import sink
from penstock.spark.archive.delta_table import ArchiveTable, EndOffsets


def _no_lookup() -> Any:
    """The sink does not look up whether the table has the batch."""
    return mock.patch.object(ArchiveTable, "has", return_value=False)


def _no_ends() -> Any:
    """The sink does not look up the end offsets of the table."""
    return mock.patch.object(ArchiveTable, "ends", return_value=EndOffsets())


def _fresh_handle() -> Any:
    """The sink commits with a handle that was not refreshed."""
    real = ArchiveTable.append

    def append(self: ArchiveTable, *args: Any, **kwargs: Any) -> None:
        self.handle = DeltaTable(self.location.uri)
        real(self, *args, **kwargs)

    return mock.patch.object(ArchiveTable, "append", append)


def _old_files() -> Any:
    """After a conflict the same files are committed, whatever others have committed in between."""
    return mock.patch.object(sink.DeltaSink, "_write_files", _once(sink.DeltaSink._write_files))


def _once(real: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[int, Any] = {}

    def write_files(self: Any, rows: Any, ends: Any) -> Any:
        if id(rows) not in known:
            known[id(rows)] = (rows, real(self, rows, ends))
        return known[id(rows)][1]

    return write_files


def _ends_of_rows() -> Any:
    """The end offsets are those of the rows, not of the batch."""
    real = sink.DeltaSink._commit

    def commit(self: Any, table: Any, batch: Any, written: Any, ends: Any, offsets: Any) -> None:
        real(self, table, batch, written, ends, None)

    return mock.patch.object(sink.DeltaSink, "_commit", commit)


#: Mutations that are detected only with end offsets, or only without them.
WITH_TOPIC: dict[str, Callable[[], Any]] = {
    "no ends": _no_ends,
    "commit from a fresh handle": _fresh_handle,
    "old files": _old_files,
    "ends of rows": _ends_of_rows,
}
WITHOUT_TOPIC: dict[str, Callable[[], Any]] = {
    "no look-up": _no_lookup,
    "commit from a fresh handle": _fresh_handle,
}
