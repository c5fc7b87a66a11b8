"""The follower's Fetch has the bytes of kio's schemas in both directions; damaged responses are refused."""

import datetime
import io
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from kio.schema.fetch.v17 import request as request_schema
from kio.schema.fetch.v17 import response as response_schema
from kio.serial import entity_reader, entity_writer

from penstock.protocol.errors import MalformedFrame
from penstock.protocol.fetch import (
    FetchPartition,
    encode_replica_fetch_request,
    parse_fetch_request,
    parse_replica_fetch_response,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
NATURAL32 = st.integers(0, 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
PAIR = st.none() | st.tuples(NATURAL32, st.integers(0, 2**62))
ASKED = st.builds(FetchPartition, NATURAL32, INT32, INT64, INT32, INT64, NATURAL32)
TOPICS = st.lists(st.tuples(st.uuids(), st.lists(ASKED, max_size=140)), max_size=3)
FORGOTTEN = st.lists(st.tuples(st.uuids(), st.lists(NATURAL32, max_size=5)), max_size=3)
RESULT = st.fixed_dictionaries(
    {
        "index": NATURAL32,
        "error": st.sampled_from((ErrorCode.none, ErrorCode.fenced_leader_epoch)),
        "high": INT64,
        "start": INT64,
        "records": st.none() | st.binary(max_size=300),
        "aborted": st.none() | st.lists(st.tuples(st.integers(0, 9), INT64), max_size=2),
        "diverging": PAIR,
        "leader": st.none() | st.tuples(NATURAL32, NATURAL32),
        "snapshot": PAIR,
    }
)
ANSWERED = st.lists(st.tuples(st.uuids(), st.lists(RESULT, max_size=4)), max_size=3)


def written(message: Any) -> memoryview:
    out = io.BytesIO()
    entity_writer(type(message))(out, message)
    return memoryview(out.getvalue())


def body_of(topics: Any, forgotten: Any, session: tuple[int, int] = (77, 3)) -> bytes:
    return encode_replica_fetch_request(
        replica_id=4,
        broker_epoch=1_234_567_890_123,
        max_wait_ms=500,
        min_bytes=1,
        max_bytes=10_000_000,
        session_id=session[0],
        session_epoch=session[1],
        topics=[(topic.bytes, partitions) for topic, partitions in topics],
        forgotten=[(topic.bytes, indexes) for topic, indexes in forgotten],
    )


@given(TOPICS, FORGOTTEN, st.tuples(INT32, INT32))
def test_a_request_is_what_kio_reads(topics: Any, forgotten: Any, session: tuple[int, int]) -> None:
    body = body_of(topics, forgotten, session)
    request, size = entity_reader(request_schema.FetchRequest)(body, 0)
    assert size == len(body)
    assert (request.replica_state.replica_id, request.replica_state.replica_epoch) == (4, 1_234_567_890_123)
    assert (request.max_wait, request.min_bytes) == (datetime.timedelta(milliseconds=500), 1)
    assert (request.session_id, request.session_epoch, request.isolation_level) == (*session, 0)
    got = [
        (
            topic.topic_id or uuid.UUID(int=0),
            [
                FetchPartition(
                    asked.partition,
                    asked.current_leader_epoch,
                    asked.fetch_offset,
                    asked.last_fetched_epoch,
                    asked.log_start_offset,
                    asked.partition_max_bytes,
                )
                for asked in topic.partitions
            ],
        )
        for topic in request.topics
    ]
    assert got == topics
    dropped = [(t.topic_id or uuid.UUID(int=0), list(t.partitions)) for t in request.forgotten_topics_data]
    assert dropped == forgotten


@given(TOPICS, FORGOTTEN)
def test_a_request_is_what_a_leader_reads(topics: Any, forgotten: Any) -> None:
    request = parse_fetch_request(memoryview(body_of(topics, forgotten)), 0, 17)
    assert request.replica_id == 4
    assert request.topics == [(topic.bytes, partitions) for topic, partitions in topics]
    assert request.forgotten == [(topic.bytes, indexes) for topic, indexes in forgotten]


def response_of(answered: Any) -> memoryview:
    s = response_schema
    topics = tuple(
        s.FetchableTopicResponse(topic_id=topic, partitions=tuple(map(_partition, partitions)))
        for topic, partitions in answered
    )
    endpoints = (s.NodeEndpoint(node_id=2, host="h", port=9092, rack=None),)
    return written(
        s.FetchResponse(
            throttle_time=datetime.timedelta(milliseconds=7),
            error_code=ErrorCode.none,
            session_id=9,
            responses=topics,
            node_endpoints=endpoints,
        )
    )


def _partition(result: dict[str, Any]) -> Any:
    s = response_schema
    tags: dict[str, Any] = {}
    if result["diverging"] is not None:
        tags["diverging_epoch"] = s.EpochEndOffset(
            epoch=result["diverging"][0], end_offset=result["diverging"][1]
        )
    if result["leader"] is not None:
        tags["current_leader"] = s.LeaderIdAndEpoch(
            leader_id=result["leader"][0], leader_epoch=result["leader"][1]
        )
    if result["snapshot"] is not None:
        tags["snapshot_id"] = s.SnapshotId(end_offset=result["snapshot"][1], epoch=result["snapshot"][0])
    aborted = result["aborted"]
    if aborted is not None:
        aborted = tuple(s.AbortedTransaction(producer_id=p, first_offset=first) for p, first in aborted)
    return s.PartitionData(
        partition_index=result["index"],
        error_code=result["error"],
        high_watermark=result["high"],
        last_stable_offset=-1,
        log_start_offset=result["start"],
        aborted_transactions=aborted,
        preferred_read_replica=-1,
        records=result["records"],
        **tags,
    )


@given(ANSWERED)
def test_an_answer_is_read_as_kio_writes_it(answered: Any) -> None:
    answer = parse_replica_fetch_response(response_of(answered))
    assert (answer.throttle_ms, answer.error, answer.session_id) == (7, 0, 9)
    expected = [(topic.bytes, result) for topic, results in answered for result in results]
    assert len(answer.partitions) == len(expected)
    for got, (topic_id, result) in zip(answer.partitions, expected, strict=True):
        assert got[:5] == (
            topic_id,
            result["index"],
            result["error"].value,
            result["high"],
            result["start"],
        )
        assert got.records == (result["records"] or b"")
        assert (got.diverging_epoch, got.current_leader) == (result["diverging"], result["leader"])
        assert got.snapshot_id == (result["snapshot"] and result["snapshot"][::-1])


@given(ANSWERED, st.data())
def test_a_damaged_answer_is_refused_or_read_never_more(answered: Any, data: st.DataObject) -> None:
    whole = bytes(response_of(answered))
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(MalformedFrame):
        parse_replica_fetch_response(memoryview(whole[:cut]))
    spoilt = bytearray(whole)
    spoilt[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        answer = parse_replica_fetch_response(memoryview(spoilt))
    except MalformedFrame:
        return
    assert sum(len(each.records) for each in answer.partitions) <= len(spoilt)


def test_a_count_beyond_the_frame_is_refused_before_anything_is_made_for_it() -> None:
    head = bytes(10)
    with pytest.raises(MalformedFrame, match="array of 4294967294 elements"):
        parse_replica_fetch_response(memoryview(head + b"\xff\xff\xff\xff\x0f"))


def test_records_are_slices_of_the_frame_that_brought_them() -> None:
    body = response_of([(uuid.uuid4(), [_result(records=b"abc" * 9)])])
    (got,) = parse_replica_fetch_response(body).partitions
    assert got.records.obj is body.obj


def _result(**changes: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = dict.fromkeys(("records", "aborted", "diverging", "leader", "snapshot"))
    return {"index": 0, "error": ErrorCode.none, "high": 1, "start": 0, **nothing, **changes}
