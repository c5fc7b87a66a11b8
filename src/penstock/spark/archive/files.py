"""The files of a Delta table: where they are, and how tasks write them.

A location is a folder or a URI, in the form that Delta, Arrow and Spark each expect. A task writes its rows as Parquet
files, each with a unique name, and reports them to the driver. A file is not part of the table until the driver commits
it, and the driver commits only files of task attempts that Spark accepted. Files of other attempts stay unused until
they are vacuumed.

The statistics of a file let readers skip it. They contain only values that all readers interpret alike: no
floating-point columns (some readers treat NaN as the largest value, others ignore it) and no nested columns.

Functions import pyarrow, numpy and deltalake themselves, because a command that lists pipelines needs none of them.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

_FILE_SCHEME: Final = "file"
#: URI scheme -> Hadoop's scheme for the same store, where they differ.
_HADOOP_SCHEMES: Final = {"s3": "s3a"}
_GLOB_CHARACTERS: Final = re.compile(r"[\[\]{}*?\\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLocation:
    """Where a table is. Sent to tasks, so driver and tasks must all be able to reach it by the same URI."""

    uri: str
    #: Credentials and other storage options, named as in `deltalake`; the rest come from the environment.
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, text: str, options: Mapping[str, str] | None = None) -> TableLocation:
        """Parse a path or URI. A relative path is resolved now, so that tasks see the same absolute path."""
        is_uri = "://" in text
        return cls(
            uri=text.rstrip("/") if is_uri else str(Path(text).absolute()), options=dict(options or {})
        )

    def __str__(self) -> str:
        return self.uri

    @property
    def folder(self) -> Path | None:
        """The folder of the table, or None if it is in an object store."""
        parts = urlsplit(self.uri)
        if "://" not in self.uri:
            return Path(self.uri)
        return Path(unquote(parts.path)) if parts.scheme == _FILE_SCHEME else None

    def filesystem(self) -> Any:
        """Return an Arrow file system with paths relative to the table."""
        from deltalake.fs import DeltaStorageHandler
        from pyarrow.fs import PyFileSystem

        return PyFileSystem(DeltaStorageHandler(self.uri, dict(self.options)))

    def for_spark(self, path: str = "") -> str:
        """Return the URI of the table, or of one file in it.

        Spark interprets file names as glob patterns, so they are escaped. It does not do so for the table's own path.
        """
        scheme, _, rest = self.uri.partition("://")
        if self.folder is not None:
            scheme, rest = _FILE_SCHEME, str(self.folder)
        base = f"{_HADOOP_SCHEMES.get(scheme, scheme)}://{rest}"
        return _GLOB_CHARACTERS.sub(r"\\\g<0>", f"{base}/{path}") if path else base

    def make_durable(self, paths: Iterable[str]) -> None:
        """Fsync these files and their folders, so that they survive a power loss. Object stores are durable already."""
        if self.folder is None:
            return
        files = [self.folder / path for path in paths]
        for path in [*files, *sorted({each.parent for each in files})]:
            _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TEXT_LENGTH_MAX: Final = 64


def file_statistics(metadata: Any, schema: Any) -> str:
    """Return the statistics of a Parquet file with this Arrow schema, as Delta's JSON."""
    mins: dict[str, Any] = {}
    maxs: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for name, kind, chunks in _top_level_columns(metadata, schema):
        statistics = [each.statistics for each in chunks]
        if any(each is None or not each.has_null_count for each in statistics):
            continue
        nulls[name] = sum(each.null_count for each in statistics)
        bounds = _bounds(kind, [each for each in statistics if each.num_values])
        if bounds is not None:
            mins[name], maxs[name] = bounds
    content = {"numRecords": metadata.num_rows, "minValues": mins, "maxValues": maxs, "nullCount": nulls}
    return json.dumps(content, separators=(",", ":"))


def _top_level_columns(metadata: Any, schema: Any) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield each column that is not nested: its name, its type, and its metadata in each row group."""
    import pyarrow as pa

    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    paths = {metadata.schema.column(index).path: index for index in range(metadata.num_columns)}
    for column in schema:
        if not pa.types.is_nested(column.type) and column.name in paths:
            yield column.name, column.type, [group.column(paths[column.name]) for group in groups]


def _bounds(kind: Any, statistics: list[Any]) -> tuple[Any, Any] | None:
    formatter = _bounds_formatter(kind)
    if formatter is None or not statistics or not all(each.has_min_max for each in statistics):
        return None
    try:
        return formatter(min(each.min_raw for each in statistics), max(each.max_raw for each in statistics))
    except (OverflowError, ValueError):
        return None  # a date outside of Python's range


def _bounds_formatter(kind: Any) -> Callable[[Any, Any], tuple[Any, Any] | None] | None:
    import pyarrow as pa

    if pa.types.is_integer(kind):
        return lambda low, high: (low, high)
    if pa.types.is_date32(kind):
        return lambda low, high: (_date_text(low), _date_text(high))
    if pa.types.is_timestamp(kind) and kind.unit == "us" and kind.tz is not None:
        return lambda low, high: (_timestamp_text(low // 1000), _timestamp_text(-(-high // 1000)))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _text_bounds
    return None


def _date_text(number: int) -> str:
    return (date(1970, 1, 1) + timedelta(days=number)).isoformat()


def _timestamp_text(milliseconds: int) -> str:
    """Format a timestamp. Delta's statistics have milliseconds, so callers widen their bounds to whole milliseconds."""
    timestamp = _EPOCH + timedelta(milliseconds=milliseconds)
    return timestamp.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def _text_bounds(low: bytes | str, high: bytes | str) -> tuple[str, str] | None:
    first, last = (each.decode() if isinstance(each, bytes) else each for each in (low, high))
    return (first, last) if max(len(first), len(last)) <= _TEXT_LENGTH_MAX else None


