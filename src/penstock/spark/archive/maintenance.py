"""Small files joined to large ones, and files that nobody needs removed: what a table needs between two batches.

Files are joined by sizes: many small ones to a middle one, many of these to a large one. So a row is written again a
few times in its life, however small the batches are that it came in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from penstock.spark.archive.tables import Table

_LOG: Final = logging.getLogger("penstock.spark")
#: Each size is so many times the one before, and so many files are joined to one of it.
_FAN: Final = 8
_SIZES: Final = 3


class SizedFile(NamedTuple):
    #: Of the column that the table is partitioned by.
    value: str | None
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """All files of one value, to files of about that size."""

    value: str | None
    target_bytes: int


def next_joining(
    files: Iterable[SizedFile], target_bytes: int, growing: Sequence[str | None]
) -> Joining | None:
    """What is most worth doing, if anything. Values that are not `growing` any more are joined for good. Pure."""
    by_value: dict[str | None, list[int]] = {}
    for each in files:
        by_value.setdefault(each.value, []).append(each.size_bytes)
    found: list[tuple[int, Joining]] = []
    for value, sizes in by_value.items():
        target = _target(sizes, target_bytes, is_growing=value in growing)
        if target is not None:
            count = sum(size < target // 2 for size in sizes)
            found.append((count, Joining(value=value, target_bytes=target)))
    return max(found, key=lambda each: each[0])[1] if found else None


def _target(sizes: Sequence[int], target_bytes: int, *, is_growing: bool) -> int | None:
    if not is_growing:
        return target_bytes if sum(size < target_bytes // 2 for size in sizes) > 1 else None
    for power in reversed(range(_SIZES)):
        target: int = target_bytes // _FAN**power
        if sum(size < target // 2 for size in sizes) >= _FAN:
            return target
    return None


def files_of(table: Table) -> list[SizedFile]:
    found = table.files()
    sizes = found.column("size_bytes").to_pylist()
    partition_by = table.partition_by
    if not partition_by:
        return [SizedFile(None, size) for size in sizes]
    values = found.column(f"partition.{partition_by[0]}").to_pylist()
    return [
        SizedFile(None if value is None else str(value), size)
        for value, size in zip(values, sizes, strict=True)
    ]


def join(table: Table, joining: Joining) -> int:
    """Returns how many files there are fewer. Rows stay as they are, and so does what the table says of its end."""
    from deltalake import WriterProperties

    filters: Any = None
    if table.partition_by:
        filters = [(table.partition_by[0], "=", joining.value if joining.value is not None else "")]
    before = set(table.paths())
    done = table.handle.optimize.compact(
        partition_filters=filters,
        target_size=joining.target_bytes,
        max_concurrent_tasks=2,
        writer_properties=WriterProperties(compression="ZSTD", compression_level=1),
    )
    table.location.make_durable(set(table.paths()) - before)
    return int(done["numFilesRemoved"]) - int(done["numFilesAdded"])


def sweep(table: Table, keep_hours: int) -> int:
    """Remove what was replaced, or written by attempts that came to nothing, so long ago. Returns how many files."""
    gone = table.handle.vacuum(
        retention_hours=keep_hours, dry_run=True, enforce_retention_duration=False, full=True
    )
    if gone:
        table.handle.vacuum(
            retention_hours=keep_hours, dry_run=False, enforce_retention_duration=False, full=True
        )
        table.look()
        _LOG.info("removed %d files that are no part of table %s any more", len(gone), table.location)
    return len(gone)
