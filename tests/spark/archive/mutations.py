"""The sink with one of its safeguards taken out: worlds with enough seeds must notice each."""

from collections.abc import Callable
from typing import Any
from unittest import mock

from deltalake import DeltaTable

from penstock.spark.archive import sink
from penstock.spark.archive.delta_table import ArchiveTable, EndOffsets


def _no_lookup() -> Any:
    """The driver does not check whether the table has the batch."""
    return mock.patch.object(ArchiveTable, "has", return_value=False)


def _no_ends() -> Any:
    """The driver does not check the offsets of the table."""
    return mock.patch.object(ArchiveTable, "ends", return_value=EndOffsets())


def _fresh_handle() -> Any:
    """The commit is made from a handle that was not refreshed."""
    real = ArchiveTable.append

    def append(self: ArchiveTable, *args: Any, **kwargs: Any) -> None:
        self.handle = DeltaTable(self.location.uri)
        real(self, *args, **kwargs)

    return mock.patch.object(ArchiveTable, "append", append)


def _old_files() -> Any:
    """After a conflict the same files are committed, whatever others have committed meanwhile."""
    return mock.patch.object(sink.DeltaSink, "_write_files", _once(sink.DeltaSink._write_files))


def _once(real: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[int, Any] = {}

    def write_files(self: Any, rows: Any, ends: Any) -> Any:
        if id(rows) not in known:
            known[id(rows)] = (rows, real(self, rows, ends))
        return known[id(rows)][1]

    return write_files


def _ends_of_rows() -> Any:
    """Ends are those of the rows, not of the batch."""
    real = sink.DeltaSink._commit

    def commit(self: Any, table: Any, batch: Any, told: Any, ends: Any, span: Any) -> None:
        real(self, table, batch, told, ends, None)

    return mock.patch.object(sink.DeltaSink, "_commit", commit)


#: Those that are noticed only where the table knows how far a topic has come, or only where it does not.
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
