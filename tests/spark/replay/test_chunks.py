"""Offset ranges are cut into numbered chunks, and sent at the given rate."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.client.deadletters.replay import RateLimiter
from penstock.spark.offsets import OffsetRange
from penstock.spark.replay.job import (
    PIECE_OFFSETS_DEFAULT,
    count_pieces,
    cut_piece,
    cut_pieces,
    piece_offsets,
)

SIZES = st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 500)), max_size=5)


def ranges_of(sizes):
    return [
        OffsetRange("t", None, partition, start, start + size)
        for partition, (start, size) in enumerate(sizes)
    ]


@given(sizes=SIZES, offsets_max=st.integers(1, 300))
def test_each_offset_once_and_in_order(sizes, offsets_max):
    ranges = ranges_of(sizes)
    pieces = list(cut_pieces(ranges, offsets_max))
    for whole in ranges:
        parts = [part for piece in pieces for part in piece if part.partition == whole.partition]
        assert sum(part.size for part in parts) == whole.size
        if parts:
            assert (parts[0].start, parts[-1].end) == (whole.start, whole.end)
        assert all(before.end == after.start for before, after in pairwise(parts))
    assert all(sum(part.size for part in piece) <= offsets_max + len(ranges) for piece in pieces)


@given(sizes=SIZES, offsets_max=st.integers(1, 300))
def test_a_chunk_is_the_same_for_every_caller(sizes, offsets_max):
    ranges = ranges_of(sizes)
    pieces = list(cut_pieces(ranges, offsets_max))
    assert len(pieces) == count_pieces(ranges, offsets_max)
    assert [cut_piece(ranges, offsets_max, index) for index in range(len(pieces))] == pieces
    assert list(cut_pieces(ranges, offsets_max, len(pieces) // 2)) == pieces[len(pieces) // 2 :]


def test_pieces_are_alike_however_many_partitions_there_are():
    ranges = ranges_of([(0, 10)] * 100)
    assert {sum(part.size for part in piece) for piece in cut_pieces(ranges, 250)} == {250}


def test_a_slow_replay_has_small_pieces():
    assert [piece_offsets(rate) for rate in (None, 0.1, 100, 10**9)] == [
        PIECE_OFFSETS_DEFAULT,
        1,
        200,
        PIECE_OFFSETS_DEFAULT,
    ]


# The pace


@given(
    rate=st.floats(0.5, 1e5),
    burst=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.integers(0, 1500), st.floats(0, 2)), max_size=30),
)
def test_no_stretch_of_time_has_more_than_its_share(rate, burst, steps):
    """However long the steps take, and whether they are as large as they were thought to be."""
    now, largest, went = 1e6, burst, []
    pace = RateLimiter(rate, burst=burst, now_s=now)
    for records, took in steps:
        now += pace.wait_s(records, now)
        assert pace.wait_s(records, now) == 0, "waiting as long as was said is enough"
        went.append((now, records))
        largest = max(largest, records)
        now += took
        pace.spend(records, now)
    for first in range(len(went)):
        for last in range(first, len(went)):
            passed = went[last][0] - went[first][0]
            sent = sum(records for _, records in went[first:last])
            assert sent <= passed * rate + burst + largest + 0.5


def test_the_first_burst_is_free_and_the_rest_takes_its_time():
    pace, now, started = RateLimiter(10, burst=20, now_s=0), 0.0, []
    for _ in range(4):
        now += pace.wait_s(20, now)
        started.append(now)
        pace.spend(20, now)
    assert started == [0, 2, 4, 6]


def test_a_step_with_few_records_is_not_waited_for_as_if_it_had_many():
    pace = RateLimiter(10, burst=20, now_s=0)
    pace.spend(1, 0)
    assert pace.wait_s(20, 0) == 0.1


def test_a_clock_that_was_set_back_takes_nothing_away():
    pace = RateLimiter(10, burst=20, now_s=1000)
    pace.spend(20, 500)
    assert pace.wait_s(20, 500) == 2
