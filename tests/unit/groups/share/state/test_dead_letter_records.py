"""Dead letters are built from the bytes of their records, and decode to the same contents."""

import struct
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.groups.share.state.dead_letters import (
    OFFSET_HEADER,
    REASON_HEADER,
    RECORD_GONE,
    TIMESTAMP_HEADER,
    WITHOUT_RECORD_HEADER,
    DeadLetterBatch,
    SourceRecord,
    SourceScan,
    UnreadableSourceRecord,
    offsets_with_cause,
)
from penstock.groups.share.state.share_state import (
    DEAD_LETTER_STATES,
    SharePartitionKey,
    StateRange,
    normalize,
)
from penstock.protocol.compression import Codec
from penstock.protocol.record_batch import (
    LOG_APPEND_TIME,
    Record,
    decode_records,
    encode_batch,
    iter_batches,
    pack_batch,
    read_header,
)

KEY = SharePartitionKey("group", UUID(int=7), 3)
_NO_LIMIT = 1 << 30
_bytes = st.none() | st.binary(max_size=200)
_record = st.tuples(
    st.integers(1, 3),
    st.integers(-100, 1 << 40),
    _bytes,
    _bytes,
    st.lists(st.tuples(st.text(max_size=4), _bytes)),
)
_batches = st.lists(
    st.tuples(st.lists(_record, min_size=1, max_size=12), st.sampled_from(Codec), st.booleans()), max_size=4
)
_wanted = st.lists(
    st.tuples(
        st.integers(0, 90), st.integers(0, 5), st.sampled_from(DEAD_LETTER_STATES), st.integers(1, 9)
    ).map(lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2], drawn[3])),
    min_size=1,
    max_size=15,
)


def some_log(batches: list[tuple[list[tuple], Codec, bool]]) -> tuple[bytes, list[Record]]:  # type: ignore[type-arg]
    """Its bytes, and its records as every reader sees them."""
    data, records, offset = b"", [], -1
    for drawn, codec, is_append_time in batches:
        made = []
        for gap, timestamp, key, value, headers in drawn:
            offset += gap
            made.append(Record(offset, timestamp, key, value, tuple(headers)))
        attributes = LOG_APPEND_TIME if is_append_time else 0
        batch = encode_batch(made, codec=codec, attributes=attributes)
        data += batch
        records += decode_records(batch, _NO_LIMIT)
    return data, records


def letters(*, copies_record: bool = True, bytes_max: int = _NO_LIMIT) -> DeadLetterBatch:
    return DeadLetterBatch(KEY, "jobs", now_ms=77, copies_record=copies_record, bytes_max=bytes_max)


@given(_batches, _wanted, st.booleans(), st.integers(1, 2000))
def test_what_is_wanted_and_there_is_copied(
    batches: list,
    wanted: list[StateRange],
    copies_record: bool,
    bytes_max: int,  # type: ignore[type-arg]
) -> None:
    data, records = some_log(batches)
    ranges = normalize(wanted)
    made, scan = (
        letters(copies_record=copies_record, bytes_max=bytes_max),
        SourceScan(data, ranges, _NO_LIMIT),
    )
    stopped_at = made.fill(scan)
    fate_of = dict(offsets_with_cause(ranges, [one[:2] for one in ranges]))
    expected = [
        record
        for record in records
        if record.offset in fate_of and (stopped_at is None or record.offset < stopped_at)
    ]
    if stopped_at is None and records:
        assert scan.seen_upto > min(records[-1].offset, ranges[-1][1])
    assert made.count == len(expected)
    assert [offset for first, last in made.offsets for offset in range(first, last + 1)] == [
        record.offset for record in expected
    ]
    if not expected:
        return
    batch = made.batch(producer_id=5, epoch=1, sequence=40)
    told = decode_records(batch, _NO_LIMIT)
    assert [letter.offset for letter in told] == list(range(len(expected)))
    for letter, record in zip(told, expected, strict=True):
        if copies_record:
            assert (letter.key, letter.value) == (record.key, record.value)
            assert letter.headers[:-8] == record.headers
        else:
            assert (letter.key, letter.value, len(letter.headers)) == (None, None, 8)
        headers = dict(letter.headers[-8:])
        assert headers[OFFSET_HEADER] == b"%d" % record.offset
        assert headers[TIMESTAMP_HEADER] == b"%d" % record.timestamp
        assert letter.timestamp == 77


