"""Record batches: encoding, and hostile batches that are refused before they cost anything."""

import itertools
import struct
from collections.abc import Callable
from typing import Any

import pytest

from penstock.protocol import record_batch
from penstock.protocol.compression import BytesLike, Codec
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import (
    BATCH_HEADER_BYTES,
    CONTROL,
    DELETE_HORIZON,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    BatchHeader,
    BatchOffsets,
    EndMarker,
    Record,
    RecordSpan,
    checksum,
    decode_records,
    encode_batch,
    encode_coordinator_batch,
    encode_end_marker,
    iter_batches,
    keyless_records,
    open_batch,
    pack_batch,
    parse_end_marker,
    read_header,
    scan_records,
    set_max_timestamp,
    shift_timestamp,
)
from penstock.protocol.wire import encode_varint, read_varint, read_varlong

BOUND = 1 << 20
NOW_MS = 1_700_000_000_000
RECORDS = [
    Record(10, 1_000, b"key", b"value", (("trace", b"abc"), ("empty", b""), ("null", None))),
    Record(11, 990, None, b"no key"),
    Record(14, 1_010, b"gone", None),
    Record(15, 1_005, b"", b""),
]


def spans(batch: bytearray) -> list[RecordSpan]:
    header, body = open_batch(batch, BOUND)
    return list(scan_records(header, body))


def with_body(body: bytes, **fields: int) -> bytearray:
    """A batch whose checksum is right and whose contents need not be."""
    header = read_header(encode_batch([Record(0, 0, b"k", b"v")]))._replace(**fields)
    return pack_batch(header, body)


def record_body(content: bytes) -> bytes:
    return encode_varint(len(content)) + content


@pytest.mark.parametrize("codec", Codec)
def test_records_come_back_with_gaps_nulls_and_headers(codec: Codec) -> None:
    batch = encode_batch(RECORDS, codec=codec)
    assert decode_records(batch, BOUND) == RECORDS


def test_the_header_says_what_is_inside() -> None:
    batch = encode_batch(
        RECORDS, codec=Codec.ZSTD, leader_epoch=7, producer_id=5, producer_epoch=2, base_sequence=9
    )
    header = read_header(batch)
    assert header == BatchHeader(
        base_offset=10,
        length=len(batch) - 12,
        leader_epoch=7,
        magic=2,
        crc=checksum(batch),
        attributes=Codec.ZSTD,
        last_offset_delta=5,
        base_timestamp=1_000,
        max_timestamp=1_010,
        producer_id=5,
        producer_epoch=2,
        base_sequence=9,
        record_count=4,
    )
    assert (header.size, header.last_offset) == (len(batch), 15)


def test_a_batch_of_no_records_keeps_its_offsets_and_its_producer() -> None:
    batch = encode_batch(
        [], base_offset=3, last_offset=8, producer_id=5, producer_epoch=1, base_sequence=4, max_timestamp=77
    )
    header = read_header(batch)
    assert (header.base_offset, header.last_offset, header.record_count) == (3, 8, 0)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (5, 1, 4)
    assert header.max_timestamp == 77
    assert decode_records(batch, BOUND) == []
    assert spans(batch) == []


def test_restamping_gives_every_record_the_append_time() -> None:
    batch = encode_batch(RECORDS)
    set_max_timestamp(batch, attributes=LOG_APPEND_TIME, max_timestamp=123_456)
    assert {record.timestamp for record in decode_records(batch, BOUND)} == {123_456}
    assert read_header(batch).crc == checksum(batch)


def test_offset_and_epoch_are_not_under_the_checksum() -> None:
    batch = encode_batch(RECORDS)
    struct.pack_into(">q", batch, 0, 5_000)
    struct.pack_into(">i", batch, 12, 3)
    assert read_header(batch).crc == checksum(batch)
    assert [record.offset for record in decode_records(batch, BOUND)] == [5_000, 5_001, 5_004, 5_005]


@pytest.mark.parametrize(
    ("attributes", "is_control", "horizon_ms"),
    [(0, False, None), (CONTROL, True, None), (DELETE_HORIZON, False, 1_000)],
)
def test_attributes_are_read(attributes: int, is_control: bool, horizon_ms: int | None) -> None:
    header = read_header(encode_batch(RECORDS, attributes=attributes))
    assert (header.is_control, header.delete_horizon_ms) == (is_control, horizon_ms)


