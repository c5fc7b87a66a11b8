"""Rows of a query as records: which columns they come from, and which partition each goes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.client.errors import ClientError
from penstock.client.metadata import Place
from penstock.spark.option_values import OptionError

if TYPE_CHECKING:
    import pyarrow as pa

_TEXT: Final = ("string", "binary")
#: What each column may be, by the names and types of Spark's Kafka connector.
_TYPES: Final = {
    "key": _TEXT,
    "value": _TEXT,
    "headers": ("array<struct<key:string,value:binary>>",),
    "topic": ("string",),
    "partition": ("int",),
}
#: Of the column that an option names.
_TIMESTAMP: Final = "timestamp"
_RECORD_COLUMNS: Final = ("key", "value", "headers", _TIMESTAMP)
#: Rows are collected to about this much before they go apart by partition, so that batches do not become small.
_ROWS_WANTED: Final = 1 << 16
_BYTES_WANTED: Final = 8 << 20


class WrongRow(ClientError):
    """A row cannot be written where it is to go: that is none, or takes no such record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkColumns:
    """Where in a row its record is; all other columns are left alone."""

    positions: dict[str, int]
    topic: str | None

    @classmethod
    def of(cls, schema: Any, topic: str | None, timestamp_column: str | None = None) -> SinkColumns:
        """Raises OptionError where a column is missing or of a type that cannot be written."""
        positions = {}
        for position, field in enumerate(schema.fields):
            name, kind = field.name.lower(), field.dataType.simpleString()
            if name not in _TYPES:
                continue
            # The name of a collation follows the type, and does not change what is written.
            if kind.split(" collate ")[0] not in _TYPES[name]:
                wanted = " or ".join(_TYPES[name])
                raise OptionError(f"column {field.name} is {kind}; it must be {wanted} to be written")
            positions[name] = position
        if "value" not in positions:
            raise OptionError("there is no column value; it holds what is written, as string or binary")
        if topic is None and "topic" not in positions:
            raise OptionError("nothing says where to write: set the option topic, or add a column topic")
        if timestamp_column is not None:
            positions[_TIMESTAMP] = _timestamp_position(schema, timestamp_column)
        return cls(positions=positions, topic=topic)

    def column(self, rows: pa.RecordBatch, name: str) -> pa.Array | None:
        return rows.column(self.positions[name]) if name in self.positions else None

    def records(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Key, value, headers and timestamp, as `columns.encode` takes them."""
        import pyarrow as pa

        found = {name: self.column(rows, name) for name in _RECORD_COLUMNS}
        return pa.RecordBatch.from_pydict({name: each for name, each in found.items() if each is not None})


def _timestamp_position(schema: Any, name: str) -> int:
    for position, field in enumerate(schema.fields):
        if field.name.lower() == name.lower():
            kind = field.dataType.simpleString()
            if kind != "timestamp":
                raise OptionError(f"column {field.name} is {kind}; timestampColumn must name a timestamp")
            return position
    raise OptionError(f"option timestampColumn={name}: there is no such column")


def collected(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of a good size, none of them empty."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
        if sum(each.num_rows for each in held) >= _ROWS_WANTED or _bytes(held) >= _BYTES_WANTED:
            yield _joined(held)
            held = []
    if held:
        yield _joined(held)


def _bytes(held: list[pa.RecordBatch]) -> int:
    return sum(int(each.nbytes) for each in held)


def _joined(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    import pyarrow as pa

    return held[0] if len(held) == 1 else pa.concat_batches(held)


def by_place(
    rows: pa.RecordBatch,
    columns: SinkColumns,
    partition_count: Callable[[str], int],
    *,
    seed: int,
) -> Iterator[tuple[Place, pa.RecordBatch]]:
    """The records of each partition. A row without a partition goes where its key says, or where `seed` does.

    Raises WrongRow, and whatever `partition_count` of a topic does.
    """
    from penstock.spark.columns import split_by_partition

    for topic, those in _by_topic(rows, columns):
        partitions = _partitions(those, columns, topic, partition_count(topic), seed)
        for partition, records in split_by_partition(columns.records(those), partitions).items():
            yield (topic, partition), records


def _by_topic(rows: pa.RecordBatch, columns: SinkColumns) -> Iterator[tuple[str, pa.RecordBatch]]:
    import pyarrow.compute as pc

    column = columns.column(rows, "topic")
    if columns.topic is not None or column is None:
        assert columns.topic is not None, f"{columns} name no topic"
        yield columns.topic, rows
        return
    if column.null_count:
        raise WrongRow("a row has no topic: set the option topic, or fill the column")
    names = pc.unique(column).to_pylist()
    for name in names:
        yield name, rows if len(names) == 1 else rows.filter(pc.equal(column, name))


def _partitions(rows: pa.RecordBatch, columns: SinkColumns, topic: str, count: int, seed: int) -> Any:
    import numpy as np

    given = columns.column(rows, "partition")
    if given is None or given.null_count == len(given):
        return _by_key(rows, columns, count, seed)
    numbers = given.fill_null(-1).to_numpy(zero_copy_only=False)
    is_null = given.is_null().to_numpy(zero_copy_only=False)
    wrong = (~is_null) & ((numbers < 0) | (numbers >= count))
    if wrong.any():
        number = numbers[np.flatnonzero(wrong)[0]]
        raise WrongRow(f"a row is for partition {number} of {topic}, which has {count} partitions")
    return np.where(is_null, _by_key(rows, columns, count, seed), numbers) if is_null.any() else numbers


def _by_key(rows: pa.RecordBatch, columns: SinkColumns, count: int, seed: int) -> Any:
    import numpy as np

    from penstock.spark.columns import partition_rows

    keys = columns.column(rows, "key")
    if keys is None:
        return np.full(rows.num_rows, seed % count, np.int32)
    return partition_rows(keys, count, seed=seed)
