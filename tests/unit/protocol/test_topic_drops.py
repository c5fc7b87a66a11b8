"""The private request for drop counts, also when it is cut short or lies about its length."""

import struct

import pytest

from penstock.protocol.errors import MalformedFrame
from penstock.protocol.topic_drops import (
    PartitionDrops,
    decode_drops,
    encode_drops,
    encode_drops_request,
    parse_drops_request,
)

ROWS = [
    PartitionDrops("orders", 0, 1 << 40, (("drop-oldest", "bytes", 5), ("shed", "disk", 1 << 50))),
    PartitionDrops("größe", 7, -1, ()),
]


def test_requests_and_answers_are_read_back() -> None:
    request = encode_drops_request(["orders", "größe"])
    assert parse_drops_request(memoryview(b"head" + request), 4) == ["orders", "größe"]
    assert decode_drops(memoryview(b"head" + encode_drops(ROWS)), 4) == ROWS


def test_what_is_cut_short_is_refused() -> None:
    request, answer = encode_drops_request(["orders"]), encode_drops(ROWS)
    for size in range(len(request)):
        with pytest.raises(MalformedFrame):
            parse_drops_request(memoryview(request[:size]))
    for size in range(len(answer)):
        with pytest.raises(MalformedFrame):
            decode_drops(memoryview(answer[:size]))


def test_counts_beyond_the_frame_are_refused_before_anything_is_read() -> None:
    for count in (1, 1000, 2**32 - 1):
        with pytest.raises(MalformedFrame):
            parse_drops_request(memoryview(struct.pack(">I", count)))
    with pytest.raises(MalformedFrame):
        parse_drops_request(memoryview(struct.pack(">IH", 1, 2) + b"\xff\xff"))