def test_timestamps_far_apart_wrap_as_they_do_for_clients() -> None:
    records = [Record(0, -(1 << 62), b"k", b"v"), Record(1, (1 << 63) - 1, b"k", b"v")]
    assert decode_records(encode_batch(records), BOUND) == records


def test_header_keys_that_are_not_text_survive() -> None:
    content = b"\x00" + b"\x00\x00" + b"\x01\x01" + b"\x02" + encode_varint(2) + b"\xff\xfe" + b"\x01"
    batch = with_body(record_body(content))
    records = decode_records(batch, BOUND)
    assert decode_records(encode_batch(records), BOUND) == records
    assert encode_batch(records)[BATCH_HEADER_BYTES:] == batch[BATCH_HEADER_BYTES:]


def test_batches_of_a_slice_are_walked_and_a_partial_one_is_left() -> None:
    first, second = encode_batch(RECORDS[:1]), encode_batch(RECORDS[1:])
    slice_ = bytes(first + second + second[:-1])
    assert [bytes(batch) for _, batch in iter_batches(slice_)] == [bytes(first), bytes(second)]


@pytest.mark.parametrize("codec", Codec)
def test_a_scan_finds_keys_and_tombstones(codec: Codec) -> None:
    found = spans(encode_batch(RECORDS, codec=codec))
    assert [(10 + span.offset_delta, span.key, span.has_value) for span in found] == [
        (record.offset, record.key, record.value is not None) for record in RECORDS
    ]


def keyless(batch: BytesLike, count_max: int = 1_000) -> tuple[tuple[int, ...], int]:
    """The indexes of the records without a key, and the number of steps that the search takes."""
    steps, count = keyless_records(*open_batch(batch, BOUND), count_max), 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, count
        count += 1


