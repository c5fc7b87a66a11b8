"""Parsing JSON by a schema gives the same rows as a reference parser, and errors name the field."""

import json
from base64 import b64encode
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)
from tests.spark.pipelines import json_reference

from penstock.spark.pipelines.declaration import PipelineError
from penstock.spark.pipelines.json_parser import JsonReader

SCHEMA = StructType(
    [
        StructField("id", StringType(), nullable=False),
        StructField("amount", DoubleType()),
        StructField("n", LongType()),
        StructField("small", IntegerType()),
        StructField("ok", BooleanType()),
        StructField("at", TimestampType()),
        StructField("day", DateType()),
        StructField("who", StructType([StructField("x", FloatType()), StructField("y", StringType())])),
        StructField("lines", ArrayType(StructType([StructField("k", IntegerType())]))),
    ]
)
OTHERS = StructType(
    [
        StructField("price", DecimalType(6, 2)),
        StructField("prices", ArrayType(StructType([StructField("of", DecimalType(6, 2))]))),
        StructField("raw", BinaryType()),
        StructField("short", ShortType()),
        StructField("local", TimestampNTZType()),
        StructField("tags", MapType(StringType(), LongType())),
        StructField("in", StructType([StructField("must", LongType(), nullable=False)])),
    ]
)
READER = JsonReader(SCHEMA)
OTHER_READER = JsonReader(OTHERS)
GOOD = {
    "id": "a",
    "amount": 1,
    "n": -5,
    "small": 7,
    "ok": True,
    "at": "2030-01-31T12:00:00.000001+02:00",
    "day": "2030-01-31",
    "who": {"x": 0.5, "y": "ü"},
    "lines": [{"k": 1}, {}, None],
    "more": [{"ignored": None}],
}


def parsed(*values, reader=READER):
    found = reader.parse(pa.array(values, pa.binary()))
    assert len(found.rows) == len(values)
    return found


def test_a_complete_row():
    found = parsed(json.dumps(GOOD).encode(), json.dumps(GOOD, indent=2).encode())
    assert found.errors == {}
    assert (
        found.rows.to_pylist()
        == [
            {
                "id": "a",
                "amount": 1.0,
                "n": -5,
                "small": 7,
                "ok": True,
                "at": datetime(2030, 1, 31, 10, 0, 0, 1, tzinfo=UTC),
                "day": date(2030, 1, 31),
                "who": {"x": 0.5, "y": "ü"},
                "lines": [{"k": 1}, {"k": None}, None],
            }
        ]
        * 2
    )


