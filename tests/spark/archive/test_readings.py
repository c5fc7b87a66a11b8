"""Parsed values as columns of an archive: values that do not fit are refused, missing ones are kept."""

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
    """A reading by a schema file, and what writes for it."""
    if request.param == "avro":
        pytest.importorskip("fastavro")
    file = tmp_path / ("order.avsc" if request.param == "avro" else "order.ddl")
    file.write_text(json.dumps(AVRO) if request.param == "avro" else "id STRING NOT NULL, total DOUBLE")
    return value_format(str(file), request.param), avro if request.param == "avro" else as_json


def test_rows_that_fit_and_those_without_a_value_are_kept_with_their_record(how):
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


def test_what_does_not_fit_is_told_of_and_what_has_no_value_is_not(how):
    parser, write = how
    parsed = parser.prepared(COLUMNS)(pa.array([None, b"\xffpoison", write({"id": "a", "total": 1.0})]))
    assert list(parsed.errors) == [1]
