"""How values were parsed for a table, kept in the table itself, so that who reads on from the topic does the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.spark.archive.columns import RECORD, VALUE
from penstock.spark.archive.errors import ArchiveError
from penstock.spark.pipelines.declaration import Parsed, PipelineError
from penstock.spark.pipelines.parsing import AvroRows, JsonRows, avro_rows, json_rows, struct_type

JSON: Final = "json"
AVRO: Final = "avro"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A parser to which a record without a value is no error: it says that its key is gone."""

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
    def from_json(cls, text: str) -> Reading:
        """Raises ArchiveError."""
        told = json.loads(text)
        match told.pop("format", None):
            case "json":
                return cls(parser=JsonRows(**told))
            case "avro":
                return cls(parser=AvroRows(**told))
            case other:
                raise ArchiveError(f"values of the table are {other}, which this version cannot read")


def reading(schema: str | Path, kind: str) -> Reading:
    """By a schema file. Raises PipelineError."""
    match kind:
        case "json":
            return Reading(parser=json_rows(schema))
        case "avro":
            return Reading(parser=avro_rows(schema))
        case "avro-framed":
            return Reading(parser=avro_rows(schema, framed=True))
        case _:
            raise PipelineError(
                f"format={kind!r} must be json, avro, or avro-framed with a registry's five bytes"
            )


def parsed_rows(records: Any, how: Reading) -> Any:
    """Rows of the source as a pipeline's transform would see them, less those that do not fit."""
    from pyspark.sql.types import StructField, StructType

    columns = struct_type(how.schema, "the schema of the table")
    nullable = [StructField(each.name, each.dataType) for each in columns.fields]
    schema = StructType([*nullable, StructField(RECORD, records.schema)])
    return records.mapInArrow(RowParser(how, columns), schema)


class RowParser:
    """Sent to tasks."""

    def __init__(self, how: Reading, columns: Any) -> None:
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
