"""The columns of a topic as Spark types. A schema that the user gives is a selection of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from penstock.spark.option_reader import OptionError

#: Names and types of Spark's Kafka connector.
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


#: All other columns are NOT NULL, so that Spark does not check every row for null.
_NULLABLE_COLUMNS: Final = ("key", "value", "headers")


def table_schema(*, include_headers: bool) -> str:
    """Return the columns of a topic as DDL."""
    chosen = {name: kind for name, kind in COLUMN_TYPES.items() if include_headers or name != "headers"}
    return ", ".join(
        f"{name} {kind}{'' if name in _NULLABLE_COLUMNS else ' NOT NULL'}" for name, kind in chosen.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """The columns that a query selects, in its order and with its spelling of the names."""

    columns: tuple[str, ...]
    schema: Any  # StructType

    @classmethod
    def of(cls, schema: Any) -> Projection:
        """Check a schema that a user gives. Raises OptionError if a topic has no column of that name and type."""
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
        """Return a function that casts decoded Arrow batches to the schema that Spark expects.

        The two schemas differ at most in which columns are nullable.
        """
        # A planning worker imports this module and decodes nothing, so it does not import Arrow.
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
