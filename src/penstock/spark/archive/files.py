"""What a task does: its rows as Parquet files, each with a name of its own, and what is to be known of them.

Nothing counts until the driver commits it, and it commits only what it was told of by attempts that Spark chose. So
files of attempts that failed, or were not chosen, lie about unnoticed until they are swept.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from penstock.spark.archive.location import Location
from penstock.spark.archive.statistics import file_statistics

#: The columns that say which record a row comes from.
PARTITION_COLUMN: Final = "_partition"
OFFSET_COLUMN: Final = "_offset"
#: So much is gathered before a file is written.
_BUFFERED_BYTES_MAX: Final = 64 << 20
#: What Hive and all after it call the folder of rows without a value.
_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"
CODEC: Final = "zstd"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    path: str
    size_bytes: int
    rows: int
    written_ms: int
    #: Of the column that the table is partitioned by.
    value: str | None
    statistics: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """By one task, or by all of them together."""

    files: tuple[DataFile, ...] = ()
    #: Where the rest of each partition begins, after the rows that were seen.
    ends: Mapping[int, int] = field(default_factory=dict)
    #: Rows that were left out, as the table has them.
    skipped: int = 0

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.files)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def together(cls, told: Iterable[str]) -> Told:
        each = [json.loads(text) for text in told]
        ends: dict[int, int] = {}
        for one in each:
            for partition, end in one["ends"].items():
                ends[int(partition)] = max(end, ends.get(int(partition), 0))
        files = tuple(DataFile(**file) for one in each for file in one["files"])
        return cls(files=files, ends=ends, skipped=sum(one["skipped"] for one in each))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWriter:
    """For `mapInArrow`. Sent to tasks."""

    location: Location
    partition_by: str | None
    #: None: rows do not say which records they come from.
    ends: Mapping[int, int] | None

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        told = self.write(batches)
        yield pa.RecordBatch.from_pydict({"told": [told.to_json()]})

    def write(self, batches: Iterable[Any]) -> Told:
        rows = _Rows(self.location, self.partition_by)
        ends: dict[int, int] = {}
        skipped = 0
        for batch in batches:
            kept = batch if self.ends is None else new_rows(batch, self.ends, ends)
            skipped += batch.num_rows - kept.num_rows
            rows.add(kept)
        return Told(files=rows.finish(), ends=ends, skipped=skipped)


def new_rows(batch: Any, ends: Mapping[int, int], seen: dict[int, int]) -> Any:
    """Those at or above the ends; what comes after all of them is noted in `seen`."""
    import numpy as np

    partitions, offsets = (
        batch.column(batch.schema.get_field_index(name)).to_numpy(zero_copy_only=False)
        for name in (PARTITION_COLUMN, OFFSET_COLUMN)
    )
    kept = np.ones(len(offsets), dtype=bool)
    for partition in map(int, np.unique(partitions)):
        ours = partitions == partition
        kept &= ~ours | (offsets >= ends.get(partition, 0))
        seen[partition] = max(seen.get(partition, 0), int(offsets[ours].max()) + 1)
    return batch if kept.all() else batch.filter(_mask(kept))


def _mask(kept: Any) -> Any:
    import pyarrow as pa

    return pa.array(kept)


class _Rows:
    """Gathers rows by value of the partition column, and writes the largest lot when it has too many."""

    def __init__(self, location: Location, partition_by: str | None) -> None:
        self._location = location
        self._filesystem = location.filesystem()
        self._partition_by = partition_by
        self._waiting: dict[str | None, list[Any]] = {}
        self._bytes: dict[str | None, int] = {}
        self._files: list[DataFile] = []

    def add(self, batch: Any) -> None:
        for value, part in _parts(batch, self._partition_by):
            self._waiting.setdefault(value, []).append(part)
            self._bytes[value] = self._bytes.get(value, 0) + part.nbytes
        while sum(self._bytes.values()) > _BUFFERED_BYTES_MAX:
            self._write(max(self._bytes, key=lambda value: self._bytes[value]))

    def finish(self) -> tuple[DataFile, ...]:
        for value in list(self._waiting):
            self._write(value)
        # A name is on disk only when its folder is, so this comes after all of them.
        self._location.make_durable(each.path for each in self._files)
        return tuple(self._files)

    def _write(self, value: str | None) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = pa.Table.from_batches(self._waiting.pop(value))
        del self._bytes[value]
        path = _path(self._partition_by, value)
        collected: list[Any] = []
        pq.write_table(
            rows, path, filesystem=self._filesystem, compression=CODEC, metadata_collector=collected
        )
        self._files.append(
            DataFile(
                path=path,
                size_bytes=self._filesystem.get_file_info(path).size,
                rows=rows.num_rows,
                written_ms=int(time.time() * 1000),
                value=value,
                statistics=file_statistics(collected[0], rows.schema),
            )
        )


def _path(partition_by: str | None, value: str | None) -> str:
    name = f"{uuid.uuid4()}.{CODEC}.parquet"
    return name if partition_by is None else f"{partition_by}={_NO_VALUE if value is None else value}/{name}"


def _parts(batch: Any, partition_by: str | None) -> Iterator[tuple[str | None, Any]]:
    """The rows of each value, without the column itself, which files do not hold."""
    import pyarrow.compute as pc

    if batch.num_rows == 0:
        return
    if partition_by is None:
        yield None, batch
        return
    values = batch.column(batch.schema.get_field_index(partition_by))
    if len(pc.unique(values)) > 1:
        order = pc.sort_indices(values)
        batch, values = batch.take(order), values.take(order)
    rest, start = batch.drop_columns([partition_by]), 0
    # In the order in which they come, which is that of the rows by now.
    for each in pc.value_counts(values):
        value, count = each["values"].as_py(), each["counts"].as_py()
        yield None if value is None else value.isoformat(), rest.slice(start, count)
        start += count
