"""Payloads: they are decoded as they were published, and errors name the wrong field."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client import json_decoder
from penstock.client.payloads import PayloadError, codec_for, encode


class Colour(StrEnum):
    RED = "red"


class Size(Enum):
    SMALL = 1


@dataclass
class Item:
    name: str
    count: int = 1


@dataclass
class Order:
    customer: str
    total: float
    items: list[Item] = field(default_factory=list)
    note: str | None = None


@dataclass
class Rich:
    id: UUID
    at: datetime
    day: date
    price: Decimal
    colour: Colour
    size: Size
    raw: bytes
    tags: set[str]
    names: dict[str, int]
    kind: Literal["a", "b"]
    pair: tuple[int, ...]
    anything: Any


class Table(TypedDict):
    name: str
    legs: NotRequired[int]


class Model(pydantic.BaseModel):
    customer_id: int = pydantic.Field(alias="customerId")
    total: float


class Struct(msgspec.Struct):
    customer: str
    total: float


@dataclass
class Mixed:
    model: Model


@dataclass
class Node:
    next: Node | None = None


@dataclass
class Picky:
    count: int

    def __post_init__(self) -> None:
        if self.count == 13:
            raise KeyError("unlucky")


RICH = Rich(
    id=UUID(int=7),
    at=datetime(2025, 1, 31, 12, 30, tzinfo=UTC),
    day=date(2025, 1, 31),
    price=Decimal("9.99"),
    colour=Colour.RED,
    size=Size.SMALL,
    raw=b"\x00\xff",
    tags={"new"},
    names={"a": 1},
    kind="b",
    pair=(1, 2),
    anything={"deep": [1, None]},
)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (bytes, b"\x00\xff"),
        (str, "Grüße"),
        (int, 5),
        (float, 1.5),
        (bool, True),
        (dict, {"a": [1, {"b": None}]}),
        (list, [1, "a"]),
        (Any, {"a": 1}),
        (None, [1]),
        (list[Order], [Order("ann", 1.5)]),
        (Order, Order("ann", 1.5, [Item("x", 2)], "soon")),
        (Order | None, Order("ann", 1.5)),
        (Rich, RICH),
        (Table, {"name": "desk"}),
        (Model, Model(customerId=3, total=1.5)),
        (list[Model], [Model(customerId=3, total=1.5)]),
        (Mixed, Mixed(Model(customerId=3, total=1.5))),
        (Struct, Struct("ann", 1.5)),
        (Annotated[Struct, "with more about it"], Struct("ann", 1.5)),
        (Node, Node(Node())),
        (Colour, Colour.RED),
    ],
)
def test_what_is_published_comes_back(annotation: Any, value: Any) -> None:
    codec = codec_for(annotation)
    assert codec.decode(encode(value)) == value
    assert codec.decode(codec.encode(value)) == value


def test_bytes_go_as_they_are_and_text_is_no_json() -> None:
    assert encode(b"\x00") == encode(bytearray(b"\x00")) == encode(memoryview(b"\x00")) == b"\x00"
    assert encode("text") == b"text"
    assert encode(Colour.RED) == b'"red"'
    assert encode({"a": Model(customerId=1, total=2)}) == b'{"a":{"customerId":1,"total":2.0}}'


@pytest.mark.parametrize(
    ("annotation", "data", "told"),
    [
        (str, b"\xff", "not UTF-8 text: invalid start byte at byte 0"),
        (dict, b"{", "the value is not JSON"),
        (Any, b"{" * 100_000, "the value is not JSON"),
        (Any, b"NaN", "the value is not JSON"),
        (Any, b"\xff", "the value is not JSON"),
        (Order, b'{"customer": "ann"}', r"does not match Order: object missing required field `total`"),
        (
            Order,
            b'{"customer": "ann", "total": "1"}',
            r"match Order: expected `float`, got `str` - at `\$.total`",
        ),
        (Order, b'{"customer":"a","total":1,"items":[{}]}', r"`name` - at `\$.items\[0\]`"),
        (Order, b"[]", "expected `object`, got `array`"),
        (Order, b"", "the value is not JSON"),
        (Table, b'{"legs": 4}', "missing required field `name`"),
        (Struct, b'{"total": 1}', "match Struct: object missing required field `customer`"),
        (
            Model,
            b'{"customerId": "x"}',
            r"match Model: customerId: Input should be .*; total: Field required",
        ),
        (Model, b"{", "the value is not JSON: EOF"),
        (list[Model], b"[{}]", r"match list\[.*Model\]: 0.customerId: Field required"),
        (Picky, b'{"count": 13}', "does not match Picky: KeyError: 'unlucky'"),
    ],
)
def test_what_does_not_fit_is_told(annotation: Any, data: bytes, told: str) -> None:
    with pytest.raises(PayloadError, match=told):
        codec_for(annotation).decode(data)


def test_the_value_itself_is_not_in_the_sentence() -> None:
    with pytest.raises(PayloadError) as raised:
        codec_for(Model).decode(b'{"customerId": "secret", "total": "secret"}')
    assert "secret" not in str(raised.value)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for annotation in (str, Any, Order, Rich, Table, Model, Struct, Mixed, Node):
        with contextlib.suppress(PayloadError):
            codec_for(annotation).decode(data)


@pytest.mark.parametrize("annotation", [bytes | None, str | None, Order | None, Model | None, Any, None])
def test_a_tombstone_is_none_where_none_is_declared(annotation: Any) -> None:
    assert codec_for(annotation).decode(None) is None


@pytest.mark.parametrize("annotation", [bytes, str, Order, Model, dict, int])
def test_a_tombstone_fits_nothing_else(annotation: Any) -> None:
    with pytest.raises(PayloadError, match=r"has no value, but .* is declared; .* None accepts tombstones"):
        codec_for(annotation).decode(None)


@pytest.mark.parametrize(
    "annotation", [subprocess.Popen, list[subprocess.Popen], int | subprocess.Popen, str | bytes, 5]
)
def test_what_json_cannot_become_is_refused_at_once(annotation: Any) -> None:
    with pytest.raises(TypeError):
        codec_for(annotation)


@pytest.mark.parametrize("value", [None, object(), {"a": object()}, "\ud800", {1.5j: 1}])
def test_what_cannot_be_sent_is_told(value: object) -> None:
    with pytest.raises(PayloadError):
        encode(value)


# Without msgspec


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, 5),
        (float, 2),
        (dict, {"a": [1, None]}),
        (Order, Order("ann", 1.5, [Item("x", 2)], "soon")),
        (Rich, RICH),
        (Table, {"name": "desk", "legs": 4}),
        (Node, Node(Node())),
        (dict[str, list[Item]], {"a": [Item("x")]}),
    ],
)
def test_the_standard_library_alone_gives_the_same(annotation: Any, value: Any) -> None:
    data = json_decoder.encode_json(value)
    assert json_decoder.json_reader(annotation)(data) == value
    assert data == encode(value)


@pytest.mark.parametrize(
    ("annotation", "data", "told"),
    [
        (Order, b'{"customer": "ann"}', r"missing required field total at \$"),
        (Order, b'{"customer": "ann", "total": "1"}', r"expected a number, got text at \$.total"),
        (Order, b'{"customer":"a","total":1,"items":[{}]}', r"field name at \$.items\[0\]"),
        (Order, b'{"customer":"a","total":true}', r"expected a number, got a flag at \$.total"),
        (Order, b"null", "expected an object, got null"),
        (Table, b"{}", "field name"),
        (Literal["a"], b'"b"', "expected one of 'a'"),
        (UUID, b'"x"', "expected a UUID"),
        (Decimal, b'"x"', "expected a Decimal"),
        (Size, b"2", "expected a Size"),
        (Any, b"NaN", "NaN is not JSON"),
        (dict[str, int], b'{"a": "b"}', r"a whole number, got text at \$.a"),
    ],
)
def test_the_standard_library_alone_tells_what_does_not_fit(annotation: Any, data: bytes, told: str) -> None:
    with pytest.raises(json_decoder.JsonMismatch, match=told):
        json_decoder.json_reader(annotation)(data)


def test_nothing_needs_msgspec_or_pydantic(tmp_path: Path) -> None:
    program = tmp_path / "bare.py"
    program.write_text(
        "import sys\n"
        "sys.modules['msgspec'] = sys.modules['pydantic'] = None\n"
        "from dataclasses import dataclass\n"
        "from penstock.client.payloads import PayloadError, codec_for, encode\n"
        "@dataclass\n"
        "class Order:\n"
        "    total: int\n"
        "assert codec_for(Order).decode(encode(Order(5))) == Order(5)\n"
        "for data in (b'{}', b'{', b'\\xff', b'{\"total\": \"1\"}'):\n"
        "    try:\n"
        "        codec_for(Order).decode(data)\n"
        "    except PayloadError as error:\n"
        "        print(error)\n"
        "try:\n"
        "    codec_for(type(sys))\n"
        "except TypeError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    told = done.stdout.splitlines()
    assert told[0] == "the value does not match Order: object missing required field total at $"
    assert told[1].startswith("the value is not JSON")
    assert told[2].startswith("the value is not JSON")
    assert told[3] == "the value does not match Order: expected a whole number, got text at $.total"
    assert told[4] == "cannot convert JSON to module; msgspec supports more types"


def test_payloads_import_neither_library() -> None:
    program = "import sys, penstock.client.payloads as p; p.codec_for(bytes); p.encode('x')"
    program += "; assert not {'msgspec', 'pydantic', 'confluent_kafka'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
