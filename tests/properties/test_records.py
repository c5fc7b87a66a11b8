"""Record batches agree with the encoders and decoders of two other clients, in both directions."""

from typing import Any

import pytest
from aiokafka.record.default_records import DefaultRecordBatch as AioBatch
from aiokafka.record.default_records import DefaultRecordBatchBuilder as AioBuilder
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch as KafkaBatch
from kafka.record.default_records import DefaultRecordBatchBuilder as KafkaBuilder

from penstock.protocol.compression import Codec
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import (
    BATCH_HEADER_BYTES,
    Record,
    checksum,
    decode_records,
    encode_batch,
    keyless_records,
    open_batch,
    pack_batch,
    read_header,
    scan_records,
)
from penstock.protocol.steps import finish

BOUND = 1 << 22
CLIENTS = [
    pytest.param(KafkaBatch, KafkaBuilder, id="kafka-python"),
    pytest.param(AioBatch, AioBuilder, id="aiokafka"),
]

payloads = st.none() | st.binary(max_size=80) | st.binary(min_size=1, max_size=4).map(lambda part: part * 300)
timestamps = st.integers(0, 1 << 45)
headers = st.lists(st.tuples(st.text(max_size=12), st.none() | st.binary(max_size=20)), max_size=4).map(tuple)
codecs = st.sampled_from(Codec)


@st.composite
def batches(draw: st.DrawFn, *, gaps: bool = False) -> list[Record]:
    steps = draw(st.lists(st.integers(1, 1000) if gaps else st.just(1), min_size=1, max_size=20))
    offset, records = -1, []
    for step in steps:
        offset += step
        records.append(Record(offset, draw(timestamps), draw(payloads), draw(payloads), draw(headers)))
    return records


def read_by(client: Any, batch: bytearray) -> list[Record]:
    reader = client(bytes(batch))
    assert reader.validate_crc()
    return [
        Record(
            record.offset, record.timestamp, record.key, record.value, tuple(tuple(h) for h in record.headers)
        )
        for record in reader
    ]


def written_by(builder: Any, records: list[Record], codec: Codec) -> bytearray:
    writer = builder(
        magic=2,
        compression_type=int(codec),
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=BOUND,
    )
    for record in records:
        assert writer.append(
            record.offset, record.timestamp, record.key, record.value, [tuple(h) for h in record.headers]
        )
    return bytearray(writer.build())


@given(records=batches(gaps=True), codec=codecs)
def test_what_is_written_is_read(records: list[Record], codec: Codec) -> None:
    assert decode_records(encode_batch(records, codec=codec), BOUND) == records


@pytest.mark.parametrize(("reader", "builder"), CLIENTS)
@given(records=batches(gaps=True), codec=codecs, base_offset=st.integers(0, 1 << 40))
def test_clients_read_what_we_write(
    reader: Any, builder: Any, records: list[Record], codec: Codec, base_offset: int
) -> None:
    moved = [record._replace(offset=record.offset + base_offset) for record in records]
    assert read_by(reader, encode_batch(moved, codec=codec)) == moved


@pytest.mark.parametrize(("reader", "builder"), CLIENTS)
@given(records=batches(), codec=codecs)
def test_we_read_what_clients_write(reader: Any, builder: Any, records: list[Record], codec: Codec) -> None:
    batch = written_by(builder, records, codec)
    assert read_header(batch).crc == checksum(batch)
    assert decode_records(batch, BOUND) == records


@given(records=batches(gaps=True), codec=codecs)
def test_a_scan_sees_what_decoding_sees(records: list[Record], codec: Codec) -> None:
    header, body = open_batch(encode_batch(records, codec=codec), BOUND)
    seen = [
        (header.base_offset + s.offset_delta, header.base_timestamp + s.timestamp_delta, s.key, s.has_value)
        for s in scan_records(header, body)
    ]
    assert seen == [(r.offset, r.timestamp, r.key, r.value is not None) for r in records]


def outcome_of(read: Any) -> Any:
    """The records, or the code of the refusal; anything else that is raised fails the test."""
    try:
        return read()
    except ApiError as refused:
        return refused.code


@given(records=batches(), codec=codecs, data=st.data())
def test_damage_under_a_right_checksum_is_refused_or_read_the_same_way(
    records: list[Record], codec: Codec, data: st.DataObject
) -> None:
    """A peer computes the checksum over whatever it sends, so it protects from nothing hostile."""
    batch = encode_batch(records, codec=codec)
    body = bytearray(batch[BATCH_HEADER_BYTES:])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    hostile = pack_batch(read_header(batch), body)
    decoded = outcome_of(lambda: decode_records(hostile, BOUND))

    def scan() -> list[tuple[int, bytes | None]]:
        header, opened = open_batch(hostile, BOUND)
        return [(header.base_offset + s.offset_delta, s.key) for s in scan_records(header, opened)]

    if decoded is not ErrorCode.corrupt_message:
        decoded = [(record.offset, record.key) for record in decoded]
    assert outcome_of(scan) == decoded

    def search() -> tuple[int, ...]:
        return finish(keyless_records(*open_batch(hostile, BOUND), len(records)))

    if decoded is not ErrorCode.corrupt_message:
        decoded = tuple(index for index, (_, key) in enumerate(decoded) if key is None)
    assert outcome_of(search) == decoded


@given(records=batches(gaps=True), codec=codecs)
def test_the_search_for_keys_sees_what_decoding_sees(records: list[Record], codec: Codec) -> None:
    opened = open_batch(encode_batch(records, codec=codec), BOUND)
    keyless = tuple(index for index, record in enumerate(records) if record.key is None)
    assert finish(keyless_records(*opened, len(records))) == keyless


@given(junk=st.binary(max_size=300), count=st.integers(-(1 << 31), (1 << 31) - 1), codec=st.integers(0, 7))
def test_junk_never_does_worse_than_corrupt(junk: bytes, count: int, codec: int) -> None:
    header = read_header(encode_batch([Record(0, 0, b"k", b"v")]))
    hostile = pack_batch(
        header._replace(record_count=count, attributes=codec, last_offset_delta=1 << 30), junk
    )
    decoded = outcome_of(lambda: decode_records(hostile, BOUND))
    assert decoded is ErrorCode.corrupt_message or len(decoded) == count
