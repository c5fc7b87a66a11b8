"""Records as lines, for input and output."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.record_formats import ConsumerRecord, ProducerRecord, line_reader, line_writer

RECORD = ConsumerRecord("orders", 2, 7, 1_700_000_000_500, b"k", b"v", (("trace", b"abc"), ("empty", None)))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"format_name": "text"}, b"v\n"),
        ({"format_name": "text", "keys": True}, b"k\tv\n"),
        ({"format_name": "text", "keys": True, "headers": True}, b"trace=abc,empty=\tk\tv\n"),
        ({"format_name": "hex", "keys": True}, b"6b\t76\n"),
        ({"format_name": "base64"}, b"dg==\n"),
        ({"format_name": "{topic}/{partition}@{offset} {key}={value}"}, b"orders/2@7 k=v\n"),
        (
            {"format_name": r"{time}\t{timestamp}\t{headers}"},
            b"2023-11-14T22:13:20.500Z\t1700000000500\ttrace=abc,empty=\n",
        ),
        ({"format_name": "{{literal}} {value}"}, b"{literal} v\n"),
    ],
)
def test_lines_that_consume_writes(options: dict[str, object], line: bytes) -> None:
    assert line_writer(**options)(RECORD) == line  # type: ignore[arg-type]


def test_bytes_that_are_not_text_are_written_as_they_are_and_null_as_nothing() -> None:
    binary = RECORD._replace(key=None, value=b"\xff\x00")
    assert line_writer("text", keys=True)(binary) == b"\t\xff\x00\n"
    assert line_writer("{value}")(binary) == b"\xff\x00\n"


def test_the_json_line_is_documented_and_stable() -> None:
    assert json.loads(line_writer("json")(RECORD._replace(value=b"\xff"))) == {
        "topic": "orders",
        "partition": 2,
        "offset": 7,
        "timestamp": 1_700_000_000_500,
        "key": "k",
        "value": {"base64": "/w=="},
        "headers": [["trace", "abc"], ["empty", None]],
    }


MAYBE_BYTES = st.none() | st.binary(max_size=20)


@given(MAYBE_BYTES, MAYBE_BYTES, st.lists(st.tuples(st.text(max_size=5), MAYBE_BYTES), max_size=3))
def test_what_consume_writes_as_json_produce_reads_back(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> None:
    line = line_writer("json")(ConsumerRecord("t", 3, 0, 5, key, value, headers))
    assert line_reader("json")(line) == ProducerRecord(key, value, tuple(headers), 3, 5)


@pytest.mark.parametrize("format_name", ["hex", "base64"])
@given(value=st.binary(max_size=20))
def test_binary_formats_round_trip(format_name: str, value: bytes) -> None:
    line = line_writer(format_name)(RECORD._replace(value=value))
    assert line_reader(format_name)(line.removesuffix(b"\n")).value == value


def test_lines_that_produce_reads() -> None:
    assert line_reader("text")(b"a:b") == ProducerRecord(None, b"a:b")
    assert line_reader("text", key_separator=b":")(b"a:b:c") == ProducerRecord(b"a", b"b:c")
    assert line_reader("json")(b'{"value": {"id": 1}}') == ProducerRecord(None, b'{"id":1}')
    assert line_reader("json")(b'{"key": "k", "value": null}') == ProducerRecord(b"k", None)


@pytest.mark.parametrize(
    ("format_name", "line", "words"),
    [
        ("json", b"{", "not JSON"),
        ("json", b"[1]", "a record is written"),
        ("json", b'{"key": "k"}', "a record is written"),
        ("json", b'{"value": "v", "partition": "x"}', "partition must be a whole number"),
        ("json", b'{"value": "v", "headers": ["x"]}', "a header is written"),
        ("json", b'{"value": {"base64": "!"}}', "not base64"),
        ("hex", b"xyz", "not hexadecimal"),
        ("base64", b"a", "not base64"),
    ],
)
def test_lines_that_do_not_fit_are_refused(format_name: str, line: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        line_reader(format_name)(line)


def test_a_line_without_its_key_is_refused() -> None:
    with pytest.raises(ValueError, match="no ':' between key and value"):
        line_reader("text", key_separator=b":")(b"abc")


def test_formats_that_are_not_known_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown format 'yaml': use text, json, hex, base64 or a template"):
        line_writer("yaml")
    with pytest.raises(ValueError, match=r"unknown field \{vlaue\}"):
        line_writer("{vlaue}")
    with pytest.raises(ValueError, match="unknown format"):
        line_reader("{value}")
