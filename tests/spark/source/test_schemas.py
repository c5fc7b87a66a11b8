"""The schema that Spark gets for a topic, and the batches it gets. Without a session, Spark parses no schemas."""

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from penstock.spark.columns import arrow_schema
from penstock.spark.schema import Projection, table_schema


def one_row() -> pa.RecordBatch:
    row = {
        "key": None,
        "value": b"v",
        "topic": "orders",
        "partition": 0,
        "offset": 3,
        "timestamp": 0,
        "timestampType": 0,
        "headers": None,
    }
    return pa.RecordBatch.from_pylist([row], schema=arrow_schema(list(row)))


@pytest.mark.usefixtures("spark")
def test_only_optional_columns_are_nullable() -> None:
    fields = StructType.fromDDL(table_schema(include_headers=True)).fields
    assert [field.name for field in fields if field.nullable] == ["key", "value", "headers"]


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("nullable", [False, True])
def test_batches_have_the_schema_that_spark_expects(nullable: bool) -> None:
    """Spark refuses all others. Its own columns and those that a user declares differ in what is nullable."""
    ddl = table_schema(include_headers=True)
    schema = StructType.fromDDL(ddl.replace(" NOT NULL", "") if nullable else ddl)
    fitted = Projection.of(schema).fit()(one_row())
    assert fitted.schema.equals(to_arrow_schema(schema, timezone="UTC"))
    assert fitted.to_pylist() == one_row().to_pylist()
