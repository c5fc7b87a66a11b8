"""Avro by a schema file, one by one."""

import io
import json
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from penstock.spark.pipelines.parsing import avro_rows

fastavro = pytest.importorskip("fastavro")

SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "count", "type": ["null", "long"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "tags", "type": {"type": "map", "values": "int"}},
    ],
}
ROW = {
    "id": "a",
    "count": None,
    "at": datetime(2030, 1, 31, 12, 0, 0, 1, tzinfo=UTC),
    "price": Decimal("12.34"),
    "tags": {"x": 1},
}


def encoded(row=ROW):
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(SCHEMA), row)
    return stream.getvalue()


def parse(*values, framed=False):
    parser = avro_rows(json.dumps(SCHEMA), framed=framed)
    columns = StructType.fromJson(json.loads(parser.schema))
    return parser.prepared(columns)(pa.array(values, pa.binary()))


def test_rows_and_what_is_wrong_with_others():
    good = encoded()
    found = parse(good, good[:-3], good + b"x", None, b"", good)
    assert [found.rows[number].as_py() for number in (0, 5)] == [ROW | {"tags": [("x", 1)]}] * 2
    assert sorted(found.errors) == [1, 2, 3, 4]
    assert found.errors[2] == "the value goes on for 1 bytes after its end by the schema"
    assert found.errors[3] == "there is no value"
    assert found.errors[1].startswith("the value is no Avro of this schema")


def test_five_bytes_before():
    found = parse(b"\x00\x00\x00\x00\x07" + encoded(), encoded(), b"\x00", framed=True)
    assert sorted(found.errors) == [1, 2]
    assert found.rows[0].as_py()["id"] == "a"