def test_a_record_that_is_gone_leaves_a_letter_without_it() -> None:
    made = letters()
    made.add_without(4, (DEAD_LETTER_STATES[1], 2), "gone")
    made.add_without(5, (DEAD_LETTER_STATES[1], 2), "gone", b"named")
    first, second = decode_records(made.batch(producer_id=5, epoch=1, sequence=0), _NO_LIMIT)
    assert (first.key, second.key, first.value) == (None, b"named", None)
    assert (dict(first.headers)[REASON_HEADER], dict(first.headers)[WITHOUT_RECORD_HEADER]) == (
        b"rejected",
        b"gone",
    )
    assert made.offsets == [(4, 5)]


def broken(records: int, body: bytes) -> bytearray:
    """A batch that says that it holds so many, with a right checksum."""
    sound = encode_batch([Record(place, 0, b"k", b"v") for place in range(records)])
    return pack_batch(read_header(sound), body)


@given(_batches, st.integers(1, 9), st.binary(max_size=60), _batches)
def test_unreadable_records_are_reported_and_skipped(
    before: list,  # type: ignore[type-arg]
    records: int,
    body: bytes,
    behind: list,  # type: ignore[type-arg]
) -> None:
    data, readable = some_log(before)
    begin = readable[-1].offset + 1 if readable else 0
    end = begin + records
    middle = broken(records, body)
    struct.pack_into(">q", middle, 0, begin)
    later, more = some_log(behind)
    moved = bytearray(later)
    position = 0
    for header, batch in iter_batches(later):
        struct.pack_into(">q", moved, position, header.base_offset + end)
        position += len(batch)
    scan = SourceScan(data + middle + moved, [(0, 10_000, DEAD_LETTER_STATES[0], 1)], _NO_LIMIT)
    found = list(scan)
    assert [one.offset for one in found] == [
        *(record.offset for record in readable),
        *range(begin, end),
        *(record.offset + end for record in more),
    ]
    assert all(isinstance(one, SourceRecord) for one in found if not begin <= one.offset < end)
    made = letters()
    assert made.fill(found) is None
    if found:
        told = decode_records(made.batch(producer_id=5, epoch=1, sequence=0), _NO_LIMIT)
        assert len(told) == len(found)


@pytest.mark.parametrize(
    "damage",
    [
        b"\x09",  # a key that ends beyond the record
        b"\x05",  # of length -3
    ],
)
def test_a_record_that_is_not_whole_is_not_copied(damage: bytes) -> None:
    sound = encode_batch([Record(0, 0, b"k", b"v"), Record(1, 0, b"k", b"v")])
    body = bytearray(sound[61:])
    body[4:5] = damage
    first, second = SourceScan(
        pack_batch(read_header(sound), body), [(0, 1, DEAD_LETTER_STATES[0], 1)], _NO_LIMIT
    )
    assert (type(first), type(second)) == (UnreadableSourceRecord, SourceRecord)


def test_a_scan_ends_before_a_batch_that_is_damaged() -> None:
    data, _ = some_log([([(1, 0, b"k", b"v", [])], Codec.NONE, False)] * 2)
    damaged = bytearray(data)
    damaged[-1] ^= 1
    scan = SourceScan(damaged, [(0, 1, DEAD_LETTER_STATES[0], 1)], _NO_LIMIT)
    assert [one.offset for one in scan] == [0]
    assert scan.seen_upto == 1


@given(_batches, _wanted, st.sets(st.integers(0, 90)), st.sampled_from(Codec))
def test_a_repeat_has_as_many_as_were_planned(
    batches: list,  # type: ignore[type-arg]
    wanted: list[StateRange],
    gone: set[int],
    codec: Codec,
) -> None:
    data, records = some_log(batches)
    ranges = normalize(wanted)
    planned = letters()
    planned.fill(SourceScan(data, ranges, _NO_LIMIT))
    repeated, owed = letters(), offsets_with_cause(ranges, planned.offsets)
    repeated.repeat(owed, [one for one in SourceScan(data, ranges, _NO_LIMIT) if one.offset not in gone])
    for offset, cause in owed:
        repeated.add_without(offset, cause, RECORD_GONE)
    assert (repeated.count, repeated.offsets) == (planned.count, planned.offsets)
    if not planned.count:
        return
    value_of = {record.offset: record.value for record in records if record.offset not in gone}
    batch = repeated.batch(producer_id=5, epoch=1, sequence=0, codec=codec)
    for letter in decode_records(batch, _NO_LIMIT):
        headers = dict(letter.headers[-8:])
        offset = int(headers[OFFSET_HEADER] or b"")
        assert letter.value == value_of.get(offset)
        assert (headers.get(WITHOUT_RECORD_HEADER) == RECORD_GONE.encode()) == (offset in gone)
