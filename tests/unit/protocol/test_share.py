"""The hand-packed share requests and responses, compared with kio's in every version."""

from dataclasses import replace
from datetime import timedelta
from functools import partial
from io import BytesIO
from uuid import UUID, uuid4

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.schema.share_acknowledge.v2 import request as acknowledging
from kio.schema.share_fetch.v2 import request as fetching
from kio.serial import entity_reader, entity_writer

from penstock.protocol.bounds import TooManyElements
from penstock.protocol.errors import MalformedFrame
from penstock.protocol.produce import NodeEndpoint
from penstock.protocol.share import (
    AcknowledgedPartition,
    SharePartitionData,
    encode_share_acknowledge_response,
    encode_share_fetch_response,
    parse_share_acknowledge_request,
    parse_share_acknowledge_request_in_steps,
    parse_share_fetch_request,
    parse_share_fetch_request_in_steps,
)
from penstock.protocol.steps import finish

SHARE_FETCH, SHARE_ACKNOWLEDGE = 78, 79
TOPIC: UUID = uuid4()
SAID = [(3, 5, bytes((1, 2, 4))), (9, 9, b"\x03")]


def _said(schema):
    return tuple(
        schema.AcknowledgementBatch(first_offset=first, last_offset=last, acknowledge_types=tuple(types))
        for first, last, types in SAID
    )


def _fetch(version: int) -> bytes:
    parts = (
        fetching.FetchPartition(partition_index=2, acknowledgement_batches=_said(fetching)),
        fetching.FetchPartition(partition_index=7, acknowledgement_batches=()),
    )
    request = fetching.ShareFetchRequest(
        group_id="g",
        member_id="m",
        share_session_epoch=5,
        max_wait=timedelta(milliseconds=500),
        min_bytes=1,
        max_bytes=2,
        max_records=3,
        batch_size=4,
        share_acquire_mode=1,
        is_renew_ack=True,
        topics=(fetching.FetchTopic(topic_id=TOPIC, partitions=parts),),
        forgotten_topics_data=(fetching.ForgottenTopic(topic_id=TOPIC, partitions=(8, 9)),),
    )
    return _written(SHARE_FETCH, version, request)


def _acknowledge(version: int) -> bytes:
    part = acknowledging.AcknowledgePartition(partition_index=2, acknowledgement_batches=_said(acknowledging))
    request = acknowledging.ShareAcknowledgeRequest(
        group_id="g",
        member_id=None,
        share_session_epoch=-1,
        is_renew_ack=True,
        topics=(acknowledging.AcknowledgeTopic(topic_id=TOPIC, partitions=(part,)),),
    )
    return _written(SHARE_ACKNOWLEDGE, version, request)


def _written(api_key: int, version: int, request) -> bytes:
    buffer = BytesIO()
    entity_writer(load_request_schema(api_key, version))(buffer, request)
    return buffer.getvalue()


@pytest.mark.parametrize("version", [1, 2])
def test_share_fetch_is_read_as_kio_writes_it(version: int) -> None:
    request = parse_share_fetch_request(memoryview(_fetch(version)), 0, version)
    assert request[:8] == ("g", "m", 5, 500, 1, 2, 3, 4)
    assert (request.acquire_mode, request.is_renewal) == ((1, True) if version == 2 else (0, False))
    assert request.topics == [(TOPIC.bytes, [(2, SAID), (7, [])])]
    assert request.forgotten == [(TOPIC.bytes, [8, 9])]


@pytest.mark.parametrize("version", [1, 2])
def test_share_acknowledge_is_read_as_kio_writes_it(version: int) -> None:
    request = parse_share_acknowledge_request(memoryview(_acknowledge(version)), 0, version)
    assert request == ("g", None, -1, version == 2, [(TOPIC.bytes, [(2, SAID)])])


@pytest.mark.parametrize("version", [1, 2])
def test_a_request_cut_anywhere_is_malformed_and_nothing_else(version: int) -> None:
    for whole, parse in (
        (_fetch(version), parse_share_fetch_request),
        (_acknowledge(version), parse_share_acknowledge_request),
    ):
        for size in range(len(whole) - 1):
            with pytest.raises(MalformedFrame):
                parse(memoryview(whole[:size]), 0, version)


