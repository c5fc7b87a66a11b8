"""The hand-packed Produce and Fetch have exactly the bytes of kio's schemas."""

import datetime
import io
import struct
import uuid
from importlib import import_module
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer

from penstock.protocol.errors import MalformedFrame
from penstock.protocol.fetch import PartitionData, encode_fetch_response, parse_fetch_request
from penstock.protocol.produce import (
    PARTITIONS_AT_ONCE,
    PARTITIONS_MAX,
    ManyPartitions,
    NodeEndpoint,
    PartitionProduceResponse,
    encode_produce_response,
    encode_produce_response_in_steps,
    parse_produce_request,
    parse_produce_request_in_steps,
)
from penstock.protocol.steps import finish

TOPIC_ID = uuid.UUID("12345678-1234-5678-1234-567812345678")
MS = datetime.timedelta(milliseconds=1)
PRODUCE_VERSIONS = range(3, 14)
FETCH_VERSIONS = range(4, 19)


def schema(api: str, version: int, kind: str) -> Any:
    return import_module(f"kio.schema.{api}.v{version}.{kind}")


def written(message: Any) -> memoryview:
    out = io.BytesIO()
    entity_writer(type(message))(out, message)
    return memoryview(out.getvalue())


def produce_request(version: int) -> Any:
    s = schema("produce", version, "request")
    topic = {"topic_id": TOPIC_ID} if version >= 13 else {"name": "orders"}
    data = tuple(s.PartitionProduceData(index=i, records=r) for i, r in enumerate((b"abc" * 100, None, b"")))
    return s.ProduceRequest(
        transactional_id="tx" if version % 2 else None,
        acks=-1,
        timeout=1500 * MS,
        topic_data=(s.TopicProduceData(partition_data=data, **topic),) * 2,
    )


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
def test_produce_request_is_read_as_kio_writes_it(version: int) -> None:
    request = parse_produce_request(written(produce_request(version)), 0, version)
    key = TOPIC_ID.bytes if version >= 13 else b"orders"
    assert request.transactional_id == ("tx" if version % 2 else None)
    assert (request.acks, request.timeout_ms) == (-1, 1500)
    parts = [(i, r if r is None else bytes(r)) for i, r in request.topics[1][1]]
    assert request.topics[1][0] == key
    assert parts == [(0, b"abc" * 100), (1, None), (2, b"")]


@pytest.mark.parametrize("version", [3, 9, 13])
def test_a_produce_request_of_too_many_parts_is_refused_before_they_are_read(version: int) -> None:
    s = schema("produce", version, "request")
    topic = {"topic_id": TOPIC_ID} if version >= 13 else {"name": "orders"}
    part = s.PartitionProduceData(index=0, records=None)

    def request(topics: int, partitions: int) -> memoryview:
        data = s.TopicProduceData(partition_data=(part,) * partitions, **topic)
        return written(
            s.ProduceRequest(transactional_id=None, acks=1, timeout=1500 * MS, topic_data=(data,) * topics)
        )

    most = finish(parse_produce_request_in_steps(request(1, PARTITIONS_MAX - 1), 0, version))
    assert len(most.topics[0][1]) == PARTITIONS_MAX - 1
    for topics, partitions in ((1, PARTITIONS_MAX), (PARTITIONS_MAX + 1, 0), (150, 200)):
        with pytest.raises(MalformedFrame, match="topics and partitions"):
            finish(parse_produce_request_in_steps(request(topics, partitions), 0, version))


def produce_request_of(version: int, topics: int, partitions: int, acks: int = -1) -> memoryview:
    s = schema("produce", version, "request")
    topic = {"topic_id": TOPIC_ID} if version >= 13 else {"name": "orders"}
    data = tuple(s.PartitionProduceData(index=i, records=b"abc") for i in range(partitions))
    return written(
        s.ProduceRequest(
            transactional_id="tx",
            acks=acks,
            timeout=1500 * MS,
            topic_data=(s.TopicProduceData(partition_data=data, **topic),) * topics,
        )
    )


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
@pytest.mark.parametrize(
    ("topics", "partitions"), [(1, PARTITIONS_AT_ONCE), (PARTITIONS_AT_ONCE + 1, 0), (10, 10)]
)
def test_a_produce_request_of_many_partitions_is_only_parsed_in_steps(
    version: int, topics: int, partitions: int
) -> None:
    frame = produce_request_of(version, topics, partitions, acks=0)
    with pytest.raises(ManyPartitions) as many:
        parse_produce_request(frame, 0, version)
    assert many.value.acks == 0
    steps = parse_produce_request_in_steps(frame, 0, version)
    next(steps)
    request = finish(steps)
    assert (request.transactional_id, request.acks, request.timeout_ms) == ("tx", 0, 1500)
    assert [[index for index, _ in parts] for _, parts in request.topics] == [
        list(range(partitions))
    ] * topics
    assert all(records == b"abc" for _, parts in request.topics for _, records in parts)


