"""Maintenance of a table between two batches: compacts small files and removes unused ones.

Files are compacted in tiers: many small files into a medium one, many medium files into a large one. So a row is
rewritten only a few times, even if batches are very small.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from penstock.spark.archive.delta_table import ArchiveTable

_LOG: Final = logging.getLogger("penstock.spark")
#: Files of each tier are this many times larger than those of the tier below, and are compacted from this many of them.
_FAN_IN: Final = 8
_SIZES: Final = 3


class SizedFile(NamedTuple):
    #: The file's value of the column that the table is partitioned by.
    value: str | None
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """Compact all files of one partition value to files of about the target size."""

    value: str | None
    target_bytes: int


def next_compaction(
    files: Iterable[SizedFile], target_bytes: int, growing: Sequence[str | None]
) -> Compaction | None:
    """Return the compaction that joins the most files, if any is needed.

    Partition values that are not `growing` any more are compacted to the full size at once. Pure.
    """
    by_value: dict[str | None, list[int]] = {}
    for each in files:
        by_value.setdefault(each.value, []).append(each.size_bytes)
    found: list[tuple[int, Compaction]] = []
    for value, sizes in by_value.items():
        target = _target_bytes(sizes, target_bytes, is_growing=value in growing)
        if target is not None:
            count = sum(size < target // 2 for size in sizes)
            found.append((count, Compaction(value=value, target_bytes=target)))
    return max(found, key=lambda each: each[0])[1] if found else None


def _target_bytes(sizes: Sequence[int], target_bytes: int, *, is_growing: bool) -> int | None:
    if not is_growing:
        return target_bytes if sum(size < target_bytes // 2 for size in sizes) > 1 else None
    for power in reversed(range(_SIZES)):
        target: int = target_bytes // _FAN_IN**power
        if sum(size < target // 2 for size in sizes) >= _FAN_IN:
            return target
    return None


def table_files(table: ArchiveTable) -> list[SizedFile]:
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


def compact_files(table: ArchiveTable, compaction: Compaction) -> int:
    """Compact files and return by how many their number fell. Does not change rows or end offsets."""
    # A command that lists pipelines imports this module, and needs no deltalake.
    from deltalake import WriterProperties

    filters: Any = None
    if table.partition_by:
        filters = [(table.partition_by[0], "=", compaction.value if compaction.value is not None else "")]
    before = set(table.paths())
    done = table.handle.optimize.compact(
        partition_filters=filters,
        target_size=compaction.target_bytes,
        max_concurrent_tasks=2,
        writer_properties=WriterProperties(compression="ZSTD", compression_level=1),
    )
    table.location.make_durable(set(table.paths()) - before)
    return int(done["numFilesRemoved"]) - int(done["numFilesAdded"])


def vacuum_files(table: ArchiveTable, keep_hours: int) -> int:
    """Remove files that were replaced, or written by abandoned attempts, over `keep_hours` ago. Return their number."""
    gone = table.handle.vacuum(
        retention_hours=keep_hours, dry_run=True, enforce_retention_duration=False, full=True
    )
    if gone:
        table.handle.vacuum(
            retention_hours=keep_hours, dry_run=False, enforce_retention_duration=False, full=True
        )
        table.refresh()
        _LOG.info("removed %d files that table %s does not use any more", len(gone), table.location)
    return len(gone)
