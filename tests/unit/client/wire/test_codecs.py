"""The client's Fetch and Produce have the bytes of kio's schemas; damaged responses are refused."""

import datetime
import io
import random
import uuid
from importlib import import_module
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from penstock.protocol import fetch, produce
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.fetch import (
    FetchPartition,
    PartitionData,
    encode_consumer_fetch_request,
    encode_fetch_response,
    parse_consumer_fetch_response,
)
from penstock.protocol.produce import NodeEndpoint, encode_produce_request

TOPIC_ID = uuid.UUID("12345678-1234-5678-1234-567812345678")
FETCH_VERSIONS = range(fetch.CONSUMER_VERSION_MIN, fetch.CONSUMER_VERSION_MAX + 1)
PRODUCE_VERSIONS = range(produce.PRODUCER_VERSION_MIN, produce.PRODUCER_VERSION_MAX + 1)


def schema(api: str, version: int, kind: str) -> Any:
    return import_module(f"kio.schema.{api}.v{version}.{kind}")


def read(cls: Any, data: bytes) -> Any:
    message, size = entity_reader(cls)(data, 0)
    assert size == len(data), "bytes are left over"
    return message


def topic_key(version: int) -> bytes:
    return TOPIC_ID.bytes if version >= 13 else b"orders"


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_fetch_request_is_what_kio_reads(version: int) -> None:
    asked = FetchPartition(3, 9, 123_456_789_012, -1, -1, 1 << 24)
    data = encode_consumer_fetch_request(
        version, topic_key(version), asked, wait_ms=500, bytes_min=1, bytes_max=1 << 25, isolation=1
    )
    cls = schema("fetch", version, "request").FetchRequest
    request = read(cls, data)
    out = io.BytesIO()
    entity_writer(cls)(out, request)
    assert out.getvalue() == data
    assert (request.max_wait, request.min_bytes) == (datetime.timedelta(milliseconds=500), 1)
    assert (request.max_bytes, request.isolation_level) == (1 << 25, 1)
    (topic,) = request.topics
    assert (topic.topic_id if version >= 13 else topic.topic) == (TOPIC_ID if version >= 13 else "orders")
    (part,) = topic.partitions
    assert (part.partition, part.fetch_offset, part.partition_max_bytes) == (3, 123_456_789_012, 1 << 24)
    if version >= 9:
        assert part.current_leader_epoch == 9
    if version >= 7:
        assert (request.session_id, request.session_epoch) == (0, -1)
    assert request.replica_id == -1 if version < 15 else request.replica_state.replica_id == -1


def answer(version: int, *, error: int = 0, aborted: Any = ((7, 100), (8, 200))) -> bytes:
    data = PartitionData(3, error, 50, 40, 10, b"records" * 20, aborted, current_leader=(2, 5))
    frame = encode_fetch_response(
        version,
        77,
        error=0,
        session_id=0,
        topics=[(topic_key(version), [data])],
        endpoints=[NodeEndpoint(2, "host", 9092, None)],
    )
    body = b"".join(frame)[8:]
    return body[1:] if version >= 12 else body


@pytest.mark.parametrize("version", FETCH_VERSIONS)
@pytest.mark.parametrize("aborted", [None, (), ((7, 100), (8, 200))])
def test_fetch_response_is_read_as_brokers_write_it(version: int, aborted: Any) -> None:
    body = answer(version, aborted=aborted)
    expected = read(schema("fetch", version, "response").FetchResponse, body)
    error, ((key, found),) = parse_consumer_fetch_response(memoryview(body), version)
    (told,) = expected.responses[0].partitions
    assert (error, key) == (0, topic_key(version))
    assert (found.partition, found.error, found.high_watermark) == (3, 0, told.high_watermark)
    assert (found.last_stable_offset, bytes(found.records)) == (told.last_stable_offset, told.records)
    assert found.log_start_offset == (told.log_start_offset if version >= 5 else -1)
    assert found.aborted == (aborted or ())
    if version >= 12:
        assert found.current_leader == (2, 5)


@pytest.mark.parametrize("version", [4, 11, 12, 17])
def test_fetch_response_that_is_damaged(version: int) -> None:
    """It is read as something, or refused; it never asks for memory that is not there."""
    chance = random.Random(version)
    whole = answer(version)
    refused = 0
    for _ in range(3000):
        body = bytearray(whole[: chance.choice((len(whole), chance.randrange(len(whole))))])
        for _ in range(chance.randint(0, 4)):
            if body:
                body[chance.randrange(len(body))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
        try:
            parse_consumer_fetch_response(memoryview(body), version)
        except MalformedFrame:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
@pytest.mark.parametrize("name", [None, "tx-\u00e9", "n" * 200])
def test_produce_request_is_what_kio_reads(version: int, name: str | None) -> None:
    batch = b"b" * 300
    parts = encode_produce_request(
        version, topic_key(version), 4, batch, transactional_id=name, acks=-1, timeout_ms=1500
    )
    assert parts[1] is batch, "it was copied"
    request = read(schema("produce", version, "request").ProduceRequest, b"".join(parts))
    assert (request.transactional_id, request.acks) == (name, -1)
    assert request.timeout == datetime.timedelta(milliseconds=1500)
    (topic,) = request.topic_data
    assert (topic.topic_id if version >= 13 else topic.name) == (TOPIC_ID if version >= 13 else "orders")
    (part,) = topic.partition_data
    assert (part.index, part.records) == (4, batch)


def test_errors_are_numbers_of_the_protocol() -> None:
    body = answer(17, error=int(ErrorCode.not_leader_or_follower))
    _, ((_, found),) = parse_consumer_fetch_response(memoryview(body), 17)
    assert found.error == ErrorCode.not_leader_or_follower
