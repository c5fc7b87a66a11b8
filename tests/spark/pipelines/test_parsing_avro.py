"""Parsing Avro by a schema file."""

import io
import json
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import StructType

from penstock.spark.pipelines.parsers import avro_rows

fastavro = pytest.importorskip("fastavro")

KIND = {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}
SCHEMA = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "count", "type": ["null", "long"]},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "tags", "type": {"type": "map", "values": "int"}},
        {"name": "kinds", "type": {"type": "array", "items": KIND}},
    ],
}
ROW = {
    "id": "a",
    "count": None,
    "at": datetime(2030, 1, 31, 12, 0, 0, 1, tzinfo=UTC),
    "price": Decimal("12.34"),
    "tags": {"x": 1},
    "kinds": ["A", "B"],
}


def encoded(row=ROW):
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(SCHEMA), row)
    return stream.getvalue()


def parse(*values, framed=False):
    parser = avro_rows(json.dumps(SCHEMA), framed=framed)
    columns = StructType.fromJson(json.loads(parser.schema))
    return parser.prepared(columns)(pa.array(values, pa.binary()))


def test_rows_and_errors():
    good = encoded()
    found = parse(good, good[:-3], good + b"x", None, b"", good)
    assert [found.rows[number].as_py() for number in (0, 5)] == [ROW | {"tags": [("x", 1)]}] * 2
    assert sorted(found.errors) == [1, 2, 3, 4]
    assert found.errors[2] == "the value has 1 bytes more than the schema describes"
    assert found.errors[3] == "there is no value"
    assert found.errors[1].startswith("the value does not fit the Avro schema")


def test_the_schema_registry_format():
    found = parse(b"\x00\x00\x00\x00\x07" + encoded(), encoded(), b"\x00", framed=True)
    assert sorted(found.errors) == [1, 2]
    assert found.rows[0].as_py()["id"] == "a"


MOST = b"\xfe" + b"\xff" * 8 + b"\x01"
LEAST = b"\xff" * 9 + b"\x01"
BEFORE_PRICE = b"\x02a" + b"\x00" + b"\x00"
AFTER_PRICE = b"\x00\x00"


def test_declared_sizes_cost_nothing():
    """It would take minutes to convert megabytes of digits to a number."""
    megabyte = b"\x80\x80\x80\x01" + b"\x7f" * (1 << 20)
    whole = BEFORE_PRICE + b"\x02\x01" + AFTER_PRICE
    hostile = [
        MOST,
        LEAST,
        BEFORE_PRICE + megabyte + AFTER_PRICE,
        BEFORE_PRICE + b"\x0a\x7f\xff\xff\xff\xff" + AFTER_PRICE,
        BEFORE_PRICE + b"\x02\x01" + MOST,
        BEFORE_PRICE + b"\x02\x01" + b"\x00" + MOST,
        BEFORE_PRICE + b"\x02\x01" + b"\x00" + LEAST + b"\x00",
        b"\x02a" + b"\x00" + MOST + b"\x02\x01" + AFTER_PRICE,
        BEFORE_PRICE + b"\x02\x01" + b"\x02\x02x" + MOST + b"\x00\x00",
    ]
    found = parse(whole, *hostile)
    assert sorted(found.errors) == list(range(1, len(hostile) + 1))
    assert "a decimal of 1048576 bytes" in found.errors[3]
    assert found.errors[4] == "price must fit decimal(10,2), but is 5497558138.87"
    assert found.errors[9].startswith("tags must be map")
    assert found.rows[0]["price"].as_py() == Decimal("0.01")


_dented = st.builds(
    lambda at, put, less: encoded()[:at] + put + encoded()[at + less :],
    st.integers(0, 30),
    st.binary(max_size=10) | st.sampled_from([MOST, LEAST]),
    st.integers(0, 5),
)


@given(st.lists(st.binary(max_size=40) | _dented, max_size=6))
def test_other_rows_are_read_whatever_the_bytes_are(values):
    found = parse(encoded(), *values, encoded())
    rows = found.rows.to_pylist()
    assert [number for number, row in enumerate(rows) if row is None] == sorted(found.errors)
    assert rows[0] == rows[-1] == ROW | {"tags": [("x", 1)]}
    assert all(found.errors.values())
