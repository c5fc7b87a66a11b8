"""How many rows the archive has, as anybody can see who opens the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Archived:
    def __init__(self, table: Path, tell: Callable[..., None]) -> None:
        self._path = table
        self._tell = tell
        self._table: Any = None
        self._version = -1

    def look(self) -> None:
        """Raises what the table's library raises for a table that is none."""
        from deltalake import DeltaTable

        if self._table is None:
            if not DeltaTable.is_deltatable(str(self._path)):
                return
            self._table = DeltaTable(str(self._path))
        self._table.update_incremental()
        if self._table.version() != self._version:
            self._version = self._table.version()
            self._tell(archived=self._table.count())
