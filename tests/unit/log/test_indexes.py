"""Index files: Kafka's bytes, and how invalid ones are recognised."""

import struct

import pytest
from tests.unit.log.helpers import NOW_MS, append, batch_of, flush, open_log

from penstock.log.config import LogConfig
from penstock.log.indexes import CorruptIndex, OffsetIndex, TimeIndex


def test_the_offset_index_is_in_kafkas_format():
    index = OffsetIndex()
    index.append(7, 4100)
    index.append(19, 9000)
    assert index.encode() == struct.pack(">iiii", 7, 4100, 19, 9000)
    loaded = OffsetIndex.decode(index.encode(), log_bytes=10_000)
    assert [loaded.position_at_or_below(o) for o in (0, 6, 7, 18, 19, 99)] == [0, 0, 4100, 4100, 9000, 9000]
    assert [loaded.boundary_at_or_below(p) for p in (0, 4099, 4100, 8999, 9000)] == [0, 0, 4100, 4100, 9000]


def test_the_time_index_is_in_kafkas_format():
    index = TimeIndex()
    for timestamp, offset in [(100, 7), (90, 8), (100, 9), (130, 12)]:
        index.append(timestamp, offset)
    assert index.encode() == struct.pack(">qiqi", 100, 7, 130, 12)
    loaded = TimeIndex.decode(index.encode())
    assert [loaded.offset_before(t) for t in (0, 99, 100, 129, 130, 500)] == [0, 0, 7, 7, 12, 12]


@pytest.mark.parametrize(
    "data",
    [
        b"123",
        struct.pack(">iiii", 7, 10, 7, 20),
        struct.pack(">iiii", 7, 20, 8, 20),
        struct.pack(">ii", 7, 1000),
        struct.pack(">ii", -1, 10),
        bytes(16),
    ],
)
def test_an_offset_index_that_cannot_be_is_refused(data):
    with pytest.raises(CorruptIndex):
        OffsetIndex.decode(data, log_bytes=1000)


@pytest.mark.parametrize(
    "data",
    [b"123", struct.pack(">qiqi", 9, 1, 9, 2), struct.pack(">qiqi", 9, 5, 10, 4), struct.pack(">qi", 5, -1)],
)
def test_a_time_index_that_cannot_be_is_refused(data):
    with pytest.raises(CorruptIndex):
        TimeIndex.decode(data)


def test_truncation_forgets_what_is_beyond():
    offsets, times = OffsetIndex(), TimeIndex()
    for number in range(5):
        offsets.append(number * 10, number * 100)
        times.append(number * 1000, number * 10)
    offsets.truncate(300)
    times.truncate(30)
    assert (list(offsets.offsets), list(offsets.positions)) == ([0, 10, 20], [0, 100, 200])
    assert (len(times), times.last_timestamp) == (3, 2000)


def test_entries_are_made_as_kafka_makes_them(tmp_path):
    """One each time more than the interval has been written since the last; of the batch that comes then."""
    size = len(batch_of(bytes(100)))
    log = open_log(tmp_path / "t-0", LogConfig(index_interval_bytes=size * 2, segment_bytes=size * 9))
    for number in range(10):
        append(log, bytes(100), timestamp=NOW_MS + number)
    flush(log)
    index = (tmp_path / "t-0" / "00000000000000000000.index").read_bytes()
    times = (tmp_path / "t-0" / "00000000000000000000.timeindex").read_bytes()
    assert list(struct.iter_unpack(">ii", index)) == [(n, n * size) for n in (3, 6)]
    assert list(struct.iter_unpack(">qi", times)) == [(NOW_MS + n, n) for n in (3, 6, 8)]


def test_the_time_index_of_a_closed_segment_ends_with_its_largest_timestamp(tmp_path):
    log = open_log(tmp_path / "t-0")
    for timestamp in (5, 9, 7):
        append(log, b"x", timestamp=timestamp)
    log.close()
    assert (tmp_path / "t-0" / "00000000000000000000.timeindex").read_bytes() == struct.pack(">qi", 9, 1)
