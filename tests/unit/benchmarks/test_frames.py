"""Patched frames have the bytes of kio."""

from datetime import timedelta
from io import BytesIO
from struct import pack
from typing import Any
from uuid import UUID

import pytest
from benchmarks.wire.frames import (
    Ack,
    Ring,
    ack_struct,
    fetch_frame,
    patch_correlation_id,
    patch_fetch,
    produce_frame,
    read_fetch_response,
)
from benchmarks.wire.payloads import fill_batch, value_pool
from kio.schema.errors import ErrorCode
from kio.schema.fetch.v16 import request as fetch_request
from kio.schema.fetch.v16 import response as fetch_response
from kio.schema.produce.v11 import request as produce_request
from kio.schema.produce.v11 import response as produce_response
from kio.serial import entity_reader, entity_writer

from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import BATCH_HEADER_BYTES, decode_records, read_header

TOPIC_ID = UUID("6f1f3a52-54f5-4b0e-8f0e-0a2f6b7c8d9e")


def parse(frame: bytes, request_class: Any) -> tuple[int, Any]:
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    header, size = entity_reader(request_class.__header_schema__)(frame[4:], 0)
    request, read = entity_reader(request_class)(frame[4:], size)
    assert size + read == len(frame) - 4
    return header.correlation_id, request


def encode_response(response: Any) -> bytes:
    body = BytesIO()
    header_class = response.__header_schema__
    entity_writer(header_class)(body, header_class(correlation_id=41))
    entity_writer(type(response))(body, response)
    return pack(">i", body.tell()) + body.getvalue()


def test_patching_the_correlation_id_changes_nothing_else() -> None:
    frame = bytearray(produce_frame("t", 3, b"batch"))
    patch_correlation_id(frame, 123456)
    correlation_id, request = parse(bytes(frame), produce_request.ProduceRequest)
    assert correlation_id == 123456
    (topic,) = request.topic_data
    (partition,) = topic.partition_data
    assert (request.acks, topic.name, partition.index, bytes(partition.records)) == (-1, "t", 3, b"batch")


def test_the_ring_wraps_and_visits_every_partition_in_turn() -> None:
    ring = Ring("t", [0, 1], b"batch", window=5)
    assert ring.slots == 6
    sent = bytes(ring.take(4)) + bytes(ring.take(5))
    frames = [sent[at : at + ring.frame_bytes] for at in range(0, len(sent), ring.frame_bytes)]
    seen = [parse(frame, produce_request.ProduceRequest) for frame in frames]
    assert [correlation_id for correlation_id, _ in seen] == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert [r.topic_data[0].partition_data[0].index for _, r in seen] == [0, 1, 0, 1, 0, 1, 0, 1, 0]


def test_the_ring_refuses_a_run_longer_than_itself() -> None:
    with pytest.raises(AssertionError):
        Ring("t", [0], b"batch", window=5).take(6)


def test_the_acknowledgement_layout_is_a_successful_produce_response() -> None:
    partition = produce_response.PartitionProduceResponse(
        index=2, error_code=ErrorCode.none, base_offset=77, log_start_offset=5, record_errors=()
    )
    topic = produce_response.TopicProduceResponse(name="orders", partition_responses=(partition,))
    response = produce_response.ProduceResponse(responses=(topic,), throttle_time=timedelta(0))
    frame = encode_response(response)
    layout = ack_struct("orders")
    assert layout.size == len(frame)
    ack = Ack._make(layout.unpack(frame))
    assert (ack.size, ack.correlation_id) == (len(frame) - 4, 41)
    assert (ack.partition, ack.error_code, ack.base_offset, ack.log_start_offset) == (2, 0, 77, 5)


def test_a_patched_fetch_continues_the_session_at_the_new_offsets() -> None:
    frame = fetch_frame(TOPIC_ID, [4, 9], partition_bytes_max=1000, wait_ms=250)
    patch_fetch(frame, session_id=1234, session_epoch=7, offsets=[55, 2**40])
    _, request = parse(bytes(frame), fetch_request.FetchRequest)
    assert (request.session_id, request.session_epoch) == (1234, 7)
    (topic,) = request.topics
    assert topic.topic_id == TOPIC_ID
    found = [(p.partition, p.fetch_offset, p.partition_max_bytes) for p in topic.partitions]
    assert found == [(4, 55, 1000), (9, 2**40, 1000)]


@pytest.mark.parametrize("count", [126, 127, 334])
def test_a_session_may_have_more_partitions_than_one_byte_can_count(count: int) -> None:
    frame = fetch_frame(TOPIC_ID, range(count), partition_bytes_max=1000, wait_ms=250)
    patch_fetch(frame, session_id=1, session_epoch=2, offsets=range(1000, 1000 + count))
    _, request = parse(bytes(frame), fetch_request.FetchRequest)
    (topic,) = request.topics
    assert [p.fetch_offset - p.partition for p in topic.partitions] == [1000] * count


def test_a_fetch_response_is_read_without_copying_its_records() -> None:
    partitions = tuple(
        fetch_response.PartitionData(
            partition_index=index,
            error_code=ErrorCode.none,
            high_watermark=100 + index,
            aborted_transactions=None,
            records=bytes([index]) * size,
        )
        for index, size in ((0, 3), (1, 300), (2, 20_000))
    )
    topic = fetch_response.FetchableTopicResponse(topic_id=TOPIC_ID, partitions=partitions)
    response = fetch_response.FetchResponse(
        throttle_time=timedelta(0), error_code=ErrorCode.none, session_id=99, responses=(topic,)
    )
    frame = memoryview(encode_response(response))[4:]
    fetched = read_fetch_response(frame)
    assert (fetched.error_code, fetched.session_id) == (0, 99)
    assert [(p.partition, p.high_watermark, len(p.records)) for p in fetched.partitions] == [
        (0, 100, 3),
        (1, 101, 300),
        (2, 102, 20_000),
    ]
    assert all(p.records.obj is frame.obj for p in fetched.partitions)


@pytest.mark.parametrize("codec", list(Codec))
def test_a_batch_is_filled_to_the_limit_and_holds_the_pool_in_order(codec: Codec) -> None:
    pool = value_pool(100, count=10)
    batch, count = fill_batch(pool, codec, 4096, now_ms=1_700_000_000_000)
    assert [record.value for record in decode_records(batch, 1 << 20)] == [pool[i % 10] for i in range(count)]
    assert read_header(batch).record_count == count
    if codec is Codec.NONE:
        assert 4096 - 120 < len(batch) <= 4096
    else:
        assert BATCH_HEADER_BYTES < len(batch) < 4096
