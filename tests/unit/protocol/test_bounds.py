"""Sizes and counts in a request are checked against its length before kio parses it."""

import io
import struct
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import pytest
from kio.index import load_request_schema
from kio.schema.metadata.v12.request import MetadataRequest, MetadataRequestTopic
from kio.serial import entity_writer
from tests.fuzz.messages import Requests

from penstock.broker.network.apis import APIS
from penstock.protocol.bounds import Found, bounds_check
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.schemas import request_decoder, request_reader

METADATA = 3


def written(message: Any) -> bytes:
    out = io.BytesIO()
    entity_writer(type(message))(out, message)
    return out.getvalue()


@pytest.mark.parametrize("key", sorted(APIS))
def test_the_walk_and_kio_agree_where_every_message_ends(key: int) -> None:
    requests = Requests(seed=key)
    for version in range(APIS[key].min_version, APIS[key].max_version + 1):
        schema = load_request_schema(key, version)
        for _ in range(20):
            message = memoryview(requests._body(key, version))
            assert bounds_check(schema)(message, 0, len(message), Found()) == len(message)
            for cut in {0, 1, len(message) // 2, len(message) - 1} & set(range(len(message))):
                with pytest.raises(MalformedFrame):
                    bounds_check(schema)(message[:cut], 0, cut, Found())


@pytest.mark.parametrize(
    ("version", "body"),
    [
        (4, struct.pack(">i", 2**31 - 1) + b"\x00" * 100),
        (4, struct.pack(">i", -2)),
        (12, b"\xff\xff\xff\xff\x0f" + b"\x00" * 2_000),
        (12, b"\xff" * 12),
    ],
    ids=["more than there is", "negative", "four billion", "endless varint"],
)
def test_impossible_counts_are_refused(version: int, body: bytes) -> None:
    with pytest.raises(MalformedFrame):
        request_decoder(METADATA, version)(memoryview(body), 0)


def test_a_null_array_is_refused_where_the_schema_has_none() -> None:
    create_topics = 19
    with pytest.raises(MalformedFrame):
        request_decoder(create_topics, 2)(memoryview(struct.pack(">iib", -1, 1000, 0)), 0)
    assert request_decoder(METADATA, 4)(memoryview(struct.pack(">ib", -1, 1)), 0).topics is None


def test_tagged_fields_of_newer_clients_are_passed_over() -> None:
    topics = (MetadataRequestTopic(topic_id=None, name="orders"),)
    request = MetadataRequest(topics=topics, include_topic_authorized_operations=False)
    plain = written(request)
    # Both the topic and the request end in an empty section of tagged fields: fill them.
    unknown = b"\x01\x63\x05hello"
    topic_tags, request_tags = plain.rindex(b"orders") + 6, len(plain) - 1
    newer = plain[:topic_tags] + unknown + plain[topic_tags + 1 : request_tags] + unknown
    decode = request_decoder(METADATA, 12)
    assert decode(memoryview(newer), 0) == decode(memoryview(plain), 0)


def duration_fields() -> list[tuple[int, int, str]]:
    """All requests with a duration of 64 bits, from kio's schemas."""
    return [
        (key, version, field.name)
        for key, api in sorted(APIS.items())
        for version in range(api.min_version, api.max_version + 1)
        for field in fields(load_request_schema(key, version))
        if field.metadata.get("kafka_type") == "timedelta_i64"
    ]


@pytest.mark.parametrize(("key", "version", "name"), duration_fields())
@pytest.mark.parametrize("number_ms", [2**63 - 1, -(2**63), 2**62, -1, 0, 1])
def test_durations_are_read_from_any_number(key: int, version: int, name: str, number_ms: int) -> None:
    schema = load_request_schema(key, version)
    marked_ms = 0x123456789ABC
    marked = replace(Requests(seed=1)._entity(schema), **{name: marked_ms * timedelta(milliseconds=1)})
    body = written(marked)
    assert body.count(struct.pack(">q", marked_ms)) == 1
    body = body.replace(struct.pack(">q", marked_ms), struct.pack(">q", number_ms))
    read_ms = getattr(request_reader(key, version)(memoryview(body), 0), name) // timedelta(milliseconds=1)
    longest_ms = (2**63 - 1) // 1000
    assert read_ms == max(-longest_ms, min(number_ms, longest_ms))
