"""Stamped frames must be what kio would have encoded, and answers be read where kio would have put their codes."""

from datetime import timedelta
from io import BytesIO
from typing import Any

import pytest
from benchmarks.transaction_wire import (
    END_ANSWER,
    EndFrame,
    ProduceFrame,
    add_answer,
    next_producer,
    produce_answer,
)
from kio.schema.add_partitions_to_txn.v3 import response as add
from kio.schema.end_txn.v5 import request as end_request
from kio.schema.end_txn.v5 import response as end
from kio.schema.errors import ErrorCode
from kio.schema.produce.v12 import request as produce_request
from kio.schema.produce.v12 import response as produce
from kio.serial import entity_reader, entity_writer

from penstock.protocol.record_batch import TRANSACTIONAL, Record, checksum, encode_batch, read_header

BATCH = bytes(
    encode_batch(
        [Record(0, 1, None, b"value")],
        attributes=TRANSACTIONAL,
        producer_id=0,
        producer_epoch=0,
        base_sequence=0,
    )
)
CODES = (ErrorCode.none, ErrorCode.none, ErrorCode.concurrent_transactions)


def request(frame: bytes, request_class: Any) -> Any:
    _, size = entity_reader(request_class.__header_schema__)(frame[4:], 0)
    parsed, read = entity_reader(request_class)(frame[4:], size)
    assert size + read == len(frame) - 4 == int.from_bytes(frame[:4], "big")
    return parsed


def response(body: Any) -> memoryview:
    buffer = BytesIO()
    header = type(body).__header_schema__
    entity_writer(header)(buffer, header(correlation_id=7))
    entity_writer(type(body))(buffer, body)
    return memoryview(buffer.getvalue())


def test_every_batch_is_stamped_and_has_its_checksum() -> None:
    frame = ProduceFrame("topic", [0, 4], BATCH, transactional_id="tx", implicit=True)
    frame.stamp(77, 3, 12)
    sent = request(bytes(frame.data), produce_request.ProduceRequest)
    assert sent.transactional_id == "tx"
    parts = sent.topic_data[0].partition_data
    assert [part.index for part in parts] == [0, 4]
    for part in parts:
        header = read_header(part.records)
        assert (header.producer_id, header.producer_epoch, header.base_sequence) == (77, 3, 12)
        assert header.is_transactional
        assert header.crc == checksum(part.records)


def test_the_end_is_stamped() -> None:
    frame = EndFrame("tx", implicit=True)
    frame.stamp(2**40, 9)
    sent = request(bytes(frame.data), end_request.EndTxnRequest)
    assert sent == end_request.EndTxnRequest(
        transactional_id="tx", producer_id=2**40, producer_epoch=9, committed=True
    )


@pytest.mark.parametrize("codes", [CODES, CODES[:2], CODES[2:]])
def test_the_first_error_of_an_answer_is_found(codes: tuple[ErrorCode, ...]) -> None:
    expected = next((code.value for code in codes if code.value), 0)
    answered = response(
        produce.ProduceResponse(
            responses=(
                produce.TopicProduceResponse(
                    name="topic",
                    partition_responses=tuple(
                        produce.PartitionProduceResponse(
                            index=i, error_code=code, base_offset=5, record_errors=()
                        )
                        for i, code in enumerate(codes)
                    ),
                ),
            ),
            throttle_time=timedelta(0),
        )
    )
    assert produce_answer("topic", len(codes)).error_code(answered) == expected
    results = tuple(
        add.AddPartitionsToTxnPartitionResult(partition_index=i, partition_error_code=code)
        for i, code in enumerate(codes)
    )
    added = response(
        add.AddPartitionsToTxnResponse(
            throttle_time=timedelta(0),
            results_by_topic_v3_and_below=(
                add.AddPartitionsToTxnTopicResult(name="topic", results_by_partition=results),
            ),
        )
    )
    assert add_answer("topic", len(codes)).error_code(added) == expected


def test_the_end_answers_with_the_next_producer() -> None:
    answered = response(
        end.EndTxnResponse(
            throttle_time=timedelta(0), error_code=ErrorCode.none, producer_id=2**35, producer_epoch=4
        )
    )
    assert END_ANSWER.error_code(answered) == 0
    assert next_producer(answered) == (2**35, 4)
