"""The columns of a topic as Spark types. A schema that the user gives is a selection of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from penstock.spark.option_reader import OptionError

#: By the names and types of Spark's Kafka connector.
COLUMN_TYPES: Final = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}


#: All others are always there, and Spark is told so: it then does not ask for each row whether they are.
_NULLABLE_COLUMNS: Final = ("key", "value", "headers")


def table_schema(*, include_headers: bool) -> str:
    """As Spark reads it."""
    chosen = {name: kind for name, kind in COLUMN_TYPES.items() if include_headers or name != "headers"}
    return ", ".join(
        f"{name} {kind}{'' if name in _NULLABLE_COLUMNS else ' NOT NULL'}" for name, kind in chosen.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """Columns in the order that a query wants them, under the names that it gives them."""

    columns: tuple[str, ...]
    schema: Any  # StructType

    @classmethod
    def of(cls, schema: Any) -> Projection:
        """Raises OptionError where a topic has no such column, or one of another type."""
        known = {name.lower(): name for name in COLUMN_TYPES}
        columns = []
        for field in schema.fields:
            name, kind = known.get(field.name.lower()), field.dataType.simpleString()
            if name is None:
                raise OptionError(
                    f"a topic has no column {field.name}; its columns are {', '.join(COLUMN_TYPES)}"
                )
            if kind != COLUMN_TYPES[name]:
                raise OptionError(
                    f"column {field.name} is {COLUMN_TYPES[name]}, not {kind}; convert it after reading"
                )
            columns.append(name)
        if not columns:
            raise OptionError(f"the schema has no columns; a topic has {', '.join(COLUMN_TYPES)}")
        return cls(columns=tuple(columns), schema=schema)

    def fit(self) -> Callable[[Any], Any]:
        """What makes of decoded Arrow batches those that Spark expects, which differ in what may be null at most."""
        import pyarrow as pa
        from pyspark.sql.pandas.types import to_arrow_schema

        from penstock.spark.columns import arrow_schema

        expected = to_arrow_schema(self.schema, timezone="UTC")
        if expected.equals(arrow_schema(self.columns)):
            return lambda batch: batch
        kinds = [field.type for field in expected]

        def fitted(batch: Any) -> Any:
            arrays = [array.cast(kind) for array, kind in zip(batch.columns, kinds, strict=True)]
            return pa.RecordBatch.from_arrays(arrays, schema=expected)

        return fitted
