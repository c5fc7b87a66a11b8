"""Dead letters are made of the bytes of their records: decoded, they say the same as the records did."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.groups.share_state.copies import Scan
from penstock.groups.share_state.letters import OFFSET, REASON, TIMESTAMP, WITHOUT_RECORD, Letters, fates
from penstock.groups.share_state.ranges import Range, tidy
from penstock.groups.share_state.values import BURIED, Key
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import LOG_APPEND_TIME, Record, decode_records, encode_batch

KEY = Key("group", UUID(int=7), 3)
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
    st.tuples(st.integers(0, 90), st.integers(0, 5), st.sampled_from(BURIED), st.integers(1, 9)).map(
        lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2], drawn[3])
    ),
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


def letters(*, copies_record: bool = True, bytes_max: int = _NO_LIMIT) -> Letters:
    return Letters(KEY, "jobs", now_ms=77, copies_record=copies_record, bytes_max=bytes_max)


@given(_batches, _wanted, st.booleans(), st.integers(1, 2000))
def test_what_is_wanted_and_there_is_copied(
    batches: list,
    wanted: list[Range],
    copies_record: bool,
    bytes_max: int,  # type: ignore[type-arg]
) -> None:
    data, records = some_log(batches)
    ranges = tidy(wanted)
    made, scan = letters(copies_record=copies_record, bytes_max=bytes_max), Scan(data, ranges, _NO_LIMIT)
    stopped_at = made.fill(scan)
    fate_of = dict(fates(ranges, [one[:2] for one in ranges]))
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
        assert headers[OFFSET] == b"%d" % record.offset
        assert headers[TIMESTAMP] == b"%d" % record.timestamp
        assert letter.timestamp == 77


def test_a_record_that_is_gone_leaves_a_letter_without_it() -> None:
    made = letters()
    made.add_without(4, (BURIED[1], 2), "gone")
    made.add_without(5, (BURIED[1], 2), "gone", b"named")
    first, second = decode_records(made.batch(producer_id=5, epoch=1, sequence=0), _NO_LIMIT)
    assert (first.key, second.key, first.value) == (None, b"named", None)
    assert (dict(first.headers)[REASON], dict(first.headers)[WITHOUT_RECORD]) == (b"rejected", b"gone")
    assert made.offsets == [(4, 5)]


def test_a_damaged_batch_is_told() -> None:
    batch = encode_batch([Record(0, 0, b"k", b"v")])
    batch[61] = 0x7E  # the length of the record
    with pytest.raises(ApiError) as raised:
        list(Scan(batch, [(0, 0, BURIED[0], 1)], _NO_LIMIT))
    assert raised.value.code is ErrorCode.corrupt_message