WRONG = [
    (b'{"amount": 1}', "id is missing"),
    (b'{"id": null}', "id is null"),
    (b'{"id": 5}', "id must be text, but is a whole number"),
    (b'{"id": 5, "id": "a"}', "id must be text, but is a whole number"),
    (b'{"id": "a", "amount": "1"}', "amount must be a number of 64 bits, but is text"),
    (b'{"id": "a", "amount": true}', "amount must be a number of 64 bits, but is true or false"),
    (b'{"id": "a", "amount": 1e999}', "amount must be a number of 64 bits"),
    (b'{"id": "a", "amount": ' + b"1" * 400 + b"}", "amount must be a number of 64 bits"),
    (b'{"id": "a", "n": 1.0}', "775807, but is a number with a point or exponent"),
    (
        b'{"id": "a", "n": 99999999999999999999}',
        "n must be a whole number from -9223372036854775808 to 92233",
    ),
    (b'{"id": "a", "n": ' + b"9" * 5_000 + b"}", "n must be a whole number from -9223372036854775808 to"),
    (b'{"id": "a", "small": 2147483648}', "small must be a whole number from -2147483648 to 2147483647"),
    (b'{"id": "a", "ok": 1}', "ok must be true or false, but is a whole number"),
    (b'{"id": "a", "at": "yesterday"}', "at must be a date and time such as 2030-01-31T12:00:00Z"),
    (
        b'{"id": "a", "at": 5}',
        "at must be a date and time such as 2030-01-31T12:00:00Z, but is a whole number",
    ),
    (b'{"id": "a", "at": "0001-01-01T00:00:00+02:00"}', "at must be timestamp"),
    (b'{"id": "a", "day": "2030-02-30"}', "day must be a date such as 2030-01-31"),
    (b'{"id": "a", "who": []}', "who must be an object, but is a list"),
    (b'{"id": "a", "who": {"x": "1"}}', "who.x must be a number of 32 bits, but is text"),
    (b'{"id": "a", "who": {"x": 1e39}}', "who.x must be a number of 32 bits"),
    (b'{"id": "a", "lines": {}}', "lines must be a list, but is an object"),
    (b'{"id": "a", "lines": [{"k": 1}, {"k": "x"}]}', "lines[1].k must be a whole number"),
    (b'{"id": "a"} x', "the value is not valid JSON: trailing characters"),
    (b'{"id": "a"}{"id": "b"}', "the value is not valid JSON: trailing characters"),
    (b'{"id": "a"}null{"id": "b"}', "the value is not valid JSON: trailing characters"),
    (b'{"id": "a", "amount": NaN}', "the value is not valid JSON: invalid character (byte 22)"),
    (b'{"id": "a", "more": Infinity}', "the value is not valid JSON: invalid character (byte 20)"),
    (b'{"id": "\xff"}', "the value is not UTF-8 (byte 8)"),
    (b'{"id": "a", "more": "\xff"}', "the value is not UTF-8 (byte 21)"),
    (b'{"id": "\\ud800"}', "the value is not valid JSON"),
    (b'{"id": "a", "more": "\\udc00..."}', "the value is not valid JSON: invalid utf-16 surrogate pair"),
    (b"null", "the value must be an object, but is null"),
    (b"[1]", "the value must be an object, but is a list"),
    (b"", "the value is not valid JSON"),
    (b"\x00", "the value is not valid JSON"),
    (None, "there is no value"),
    (b'{"id": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "the value is nested too deeply"),
    (b'{"x":' * 100_000, "the value is nested too deeply"),
]


@pytest.mark.parametrize(("value", "words"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_errors_name_the_field_and_other_rows_are_read(value, words):
    good = json.dumps(GOOD).encode()
    found = parsed(good, value, good)
    assert list(found.errors) == [1]
    assert words in found.errors[1]
    rows = found.rows.to_pylist()
    assert rows[1] is None
    assert rows[0] == rows[2] == parsed(good).rows[0].as_py()


def test_many_rows_keep_their_order_if_some_are_wrong():
    values = [b'{"id": "%d"}' % n for n in range(1000)]
    values[0], values[300], values[301], values[999] = b"\xff", b"null", b'{"id": 5}', b"}"
    found = parsed(*values)
    assert sorted(found.errors) == [0, 300, 301, 999]
    ids = [row and row["id"] for row in found.rows.to_pylist()]
    assert ids == [None if n in found.errors else str(n) for n in range(1000)]


OTHERS_WRONG = [
    (b'{"price": 12.345}', "price must fit decimal(6,2), but is 12.345"),
    (b'{"price": "12345"}', "price must fit decimal(6,2), but is 12345"),
    (b'{"price": "NaN"}', "price must fit decimal(6,2), but is NaN"),
    (b'{"price": "x"}', "price must be a number"),
    (b'{"price": [1]}', "price must be a number, but is a list"),
    (b'{"price": 1e-41}', "price must fit decimal(6,2), but is 1E-41"),
    (b'{"price": 1e-999999999}', "price must fit decimal(6,2), but is 1E-999999999"),
    (b'{"price": 0e-999999999}', "price must fit decimal(6,2), but is 0E-999999999"),
    (b'{"price": 1e999999999}', "price must fit decimal(6,2), but is 1E+999999999"),
    (
        b'{"prices": [{"of": 1}, {"of": 1e-999999999}]}',
        "prices[1].of must fit decimal(6,2), but is 1E-999999999",
    ),
    (b'{"raw": "?"}', "raw must be text in base64"),
    (b'{"short": 32768}', "short must be a whole number from -32768 to 32767"),
    (b'{"local": "2030-01-31T12:00:00Z"}', "local must be a date and time without offset"),
    (b'{"tags": {"a": "b"}}', "tags[...] must be a whole number"),
    (b'{"in": {}}', "in.must is missing"),
    (b'{"in": {"must": null}}', "in.must is null"),
]


@pytest.mark.parametrize(("value", "words"), OTHERS_WRONG)
def test_errors_of_other_types(value, words):
    found = parsed(b'{"price": 1}', value, reader=OTHER_READER)
    assert list(found.errors) == [1]
    assert words in found.errors[1]
    assert [row and row["price"] for row in found.rows.to_pylist()] == [Decimal(1), None]


def test_other_types():
    found = parsed(
        b'{"price": 12.34, "prices": [{"of": "1.50"}, {}], "raw": "aGk=", "short": -32768,'
        b' "local": "2030-01-31T12:00:00.5", "tags": {"b": 1, "a": null}, "in": {"must": 1}}',
        b'{"price": "12.3400"}',
        reader=OTHER_READER,
    )
    assert found.errors == {}
    assert found.rows[0].as_py() == {
        "price": Decimal("12.34"),
        "prices": [{"of": Decimal("1.50")}, {"of": None}],
        "raw": b"hi",
        "short": -32768,
        "local": datetime(2030, 1, 31, 12, 0, 0, 500_000),
        "tags": [("b", 1), ("a", None)],
        "in": {"must": 1},
    }
    assert found.rows[1]["price"].as_py() == Decimal("12.34")


def test_unsupported_columns_are_refused():
    with pytest.raises(PipelineError, match="column x is map<int,string>, which cannot be read from JSON"):
        JsonReader(StructType([StructField("x", MapType(IntegerType(), StringType()))]))
    with pytest.raises(PipelineError, match="there are two columns x"):
        JsonReader(StructType([StructField("x", StringType())] * 2))


_numbers = st.integers(-(1 << 70), 1 << 70) | st.floats() | st.just(0)
_scalars = st.none() | st.booleans() | _numbers | st.text(max_size=5) | st.just("2030-01-31T12:00:00Z")
_anything = st.recursive(
    _scalars, lambda each: st.lists(each, max_size=2) | st.dictionaries(st.sampled_from("xyk"), each)
)
_moments = st.datetimes(timezones=st.none() | st.just(UTC) | st.timezones()).map(datetime.isoformat)
_prices = st.decimals(-10_000, 10_000, places=3).map(str) | st.floats(-10_000, 10_000) | st.integers(-9, 9)
_objects = st.fixed_dictionaries(
    {"id": st.text(max_size=5)},
    optional={
        "amount": st.floats(-1e9, 1e9) | _anything,
        "n": st.integers(-9, 9) | _anything,
        "at": _moments | _anything,
        "who": st.fixed_dictionaries({"x": st.integers(0, 9)}) | _anything,
        "lines": st.lists(st.fixed_dictionaries({"k": st.integers(0, 9)})) | _anything,
        "price": _prices | _anything,
        "prices": st.lists(st.fixed_dictionaries({"of": _prices})) | _anything,
        "raw": st.binary(max_size=5).map(lambda raw: b64encode(raw).decode()) | _anything,
        "short": st.integers(-40_000, 40_000) | _anything,
        "local": _moments | _anything,
        "tags": st.dictionaries(st.text(max_size=3), st.none() | st.integers()) | _anything,
        "in": st.fixed_dictionaries({"must": st.none() | st.integers(0, 9)}) | _anything,
        "other": _anything,
    },
)
_dented = st.tuples(
    st.integers(0, 200),
    st.sampled_from(
        [b"", b"{", b"}", b"null", b"}null{", b'"', b",", b"\n", b"\xff", b"\\ud800", b"e-9", b'"id":7,']
    ),
)


@st.composite
def _values(draw):
    value = json.dumps(draw(_objects), ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        at, put = draw(_dented)
        value = value[:at] + put + value[at + draw(st.integers(0, 3)) :]
    return value


@given(st.lists(_values(), max_size=6))
@example([b'{"id": "a", "at": "0001-01-01T00:00:00+00:01"}', b'{"in": {"must": 1, "must": 2}}'])
def test_rows_equal_those_of_the_reference_parser(values):
    """No value ends the process."""
    for reader, schema in ((READER, SCHEMA), (OTHER_READER, OTHERS)):
        found = parsed(*values, reader=reader)
        rows = [_plainly(value, schema) for value in values]
        assert [number for number, row in enumerate(rows) if row is None] == sorted(found.errors)
        assert found.rows.to_pylist() == pa.array(rows, reader.kind).to_pylist()


def _plainly(value, schema):
    try:
        return json_reference.read(value, schema)
    except ValueError:
        return None
