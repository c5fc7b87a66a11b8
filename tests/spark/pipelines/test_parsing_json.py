"""JSON by a schema: what many at once give is what one by one gives, and what is refused is told by name."""

import json
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
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
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.spark.pipelines.parsing_json import JsonReader, _Refused

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
SLOW = StructType(
    [
        StructField("price", DecimalType(6, 2)),
        StructField("raw", BinaryType()),
        StructField("tags", MapType(StringType(), LongType())),
        StructField("in", StructType([StructField("must", LongType(), nullable=False)])),
    ]
)
READER = JsonReader(SCHEMA)
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


def test_a_row_in_full():
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
    (b'{"id": 5}', "id must be text, and is a whole number: 5"),
    (b'{"id": "a", "amount": "1"}', "amount must be a number, and is text: '1'"),
    (b'{"id": "a", "amount": true}', "amount must be a number, and is true or false: True"),
    (b'{"id": "a", "amount": 1e999}', "amount is too large a number"),
    (b'{"id": "a", "amount": ' + b"1" * 400 + b"}", "amount is too large a number"),
    (b'{"id": "a", "n": 1.0}', "n must be a whole number, and is a number: 1.0"),
    (b'{"id": "a", "n": 99999999999999999999}', "n must be from -9223372036854775808 to 9223372036854775807"),
    (b'{"id": "a", "small": 2147483648}', "small must be from -2147483648 to 2147483647"),
    (b'{"id": "a", "ok": 1}', "ok must be true or false, and is a whole number: 1"),
    (b'{"id": "a", "at": "yesterday"}', "at must be a date and time such as 2030-01-31T12:00:00Z"),
    (b'{"id": "a", "day": "2030-02-30"}', "day must be a date such as 2030-01-31, and is text"),
    (b'{"id": "a", "who": []}', "who must be an object, and is a list"),
    (b'{"id": "a", "who": {"x": "1"}}', "who.x must be a number"),
    (b'{"id": "a", "lines": {}}', "lines must be a list"),
    (b'{"id": "a", "lines": [{"k": 1}, {"k": "x"}]}', "lines.k must be a whole number"),
    (b'{"id": "a"} x', "the value is no JSON: Extra data"),
    (b'{"id": "a"}{"id": "b"}', "the value is no JSON: Extra data"),
    (b'{"id": "a"}null{"id": "b"}', "the value is no JSON: Extra data"),
    (b'{"id": "a", "amount": NaN}', "the value is no JSON: NaN is no number of JSON"),
    (b'{"id": "a", "more": Infinity}', "the value is no JSON: Infinity is no number of JSON"),
    (b'{"id": "\xff"}', "the value is not UTF-8 (byte 8)"),
    (b'{"id": "\\ud800"}', "id must be string"),
    (b"null", "the value must be an object, and is null"),
    (b"[1]", "the value must be an object, and is a list"),
    (b"", "the value is no JSON"),
    (b"\x00", "the value is no JSON"),
    (None, "there is no value"),
    (b'{"id": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "the value is nested too deeply"),
]


@pytest.mark.parametrize(("value", "words"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_what_is_wrong_is_told_and_others_are_read(value, words):
    good = json.dumps(GOOD).encode()
    found = parsed(good, value, good)
    assert list(found.errors) == [1]
    assert words in found.errors[1]
    rows = found.rows.to_pylist()
    assert rows[1] is None
    assert rows[0] == rows[2] == parsed(good).rows[0].as_py()


def test_many_rows_keep_their_order_when_some_are_wrong():
    values = [b'{"id": "%d"}' % n for n in range(1000)]
    values[300], values[301], values[999] = b"null", b'{"id": 5}', b'{"id": "}x"}'
    found = parsed(*values)
    assert sorted(found.errors) == [300, 301]
    expected = [{"id": str(n)} for n in range(1000)]
    expected[999] = {"id": "}x"}
    ids = [row and row["id"] for row in found.rows.to_pylist()]
    assert ids == [None if n in (300, 301) else each["id"] for n, each in enumerate(expected)]


def test_types_that_are_read_one_by_one():
    reader = JsonReader(SLOW)
    found = parsed(
        b'{"price": 12.34, "raw": "aGk=", "tags": {"b": 1, "a": null}, "in": {"must": 1}}',
        b'{"price": 12.345}',
        b'{"raw": "?"}',
        b'{"in": {}}',
        reader=reader,
    )
    assert found.rows[0].as_py() == {
        "price": Decimal("12.34"),
        "raw": b"hi",
        "tags": [("b", 1), ("a", None)],
        "in": {"must": 1},
    }
    assert [found.errors[number].split(",")[0] for number in (1, 2, 3)] == [
        "price must fit decimal(6",
        "raw must be text in base64",
        "in.must is missing",
    ]


_numbers = st.integers(-(1 << 70), 1 << 70) | st.floats() | st.just(0)
_scalars = st.none() | st.booleans() | _numbers | st.text(max_size=5) | st.just("2030-01-31T12:00:00Z")
_anything = st.recursive(
    _scalars, lambda each: st.lists(each, max_size=2) | st.dictionaries(st.sampled_from("xyk"), each)
)
_objects = st.fixed_dictionaries(
    {"id": st.text(max_size=5)},
    optional={
        "amount": st.floats(-1e9, 1e9) | _anything,
        "n": st.integers(-9, 9) | _anything,
        "at": st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat) | _anything,
        "who": st.fixed_dictionaries({"x": st.integers(0, 9)}) | _anything,
        "lines": st.lists(st.fixed_dictionaries({"k": st.integers(0, 9)})) | _anything,
        "other": _anything,
    },
)
_dented = st.tuples(
    st.integers(0, 200), st.sampled_from([b"", b"{", b"}", b"null", b"}null{", b'"', b",", b"\n", b"\xff"])
)


@st.composite
def _values(draw):
    value = json.dumps(draw(_objects), ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        at, put = draw(_dented)
        value = value[:at] + put + value[at + draw(st.integers(0, 3)) :]
    return value


@given(st.lists(_values(), max_size=6))
def test_many_at_once_are_read_as_one_by_one(values):
    """Whatever Arrow's reader accepts, it has read as `json` reads it; and no value ends the process."""
    array = pa.array(values, pa.binary())
    each = READER._one_by_one(array)
    assert parsed(*values).errors.keys() == each.errors.keys()
    assert parsed(*values).rows.to_pylist() == each.rows.to_pylist()


def test_good_rows_are_read_together():
    array = pa.array([json.dumps(GOOD).encode()] * 3, pa.binary())
    assert READER._together(array).rows.to_pylist() == READER._one_by_one(array).rows.to_pylist()
    with pytest.raises(_Refused):
        READER._together(pa.array([b'{"id": 5}'], pa.binary()))
