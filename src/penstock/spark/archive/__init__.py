"""Archives topics as Delta tables, and reads a topic as one table: the archived records plus the newer ones."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.spark.archive.reader import history, latest, table
    from penstock.spark.archive.sink import DeltaSink, archive

__all__ = ["DeltaSink", "archive", "history", "latest", "table"]

_FROM: Final = {
    "DeltaSink": "sink",
    "archive": "sink",
    "history": "reader",
    "latest": "reader",
    "table": "reader",
}


def __getattr__(name: str) -> Any:
    """Import each name on first use, because a command that only lists pipelines needs none of them."""
    if name not in _FROM:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
