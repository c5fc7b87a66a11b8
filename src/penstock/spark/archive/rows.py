"""The rows of an archive: the columns of the value, and columns that identify the record.

`_key`, `_headers`, `_timestamp`, `_partition` and `_offset` are copied from the record. `_tombstone` says whether its
value was null. `day` (of the timestamp, in UTC) is the column that the table is partitioned by. The table's properties
record how values were parsed, so that a reader of the topic's newer records parses them in the same way.

Functions import pyspark, numpy and pyarrow themselves, because a command that lists pipelines needs none of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.spark.archive.delta_table import ArchiveError
from penstock.spark.archive.files import OFFSET_COLUMN, PARTITION_COLUMN
from penstock.spark.pipelines.declaration import Parsed, PipelineError
from penstock.spark.pipelines.parsers import AvroRows, JsonRows, avro_rows, json_rows, struct_type

DAY: Final = "day"
TOMBSTONE: Final = "_tombstone"
KEY: Final = "_key"
TIMESTAMP: Final = "_timestamp"
VALUE: Final = "value"
RECORD: Final = "_record"
#: Column of the archive -> column of the source.
_RECORD_COLUMNS: Final = {
    KEY: "key",
    "_headers": "headers",
    TIMESTAMP: "timestamp",
    PARTITION_COLUMN: "partition",
    OFFSET_COLUMN: "offset",
}
ARCHIVE_COLUMNS: Final = (*_RECORD_COLUMNS, TOMBSTONE, DAY)
_DAY_MICROSECONDS: Final = 86_400_000_000
#: Year 1 to year 9999, in days since 1970. A timestamp can be wrong, and many readers do not support other dates.
_DAY_RANGE: Final = (-719_162, 2_932_896)


def archived_rows(frame: Any) -> Any:
    """Convert a pipeline's rows, which have parsed columns and `_record` or the source's columns, to archive rows.

    Raises PipelineError.
    """
    if RECORD in frame.columns:
        parsed = [name for name in frame.columns if name != RECORD]
        _refuse_archive_columns(parsed)
        return _with_record(frame, parsed, f"{RECORD}.")
    return _with_record(frame, [VALUE], "")


def _with_record(frame: Any, kept: list[str], prefix: str) -> Any:
    from pyspark.sql import functions as F

    record = [F.col(prefix + name).alias(ours) for ours, name in _RECORD_COLUMNS.items()]
    return frame.select(
        *[F.col(f"`{name}`") for name in kept],
        *record,
        F.col(prefix + VALUE).isNull().alias(TOMBSTONE),
        day_of(prefix + "timestamp").alias(DAY),
    )


def day_of(timestamp: str) -> Any:
    """Return the day in UTC, independent of the session's time zone."""
    from pyspark.sql import functions as F

    micros, day = f"unix_micros({timestamp})", f"{_DAY_MICROSECONDS}L"
    # Integer arithmetic that rounds down before 1970 too.
    days = F.expr(f"cast(({micros} - pmod({micros}, {day})) div {day} as int)")
    first, last = _DAY_RANGE
    return F.date_from_unix_date(F.greatest(F.lit(first), F.least(F.lit(last), days)))


def _refuse_archive_columns(parsed: list[str]) -> None:
    taken = [name for name in parsed if name.lower() in ARCHIVE_COLUMNS]
    if taken:
        raise PipelineError(
            f"the schema has columns with names that are reserved in archives: {', '.join(taken)} "
            f"(reserved are {', '.join(ARCHIVE_COLUMNS)})"
        )


JSON: Final = "json"
AVRO: Final = "avro"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFormat:
    """A parser that accepts tombstones: a null value deletes its key and is not an error."""

    parser: JsonRows | AvroRows

    @property
    def schema(self) -> str:
        return self.parser.schema

    def prepared(self, schema: Any) -> Callable[[Any], Parsed]:
        parse = self.parser.prepared(schema)

        def lenient(values: Any) -> Parsed:
            parsed = parse(values)
            errors = {number: error for number, error in parsed.errors.items() if values[number].is_valid}
            return replace(parsed, errors=errors)

        return lenient

    def to_json(self) -> str:
        match self.parser:
            case JsonRows(schema=schema):
                return json.dumps({"format": JSON, "schema": schema})
            case AvroRows(schema=schema, avro=avro, framed=framed):
                return json.dumps({"format": AVRO, "schema": schema, "avro": avro, "framed": framed})

    @classmethod
    def from_json(cls, text: str) -> ValueFormat:
        """Parse the table property. Raises ArchiveError if a newer version wrote it."""
        content = json.loads(text)
        match content.pop("format", None):
            case "json":
                return cls(parser=JsonRows(**content))
            case "avro":
                return cls(parser=AvroRows(**content))
            case other:
                raise ArchiveError(f"values of the table are {other}, which this version cannot read")


def value_format(schema: str | Path, kind: str) -> ValueFormat:
    """Return the parser for values of this kind with a schema file. Raises PipelineError."""
    match kind:
        case "json":
            return ValueFormat(parser=json_rows(schema))
        case "avro":
            return ValueFormat(parser=avro_rows(schema))
        case "avro-framed":
            return ValueFormat(parser=avro_rows(schema, framed=True))
        case _:
            raise PipelineError(
                f"format={kind!r} must be json, avro, or avro-framed with a registry's five bytes"
            )


def parsed_rows(records: Any, how: ValueFormat) -> Any:
    """Return the source's rows as a pipeline's transform receives them, without the values that do not fit."""
    from pyspark.sql.types import StructField, StructType

    columns = struct_type(how.schema, "the schema of the table")
    nullable = [StructField(each.name, each.dataType) for each in columns.fields]
    schema = StructType([*nullable, StructField(RECORD, records.schema)])
    return records.mapInArrow(RowParser(how, columns), schema)


class RowParser:
    """Function for `mapInArrow` that parses values. Sent to tasks."""

    def __init__(self, how: ValueFormat, columns: Any) -> None:
        self._how = how
        self._columns = columns

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        import numpy as np
        import pyarrow as pa

        parse = self._how.prepared(self._columns)
        for batch in batches:
            parsed = parse(batch.column(batch.schema.get_field_index(VALUE)))
            kept = np.ones(batch.num_rows, dtype=bool)
            kept[list(parsed.errors)] = False
            rows = pa.RecordBatch.from_arrays(
                [*parsed.rows.flatten(), batch.to_struct_array()], names=[*self._columns.names, RECORD]
            )
            yield rows.filter(pa.array(kept))