SHAPES = {
    "plain": Record(0, 1_000, b"k", b"v"),
    "tombstone": Record(0, 1_000, b"", None),
    "late": Record(0, 1_000 + 70, b"k", b""),
    "later": Record(0, 1_000 + 10_000, b"k", b""),
    "much later": Record(0, 1_000 + 10_000_000, b"k", b""),
    "earlier": Record(0, 0, b"k", b"v"),
    "long key": Record(0, 1_000, bytes(70), b"v"),
    "long value": Record(0, 1_000, b"k", bytes(70)),
    "long": Record(0, 1_000, b"k" * 40, bytes(40)),
    "headers": Record(0, 1_000, b"k", b"v", (("h", b"x"), ("n", None))),
    "nine headers": Record(0, 1_000, b"k", b"v", (("h", b"x"),) * 9),
    "long header": Record(0, 1_000, b"k", b"v", (("h", bytes(70)), ("n" * 70, b""))),
    "no key": Record(0, 1_000, None, b"v"),
    "nothing": Record(0, 1_000, None, None),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gap", [1, 40, 3_000, 600_000])
def test_records_without_a_key_are_found_among_records_of_any_shape(shape: str, gap: int) -> None:
    records = [
        SHAPES["plain" if number % 7 else shape]._replace(offset=number * gap) for number in range(3_000)
    ]
    expected = tuple(number for number, record in enumerate(records) if record.key is None)
    found, steps = keyless(encode_batch(records), len(records))
    assert found == expected
    assert steps >= 3
    assert keyless(encode_batch(records), 2)[0] == expected[:2]


@pytest.mark.parametrize("shape", [*SHAPES, "many headers"])
def test_no_step_of_the_search_for_keys_is_long(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = record_batch.read_varint
    monkeypatch.setattr(record_batch, "read_varint", lambda *args: read.append(1) or real(*args))
    record = SHAPES.get(shape, Record(0, 1_000, b"k", b"v", (("", None),) * 5_000))
    records = [record._replace(offset=number) for number in range(5 if shape == "many headers" else 5_000)]
    steps = keyless_records(*open_batch(encode_batch(records), 1 << 22), 1)
    before = count = 0
    for _ in steps:
        count += 1
        assert len(read) - before <= 2_000
        before = len(read)
    assert count >= 5


def test_scanned_records_can_be_written_again_byte_for_byte() -> None:
    batch = encode_batch(RECORDS)
    header, body = open_batch(batch, BOUND)
    again = b"".join(body[span.start : span.end] for span in scan_records(header, body))
    assert pack_batch(header, again) == batch


@pytest.mark.parametrize("shift_ms", [0, 1, -1, 300, -86_400_000_000, (1 << 63) - 1])
def test_a_moved_base_timestamp_leaves_every_timestamp_alone(shift_ms: int) -> None:
    header, body = open_batch(encode_batch(RECORDS), BOUND)
    moved = b"".join(shift_timestamp(body, span, shift_ms) for span in scan_records(header, body))
    assert (
        decode_records(pack_batch(header._replace(base_timestamp=1_000 - shift_ms), moved), BOUND) == RECORDS
    )


CONTENT = b"\x00\x00\x00\x02k\x02v"  # all of a record but its headers
PLAIN_RECORD = record_body(CONTENT + b"\x00")
HOSTILE: dict[str, Callable[[], bytearray]] = {
    "more records than bytes": lambda: with_body(PLAIN_RECORD, record_count=(1 << 31) - 1),
    "fewer records than bytes": lambda: with_body(PLAIN_RECORD * 2, last_offset_delta=1),
    "a negative record count": lambda: with_body(b"", record_count=-1),
    "a negative last offset delta": lambda: with_body(PLAIN_RECORD, last_offset_delta=-1),
    "bytes after the last record": lambda: with_body(PLAIN_RECORD + b"\x00"),
    "an unknown codec": lambda: with_body(PLAIN_RECORD, attributes=5),
    "a record longer than the batch": lambda: with_body(encode_varint(1 << 30) + PLAIN_RECORD),
    "a record of negative length": lambda: with_body(encode_varint(-5) + PLAIN_RECORD),
    "a record of no length": lambda: with_body(b"\x00" + PLAIN_RECORD),
    "a key longer than the record": lambda: with_body(record_body(b"\x00\x00\x00\x64k\x02v\x00")),
    "a key of negative length": lambda: with_body(record_body(b"\x00\x00\x00\x03k\x02v\x00")),
    "a value longer than the record": lambda: with_body(record_body(b"\x00\x00\x00\x02k\x64v\x00")),
    "a count of headers that cannot be": lambda: with_body(record_body(CONTENT + b"\xfe\xff\xff\xff\x0f")),
    "a negative count of headers": lambda: with_body(record_body(CONTENT + b"\x01")),
    "a header without a key": lambda: with_body(record_body(CONTENT + b"\x02\x01\x01")),
    "bytes inside the record after its headers": lambda: with_body(record_body(CONTENT + b"\x00\x00")),
    "an offset past the batch": lambda: with_body(record_body(b"\x00\x00\x02\x02k\x02v\x00")),
    "an offset before the batch": lambda: with_body(record_body(b"\x00\x00\x01\x02k\x02v\x00")),
    "an offset twice": lambda: with_body(PLAIN_RECORD * 2, record_count=2, last_offset_delta=1),
    "a length of six bytes": lambda: with_body(b"\x90\x80\x80\x80\x80\x00" + PLAIN_RECORD[1:]),
    "a varint that never ends": lambda: with_body(b"\x80" * 40),
    "a varint cut short": lambda: with_body(b"\x80"),
    "less than a header": lambda: encode_batch(RECORDS)[: BATCH_HEADER_BYTES - 1],
    "less than its length": lambda: encode_batch(RECORDS)[:-1],
    "more than its length": lambda: encode_batch(RECORDS) + b"\x00",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "read", [lambda batch: decode_records(batch, BOUND), spans, keyless], ids=["decode", "scan", "search"]
)
def test_a_hostile_batch_is_a_corrupt_message(name: str, read: Callable[[bytearray], object]) -> None:
    with pytest.raises(ApiError) as refused:
        read(HOSTILE[name]())
    assert refused.value.code is ErrorCode.corrupt_message


def test_the_hostile_batches_differ_from_a_good_one() -> None:
    assert decode_records(with_body(PLAIN_RECORD), BOUND) == [Record(0, 0, b"k", b"v")]


@pytest.mark.parametrize("value", [0, -1, 1, 63, 64, -64, -65, (1 << 31) - 1, -(1 << 31)])
def test_varints_round_trip(value: int) -> None:
    data = encode_varint(value)
    assert read_varint(data, 0) == read_varlong(data, 0) == (value, len(data))


@pytest.mark.parametrize("value", [(1 << 63) - 1, -(1 << 63)])
def test_varlongs_take_ten_bytes(value: int) -> None:
    data = encode_varint(value)
    assert read_varlong(data, 0) == (value, 10)
    with pytest.raises(ApiError):
        read_varint(data, 0)


@pytest.mark.parametrize("committed", [True, False])
def test_an_end_marker_is_read_as_it_was_written(committed: bool) -> None:
    marker = EndMarker(producer_id=77, producer_epoch=3, coordinator_epoch=9, committed=committed)
    batch = encode_end_marker(marker, 1_700_000_000_000)
    header = read_header(batch)
    assert header.is_control
    assert header.is_transactional
    assert header.crc == checksum(batch)
    assert (header.record_count, header.base_sequence, header.max_timestamp) == (1, -1, 1_700_000_000_000)
    assert parse_end_marker(batch) == marker


def test_an_end_marker_has_the_published_key_and_value() -> None:
    batch = encode_end_marker(EndMarker(1, 0, 5, committed=True), 0)
    (record,) = decode_records(batch, 1024)
    assert record.key == bytes.fromhex("0000 0001")
    assert record.value == bytes.fromhex("0000 00000005")


def test_data_and_other_control_batches_are_no_end_markers() -> None:
    data = encode_batch([Record(0, 0, b"k", b"v")], attributes=TRANSACTIONAL, producer_id=1, producer_epoch=0)
    other = encode_batch(
        [Record(0, 0, b"\0\0\x03\xe8", b"x" * 10_000)],
        attributes=TRANSACTIONAL | CONTROL,
        producer_id=1,
        producer_epoch=0,
    )
    small = encode_batch(
        [Record(0, 0, b"\0\0\0\2", b"")], attributes=TRANSACTIONAL | CONTROL, producer_id=1, producer_epoch=0
    )
    assert parse_end_marker(data) is parse_end_marker(other) is parse_end_marker(small) is None


@pytest.mark.parametrize(
    ("key", "value"), [(b"\0", b"\0" * 6), (b"\0\0\0\1", b"\0"), (None, b""), (b"\0\0\0\0", None)]
)
def test_what_is_no_whole_end_marker_is_none(key: bytes | None, value: bytes | None) -> None:
    batch = encode_batch(
        [Record(0, 0, key, value)], attributes=TRANSACTIONAL | CONTROL, producer_id=1, producer_epoch=0
    )
    assert parse_end_marker(batch) is None
    assert parse_end_marker(pack_batch(read_header(batch), b"torn")) is None


@pytest.mark.parametrize("count", [1, 3, 200])
def test_entries_are_records_of_one_moment(count: int) -> None:
    entries = [(b"key %d" % place, None if place % 3 == 1 else bytes(place)) for place in range(count)]
    producer: dict[str, Any] = {"attributes": TRANSACTIONAL, "producer_id": 7, "producer_epoch": 2}
    records = [Record(place, NOW_MS, key, value) for place, (key, value) in enumerate(entries)]
    assert encode_coordinator_batch(entries, NOW_MS) == encode_batch(records)
    assert encode_coordinator_batch(entries, NOW_MS, **producer) == encode_batch(records, **producer)


@pytest.mark.parametrize(
    ("batches", "whole", "is_last_doubtful"),
    [
        ([(3, 7), (8, 9), (10, 10)], 3, False),  # the first contains the offset
        ([(6, 7), (12, 13)], 2, False),  # compaction leaves gaps
        ([(4, 7), (6, 9)], 1, False),  # the second leads back
        ([(4, 7), (16, 17), (10, 10)], 2, True),  # the second leads ahead
        ([(9, 10), (5, 6)], 1, True),
        ([(0, 2)], 0, False),  # it ends before the offset
    ],
)
def test_base_offsets_that_contradict_each_other(
    batches: list[tuple[int, int]], whole: int, is_last_doubtful: bool
) -> None:
    offsets = BatchOffsets(4)
    followed = list(itertools.takewhile(lambda batch: offsets.follow(*batch), batches))
    assert (len(followed), offsets.is_last_doubtful) == (whole, is_last_doubtful)