#: The columns that identify the record of a row.
PARTITION_COLUMN: Final = "_partition"
OFFSET_COLUMN: Final = "_offset"
#: The column in which a task returns `WrittenFiles` as JSON.
RESULT_COLUMN: Final = "result"
#: A task buffers at most this much before it writes a file.
_BUFFERED_BYTES_MAX: Final = 64 << 20
#: The folder name for rows whose partition column is null: Hive's convention, which all readers follow.
_NULL_PARTITION: Final = "__HIVE_DEFAULT_PARTITION__"
PARQUET_CODEC: Final = "zstd"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    path: str
    size_bytes: int
    rows: int
    written_ms: int
    #: The file's value of the column that the table is partitioned by.
    value: str | None
    statistics: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFiles:
    """The files that one task has written, or all tasks together."""

    files: tuple[DataFile, ...] = ()
    #: Topic partition -> the offset after the last row that was read.
    ends: Mapping[int, int] = field(default_factory=dict)
    #: How many rows were left out because the table already has them.
    skipped: int = 0

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.files)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def combined(cls, results: Iterable[str]) -> WrittenFiles:
        """Combine the results of tasks."""
        found = [json.loads(text) for text in results]
        ends: dict[int, int] = {}
        for each in found:
            for partition, end in each["ends"].items():
                ends[int(partition)] = max(end, ends.get(int(partition), 0))
        files = tuple(DataFile(**file) for each in found for file in each["files"])
        return cls(files=files, ends=ends, skipped=sum(each["skipped"] for each in found))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWriter:
    """Function for `mapInArrow` that writes rows to files. Sent to tasks."""

    location: TableLocation
    partition_by: str | None
    #: The table's end offsets. Rows below them are skipped. None: the rows have no partition and offset columns.
    ends: Mapping[int, int] | None

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        yield pa.RecordBatch.from_pydict({RESULT_COLUMN: [self.write(batches).to_json()]})

    def write(self, batches: Iterable[Any]) -> WrittenFiles:
        rows = _RowBuffer(self.location, self.partition_by)
        ends: dict[int, int] = {}
        skipped = 0
        for batch in batches:
            kept = batch if self.ends is None else new_rows(batch, self.ends, ends)
            skipped += batch.num_rows - kept.num_rows
            rows.add(kept)
        return WrittenFiles(files=rows.finish(), ends=ends, skipped=skipped)


def new_rows(batch: Any, ends: Mapping[int, int], seen: dict[int, int]) -> Any:
    """Return the rows at or above the end offsets. Raises the offsets in `seen` to the one after each last row."""
    import numpy as np
    import pyarrow as pa

    partitions, offsets = (
        batch.column(batch.schema.get_field_index(name)).to_numpy(zero_copy_only=False)
        for name in (PARTITION_COLUMN, OFFSET_COLUMN)
    )
    kept = np.ones(len(offsets), dtype=bool)
    for partition in map(int, np.unique(partitions)):
        ours = partitions == partition
        kept &= ~ours | (offsets >= ends.get(partition, 0))
        seen[partition] = max(seen.get(partition, 0), int(offsets[ours].max()) + 1)
    return batch if kept.all() else batch.filter(pa.array(kept))


class _RowBuffer:
    """Buffers rows by their value of the partition column, and writes the largest group when the buffer is full."""

    def __init__(self, location: TableLocation, partition_by: str | None) -> None:
        self._location = location
        self._filesystem = location.filesystem()
        self._partition_by = partition_by
        self._waiting: dict[str | None, list[Any]] = {}
        self._bytes: dict[str | None, int] = {}
        self._files: list[DataFile] = []

    def add(self, batch: Any) -> None:
        for value, part in _split_by_value(batch, self._partition_by):
            self._waiting.setdefault(value, []).append(part)
            self._bytes[value] = self._bytes.get(value, 0) + part.nbytes
        while sum(self._bytes.values()) > _BUFFERED_BYTES_MAX:
            self._write(max(self._bytes, key=lambda value: self._bytes[value]))

    def finish(self) -> tuple[DataFile, ...]:
        for value in list(self._waiting):
            self._write(value)
        # A file's name is durable only when its folder is synced, so sync once, after all files are written.
        self._location.make_durable(each.path for each in self._files)
        return tuple(self._files)

    def _write(self, value: str | None) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = pa.Table.from_batches(self._waiting.pop(value))
        del self._bytes[value]
        path = _new_file_path(self._partition_by, value)
        collected: list[Any] = []
        pq.write_table(
            rows, path, filesystem=self._filesystem, compression=PARQUET_CODEC, metadata_collector=collected
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


def _new_file_path(partition_by: str | None, value: str | None) -> str:
    name = f"{uuid.uuid4()}.{PARQUET_CODEC}.parquet"
    return (
        name
        if partition_by is None
        else f"{partition_by}={_NULL_PARTITION if value is None else value}/{name}"
    )


def _split_by_value(batch: Any, partition_by: str | None) -> Iterator[tuple[str | None, Any]]:
    """Yield each value and its rows, without the partition column itself: Delta does not store it in the files."""
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
    # `value_counts` keeps the order of first occurrence, and the rows are sorted by now.
    for each in pc.value_counts(values):
        value, count = each["values"].as_py(), each["counts"].as_py()
        yield None if value is None else value.isoformat(), rest.slice(start, count)
        start += count