def test_negative_counts_allow_no_more_partitions_at_once() -> None:
    head = b"\xff\xff" + struct.pack(">hii", 1, 0, 2)
    null_topic = struct.pack(">hi", 0, -(1 << 31))
    frame = head + null_topic + struct.pack(">hi", 0, 1_000) + struct.pack(">ii", 0, -1) * 1_000
    with pytest.raises(ManyPartitions):
        parse_produce_request(memoryview(frame), 0, 3)


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
def test_a_small_produce_request_is_parsed_in_steps_as_at_once(version: int) -> None:
    frame = written(produce_request(version))
    in_steps = finish(parse_produce_request_in_steps(frame, 0, version))
    assert in_steps == parse_produce_request(frame, 0, version)
    for end in range(len(frame) - 1):  # the tagged fields of the request are not read
        with pytest.raises(MalformedFrame):
            finish(parse_produce_request_in_steps(frame[:end], 0, version))


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
def test_a_produce_response_in_steps_has_the_same_bytes(version: int) -> None:
    key = TOPIC_ID.bytes if version >= 13 else b"orders"
    results = [PartitionProduceResponse(index, 0, 42, -1, 7) for index in range(200)]
    results.append(
        PartitionProduceResponse(200, 6, message="not here", record_errors=(1,), current_leader=(1, 2))
    )
    topics = [(key, results), (key, [])]
    steps = encode_produce_response_in_steps(version, 99, topics, LEADERS, 10)
    next(steps)
    assert finish(steps) == encode_produce_response(version, 99, topics, LEADERS, 10)


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
def test_produce_response_is_what_kio_reads(version: int) -> None:
    key = TOPIC_ID.bytes if version >= 13 else b"orders"
    results = [
        PartitionProduceResponse(0, 0, 42, 1_600_000_000_000, 7),
        PartitionProduceResponse(
            1, ErrorCode.invalid_record.value, message="no key in record 3", record_errors=(3, 70_000)
        ),
    ]
    frame = encode_produce_response(version, 99, [(key, results)])
    response, error = read_response("produce", version, frame, 99, flexible=version >= 9)
    assert not error
    ok, bad = response.responses[0].partition_responses
    assert (ok.index, ok.error_code, ok.base_offset) == (0, ErrorCode.none, 42)
    assert ok.log_append_time.timestamp() == 1_600_000_000
    assert bad.error_code is ErrorCode.invalid_record
    if version >= 5:
        assert (ok.log_start_offset, bad.log_start_offset) == (7, -1)
    if version >= 8:
        assert (ok.error_message, ok.record_errors) == (None, ())
        assert bad.error_message == "no key in record 3"
        named = [(each.batch_index, each.batch_index_error_message) for each in bad.record_errors]
        assert named == [(3, "no key in record 3"), (70_000, "no key in record 3")]


def read_response(
    api: str, version: int, frame: bytes, correlation: int, *, flexible: bool
) -> tuple[Any, str]:
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert int.from_bytes(frame[4:8], "big") == correlation
    start = 9 if flexible else 8
    module = schema(api, version, "response")
    response, size = entity_reader(getattr(module, f"{api.title()}Response"))(frame, start)
    return response, "" if start + size == len(frame) else f"{len(frame) - start - size} bytes too many"


