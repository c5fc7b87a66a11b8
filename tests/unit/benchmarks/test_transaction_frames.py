"""Patched frames of transactions have the bytes of kio, and error codes are read where kio writes them."""

from datetime import timedelta

import pytest
from benchmarks.wire.transaction_frames import (
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
from tests.unit.benchmarks.kio_frames import encode_response, parse_request

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


def test_every_batch_is_stamped_and_has_its_checksum() -> None:
    frame = ProduceFrame("topic", [0, 4], BATCH, transactional_id="tx", implicit=True)
    frame.stamp(77, 3, 12)
    sent = parse_request(bytes(frame.data), produce_request.ProduceRequest)
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
    sent = parse_request(bytes(frame.data), end_request.EndTxnRequest)
    assert sent == end_request.EndTxnRequest(
        transactional_id="tx", producer_id=2**40, producer_epoch=9, committed=True
    )


@pytest.mark.parametrize("codes", [CODES, CODES[:2], CODES[2:]])
def test_the_first_error_of_an_answer_is_found(codes: tuple[ErrorCode, ...]) -> None:
    expected = next((code.value for code in codes if code.value), 0)
    answered = encode_response(
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
    added = encode_response(
        add.AddPartitionsToTxnResponse(
            throttle_time=timedelta(0),
            results_by_topic_v3_and_below=(
                add.AddPartitionsToTxnTopicResult(name="topic", results_by_partition=results),
            ),
        )
    )
    assert add_answer("topic", len(codes)).error_code(added) == expected


def test_the_end_answers_with_the_next_producer() -> None:
    answered = encode_response(
        end.EndTxnResponse(
            throttle_time=timedelta(0), error_code=ErrorCode.none, producer_id=2**35, producer_epoch=4
        )
    )
    assert END_ANSWER.error_code(answered) == 0
    assert next_producer(answered) == (2**35, 4)