@pytest.mark.parametrize("version", [1, 2])
def test_requests_are_read_in_steps_as_at_once(version: int) -> None:
    # A topic with a partition for the fetch and for the acknowledgements, and what is forgotten.
    fetch, acknowledge = memoryview(_fetch(version)), memoryview(_acknowledge(version))
    read = partial(parse_share_fetch_request_in_steps, version=version, elements_max=100)
    assert finish(read(fetch, 0)) == parse_share_fetch_request(fetch, 0, version)
    read_acknowledge = partial(parse_share_acknowledge_request_in_steps, version=version, elements_max=100)
    assert finish(read_acknowledge(acknowledge, 0)) == parse_share_acknowledge_request(
        acknowledge, 0, version
    )
    for size in range(len(fetch) - 1):
        with pytest.raises(MalformedFrame):
            finish(read(fetch[:size], 0))
    for parse, frame in (
        (parse_share_fetch_request_in_steps, fetch),
        (parse_share_acknowledge_request_in_steps, acknowledge),
    ):
        with pytest.raises(TooManyElements):
            finish(parse(frame, 0, version, 1))


def test_a_claim_of_very_many_elements_is_malformed() -> None:
    whole = bytearray(_fetch(2))
    place = whole.index(TOPIC.bytes) - 1
    whole[place : place + 1] = b"\xff\xff\xff\xff\x0f"
    with pytest.raises(MalformedFrame):
        parse_share_fetch_request(memoryview(whole), 0, 2)


@pytest.mark.parametrize("version", [1, 2])
def test_a_share_fetch_answer_is_what_kio_reads(version: int) -> None:
    full = SharePartitionData(2, records=[b"abc", memoryview(b"defg")], acquired=[(3, 5, 1), (9, 9, 4)])
    wrong = SharePartitionData(3, 6, "elsewhere", 121, "not yours", (4, 17))
    frame = b"".join(
        finish(
            encode_share_fetch_response(
                77,
                lock_ms=30_000,
                topics=[(TOPIC.bytes, [full, wrong])],
                endpoints=[NodeEndpoint(4, "host", 9092, None)],
            )
        )
    )
    answer = _read(SHARE_FETCH, version, frame)
    assert (answer.error_code, answer.acquisition_lock_timeout.total_seconds()) == (ErrorCode.none, 30)
    one, two = answer.responses[0].partitions
    assert (bytes(one.records), one.partition_index) == (b"abcdefg", 2)
    assert [(a.first_offset, a.last_offset, a.delivery_count) for a in one.acquired_records] == [
        (3, 5, 1),
        (9, 9, 4),
    ]
    assert (two.error_code, two.error_message) == (ErrorCode.not_leader_or_follower, "elsewhere")
    assert (two.acknowledge_error_code, two.acknowledge_error_message) == (121, "not yours")
    assert (two.current_leader.leader_id, two.current_leader.leader_epoch) == (4, 17)
    assert replace(answer.node_endpoints[0], rack=None) == answer.node_endpoints[0]
    assert (answer.node_endpoints[0].host, answer.node_endpoints[0].port) == ("host", 9092)


@pytest.mark.parametrize("version", [1, 2])
def test_a_share_acknowledge_answer_is_what_kio_reads(version: int) -> None:
    frame = finish(
        encode_share_acknowledge_response(
            version,
            77,
            error=122,
            message="no",
            lock_ms=30_000,
            topics=[(TOPIC.bytes, [AcknowledgedPartition(2), AcknowledgedPartition(3, 6, "there", (4, 17))])],
            endpoints=[NodeEndpoint(4, "host", 9092, "rack")],
        )
    )
    answer = _read(SHARE_ACKNOWLEDGE, version, frame)
    assert (answer.error_code.value, answer.error_message) == (122, "no")
    if version == 2:
        assert answer.acquisition_lock_timeout.total_seconds() == 30
    one, two = answer.responses[0].partitions
    assert (one.error_code, one.current_leader.leader_id) == (ErrorCode.none, -1)
    assert (two.partition_index, two.error_message, two.current_leader.leader_epoch) == (3, "there", 17)


def _read(api_key: int, version: int, frame: bytes):
    schema = load_response_schema(api_key, version)
    header, position = entity_reader(schema.__header_schema__)(frame[4:], 0)
    assert header.correlation_id == 77
    answer, size = entity_reader(schema)(frame[4:], position)
    assert position + size == len(frame) - 4
    return answer
