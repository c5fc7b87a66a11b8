"""Sizes and counts in a request are checked against its length before kio parses it."""

import io
import struct
from typing import Any

import pytest
from kio.index import load_request_schema
from kio.schema.metadata.v12.request import MetadataRequest, MetadataRequestTopic
from kio.serial import entity_writer
from tests.fuzz.messages import Requests

from penstock.broker.network.apis import APIS
from penstock.protocol.bounds import bounds_check
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.schemas import request_decoder

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
            assert bounds_check(schema)(message, 0, len(message), []) == len(message)
            for cut in {0, 1, len(message) // 2, len(message) - 1} & set(range(len(message))):
                with pytest.raises(MalformedFrame):
                    bounds_check(schema)(message[:cut], 0, cut, [])


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
