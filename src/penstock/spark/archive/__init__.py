"""Topics kept as Delta tables, and read as tables: what is archived and what came since, as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.spark.archive.declaring import archive
    from penstock.spark.archive.reading import latest, table
    from penstock.spark.archive.sink import DeltaSink
    from penstock.spark.archive.versions import history

__all__ = ["DeltaSink", "archive", "history", "latest", "table"]

_FROM: Final = {
    "DeltaSink": "sink",
    "archive": "declaring",
    "history": "versions",
    "latest": "reading",
    "table": "reading",
}


def __getattr__(name: str) -> Any:
    """Each is imported when it is first asked for, as a command that only lists pipelines needs none of them."""
    if name not in _FROM:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
