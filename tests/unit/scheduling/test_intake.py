"""A batch is split into records that are delivered at once and records that are held."""

import pytest

from penstock.protocol.compression import Codec
from penstock.protocol.errors import InvalidRecords
from penstock.protocol.record_batch import (
    CONTROL,
    TRANSACTIONAL,
    Record,
    checksum,
    decode_records,
    encode_batch,
    open_batch,
    read_header,
)
from penstock.scheduling.intake import (
    DELIVER_AFTER,
    DELIVER_AT,
    ScheduleLimits,
    SplitBatch,
    is_held_batch,
    read_held_batch,
    split_batch,
    stamp_append_time,
)
from penstock.scheduling.release_batch import encode_release_batch

NOW_MS = 1_000_000
LIMITS = ScheduleLimits(now_ms=NOW_MS, delay_ms_max=100_000, record_bytes_max=10_000)
MAX_BYTES = 1 << 20
AT, AFTER = DELIVER_AT.decode(), DELIVER_AFTER.decode()


def parted(batch: bytearray, limits: ScheduleLimits = LIMITS) -> SplitBatch | None:
    return split_batch(*open_batch(batch, MAX_BYTES), limits)


def mixed(codec: Codec = Codec.NONE, **fields: int) -> bytearray:
    return encode_batch(
        [
            Record(0, 10, b"a", b"now"),
            Record(1, 20, b"b", b"later", (("x", b"1"), (AT, b"1050000"), ("y", None))),
            Record(2, 30, None, None, ((AFTER, b"500"),)),
            Record(3, 5, b"d", b"now too", (("penstock-deliver-elsewhere", b"!"),)),
        ],
        codec=codec,
        producer_id=fields.get("producer_id", 7),
        producer_epoch=1,
        base_sequence=fields.get("sequence", 40),
        attributes=fields.get("attributes", 0),
    )


@pytest.mark.parametrize("codec", Codec)
def test_the_rest_keeps_its_offsets_and_its_producer(codec: Codec) -> None:
    found = parted(mixed(codec))
    assert found is not None
    header = read_header(found.rest)
    assert header.crc == checksum(found.rest)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 1, 40)
    assert (header.last_offset_delta, header.record_count, header.max_timestamp) == (3, 2, 10)
    assert header.codec is codec
    assert [(r.offset, r.timestamp, r.key, r.value) for r in decode_records(found.rest, MAX_BYTES)] == [
        (0, 10, b"a", b"now"),
        (3, 5, b"d", b"now too"),
    ]


@pytest.mark.parametrize("codec", Codec)
def test_what_is_held_goes_out_as_it_came_in(codec: Codec) -> None:
    found = parted(mixed(codec))
    assert found is not None
    stamp_append_time(found.control, NOW_MS + 3)
    held = read_held_batch(found.control, MAX_BYTES)
    assert held.block.times == (1_050_000, NOW_MS + 503)  # `after` counts from the append
    starts = held.block.starts()
    records = [held.block.record(index, starts[index]) for index in range(held.block.record_count)]
    released = encode_release_batch(records, producer_id=9, epoch=0, sequence=5, now_ms=77)
    header = read_header(released)
    assert header.crc == checksum(released)
    assert (header.producer_id, header.base_sequence, header.last_offset_delta) == (9, 5, 1)
    assert decode_records(released, MAX_BYTES) == [
        Record(0, 77, b"b", b"later", (("x", b"1"), ("y", None), ("penstock-scheduled-for", b"1050000"))),
        Record(1, 77, None, None, (("penstock-scheduled-for", b"1000503"),)),
    ]


def test_what_is_held_is_a_control_batch_that_counts_only_before_its_rest() -> None:
    found, other = parted(mixed()), parted(mixed(sequence=44))
    assert found is not None
    assert other is not None
    control, rest = read_header(found.control), read_header(found.rest)
    assert control.attributes & CONTROL
    assert not control.attributes & TRANSACTIONAL
    assert is_held_batch(control, found.control)
    assert not is_held_batch(rest, found.rest)
    held = read_held_batch(found.control, MAX_BYTES)
    follows = rest._replace(base_offset=control.base_offset + 1)
    assert held.belongs_to(control, follows)
    assert not held.belongs_to(control, follows._replace(base_offset=follows.base_offset + 1))
    assert not held.belongs_to(control, follows._replace(leader_epoch=8))
    assert not held.belongs_to(control, read_header(other.rest)._replace(base_offset=1))
    assert not held.belongs_to(control, read_header(mixed())._replace(base_offset=1)), "nothing was taken out"


@pytest.mark.parametrize("codec", Codec)
def test_a_batch_that_is_held_whole_leaves_an_empty_one(codec: Codec) -> None:
    found = parted(encode_batch([Record(0, 10, None, b"v", ((AFTER, b"PT1M"),))], codec=codec))
    assert found is not None
    header = read_header(found.rest)
    assert (header.record_count, header.last_offset_delta, header.max_timestamp) == (0, 0, 10)
    assert header.codec is Codec.NONE
    assert decode_records(found.rest, MAX_BYTES) == []


def test_a_batch_without_schedule_is_left_alone() -> None:
    assert (
        parted(encode_batch([Record(0, 10, b"penstock-deliver-at", b"penstock-deliver-at", (("a", b"b"),))]))
        is None
    )


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        (((AT, b"soon"),), "record 1 .*penstock-deliver-at 'soon'"),
        (((AFTER, None),), "record 1 .*penstock-deliver-after null"),
        (((AT, b"5"), (AFTER, b"5")), "record 1 .*more than one header"),
        (((AT, b"1100001"),), "record 1 .*due in 100001 ms, penstock.schedule.delay.max.ms is 100000"),
        (((AFTER, b"999999999999999999"),), "record 1 .*penstock.schedule.delay.max.ms"),
        (((AFTER, b"5"), ("x", b"x" * 10_000)), "record 1 .*has to fit max.message.bytes=10000"),
    ],
)
def test_what_cannot_be_scheduled_is_named(
    headers: tuple[tuple[str, bytes | None], ...], reason: str
) -> None:
    batch = encode_batch([Record(0, 1, None, b"good", ((AFTER, b"1"),)), Record(1, 1, None, b"bad", headers)])
    with pytest.raises(InvalidRecords, match=reason) as refused:
        parted(batch)
    assert refused.value.indexes == (1,)