def fetch_request(version: int) -> Any:
    s = schema("fetch", version, "request")
    topic = {"topic_id": TOPIC_ID} if version >= 13 else {"topic": "orders"}
    extra: dict[str, Any] = {}
    partition: dict[str, Any] = {"partition": 3, "fetch_offset": 11, "partition_max_bytes": 1 << 20}
    if version >= 5:
        partition["log_start_offset"] = 5
    if version >= 7:
        extra |= {"session_id": 8, "session_epoch": 2}
        extra["forgotten_topics_data"] = (s.ForgottenTopic(partitions=(1, 2), **topic),)
    if version >= 9:
        partition["current_leader_epoch"] = 4
    if version >= 11:
        extra["rack_id"] = "rack-a"
    if version >= 12:
        partition["last_fetched_epoch"] = 3
        extra["cluster_id"] = "some-cluster"
    if version >= 15:
        extra["replica_state"] = s.ReplicaState(replica_id=6, replica_epoch=1)
    else:
        extra["replica_id"] = 6
    if version >= 17:
        partition["replica_directory_id"] = TOPIC_ID
    topics = (s.FetchTopic(partitions=(s.FetchPartition(**partition),), **topic),) * 2
    return s.FetchRequest(
        max_wait=500 * MS, min_bytes=1, max_bytes=1000, isolation_level=1, topics=topics, **extra
    )


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_fetch_request_is_read_as_kio_writes_it(version: int) -> None:
    request = parse_fetch_request(written(fetch_request(version)), 0, version)
    key = TOPIC_ID.bytes if version >= 13 else b"orders"
    assert (request.max_wait_ms, request.min_bytes, request.max_bytes) == (500, 1, 1000)
    assert (request.isolation_level, request.replica_id) == (1, 6)
    assert request.replica_epoch == (1 if version >= 15 else -1)
    assert [name for name, _ in request.topics] == [key, key]
    (partition,) = request.topics[1][1]
    assert (partition.partition, partition.offset, partition.max_bytes) == (3, 11, 1 << 20)
    assert partition.leader_epoch == (4 if version >= 9 else -1)
    assert partition.last_fetched_epoch == (3 if version >= 12 else -1)
    if version >= 7:
        assert (request.session_id, request.session_epoch) == (8, 2)
        assert request.forgotten == [(key, [1, 2])]


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_fetch_response_is_what_kio_reads(version: int) -> None:
    key = TOPIC_ID.bytes if version >= 13 else b"orders"
    partitions = [
        PartitionData(0, 0, 100, 90, 5, b"x" * 300, aborted=((7, 8),)),
        PartitionData(1, ErrorCode.offset_out_of_range.value),
    ]
    if version >= 12:
        partitions.append(PartitionData(2, 0, 1, 1, 0, diverging_epoch=(4, 17)))
    buffers = encode_fetch_response(version, 5, error=0, session_id=12, topics=[(key, partitions)])
    response, error = read_response("fetch", version, b"".join(buffers), 5, flexible=version >= 12)
    assert not error
    got = response.responses[0].partitions
    assert bytes(got[0].records) == b"x" * 300
    assert (got[0].high_watermark, got[0].last_stable_offset) == (100, 90)
    assert got[0].aborted_transactions[0].producer_id == 7
    assert got[1].error_code is ErrorCode.offset_out_of_range
    assert not got[1].records
    if version >= 7:
        assert response.session_id == 12
    if version >= 12:
        assert (got[2].diverging_epoch.epoch, got[2].diverging_epoch.end_offset) == (4, 17)


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
def test_produce_request_cut_anywhere_is_malformed_and_nothing_else(version: int) -> None:
    frame = written(produce_request(version))
    for end in range(len(frame) - (1 if version >= 9 else 0)):
        with pytest.raises(MalformedFrame):
            parse_produce_request(frame[:end], 0, version)


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_fetch_request_cut_anywhere_is_malformed_and_nothing_else(version: int) -> None:
    frame = written(fetch_request(version))
    for end in range(len(frame)):
        with pytest.raises(MalformedFrame):
            parse_fetch_request(frame[:end], 0, version)


LEADERS = [NodeEndpoint(4, "host-4", 9094, "rack-b"), NodeEndpoint(5, "::1", 70_000, None)]


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
def test_a_producer_at_the_wrong_broker_is_told_the_leader_as_kio_reads_it(version: int) -> None:
    key = TOPIC_ID.bytes if version >= 13 else b"orders"
    results = [
        PartitionProduceResponse(0, ErrorCode.not_leader_or_follower.value, current_leader=(4, 7)),
        PartitionProduceResponse(
            1, ErrorCode.not_leader_or_follower.value, message="moved", current_leader=(5, 8)
        ),
    ]
    frame = encode_produce_response(version, 1, [(key, results)], LEADERS)
    response, error = read_response("produce", version, frame, 1, flexible=version >= 9)
    assert not error
    if version >= 10:
        leaders = [part.current_leader for part in response.responses[0].partition_responses]
        assert [(leader.leader_id, leader.leader_epoch) for leader in leaders] == [(4, 7), (5, 8)]
        assert [(e.node_id, e.host, e.port, e.rack) for e in response.node_endpoints] == LEADERS


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_a_reader_at_the_wrong_broker_is_told_the_leader_as_kio_reads_it(version: int) -> None:
    key = TOPIC_ID.bytes if version >= 13 else b"orders"
    parts = [
        PartitionData(0, ErrorCode.not_leader_or_follower.value, current_leader=(4, 7)),
        PartitionData(1, 0, diverging_epoch=(3, 9), current_leader=(5, 8)),
    ]
    buffers = encode_fetch_response(
        version, 1, error=0, session_id=0, topics=[(key, parts)], endpoints=LEADERS
    )
    response, error = read_response("fetch", version, b"".join(buffers), 1, flexible=version >= 12)
    assert not error
    if version >= 12:
        leaders = [part.current_leader for part in response.responses[0].partitions]
        assert [(leader.leader_id, leader.leader_epoch) for leader in leaders] == [(4, 7), (5, 8)]
        assert response.responses[0].partitions[1].diverging_epoch.end_offset == 9
    if version >= 16:
        assert [(e.node_id, e.host, e.port, e.rack) for e in response.node_endpoints] == LEADERS
