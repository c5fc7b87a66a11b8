"""Values as columns of an archive: values that do not fit are refused, and tombstones are kept."""

import io
import json

import pyarrow as pa
import pytest
from pyspark.sql.types import DoubleType, StringType, StructField, StructType

from penstock.spark.archive.rows import RowParser, value_format

COLUMNS = StructType([StructField("id", StringType(), False), StructField("total", DoubleType())])
AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [{"name": "id", "type": "string"}, {"name": "total", "type": ["null", "double"]}],
}


def avro(order):
    import fastavro

    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(AVRO), order)
    return stream.getvalue()


def as_json(order):
    return json.dumps(order).encode()


@pytest.fixture(params=["json", "avro"])
def how(request, tmp_path):
    """A value format with a schema file, and an encoder for it."""
    if request.param == "avro":
        pytest.importorskip("fastavro")
    file = tmp_path / ("order.avsc" if request.param == "avro" else "order.ddl")
    file.write_text(json.dumps(AVRO) if request.param == "avro" else "id STRING NOT NULL, total DOUBLE")
    return value_format(str(file), request.param), avro if request.param == "avro" else as_json


def test_valid_rows_and_tombstones_are_kept_with_their_record(how):
    parser, write = how
    order = {"id": "a", "total": 1.5}
    values = [write(order), None, b"\xffpoison", write({"id": "b", "total": None})]
    batch = pa.record_batch({"value": pa.array(values, pa.binary()), "offset": [0, 1, 2, 3]})
    (rows,) = RowParser(parser, COLUMNS)([batch])
    assert [(row["id"], row["total"], row["_record"]["offset"]) for row in rows.to_pylist()] == [
        ("a", 1.5, 0),
        (None, None, 1),
        ("b", None, 3),
    ]


def test_invalid_values_are_errors_and_tombstones_are_not(how):
    parser, write = how
    parsed = parser.prepared(COLUMNS)(pa.array([None, b"\xffpoison", write({"id": "a", "total": 1.0})]))
    assert list(parsed.errors) == [1]
