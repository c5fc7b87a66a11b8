"""Ranges are divided into numbered pieces, which are written at a limited rate."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.client.deadletters.replay import RateLimiter
from penstock.spark.offsets import OffsetRange
from penstock.spark.replay.job import PIECE_OFFSETS_DEFAULT, ReplayJobPlan, piece_offsets
from penstock.spark.replay.request import parse_request

SIZES = st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 500)), max_size=5)


def ranges_of(sizes):
    return [
        OffsetRange("t", None, partition, start, start + size)
        for partition, (start, size) in enumerate(sizes)
    ]


def pieces_of(ranges, offsets_max):
    plan = ReplayJobPlan(ranges=tuple(ranges), offsets_max=offsets_max)
    return [plan.piece(index) for index in range(plan.pieces)]


@given(sizes=SIZES, offsets_max=st.integers(1, 300))
def test_pieces_contain_each_offset_once_and_in_order(sizes, offsets_max):
    ranges = ranges_of(sizes)
    pieces = pieces_of(ranges, offsets_max)
    for whole in ranges:
        parts = [part for piece in pieces for part in piece if part.partition == whole.partition]
        assert sum(part.size for part in parts) == whole.size
        if parts:
            assert (parts[0].start, parts[-1].end) == (whole.start, whole.end)
        assert all(before.end == after.start for before, after in pairwise(parts))
    assert all(sum(part.size for part in piece) <= offsets_max + len(ranges) for piece in pieces)


@given(sizes=SIZES, offsets_max=st.integers(1, 300))
def test_a_plan_that_is_read_again_has_the_same_pieces(sizes, offsets_max):
    plan = ReplayJobPlan(ranges=tuple(ranges_of(sizes)), offsets_max=offsets_max)
    again = ReplayJobPlan.from_json(plan.to_json(parse_request(topic="t", to="u")))
    assert again == plan
    assert [again.piece(index) for index in reversed(range(again.pieces))] == pieces_of(
        plan.ranges, offsets_max
    )[::-1]


def test_pieces_have_the_same_size_with_many_partitions():
    ranges = ranges_of([(0, 10)] * 100)
    assert {sum(part.size for part in piece) for piece in pieces_of(ranges, 250)} == {250}


def test_a_slow_replay_has_small_pieces():
    assert [piece_offsets(rate) for rate in (None, 0.1, 100, 10**9)] == [
        PIECE_OFFSETS_DEFAULT,
        1,
        200,
        PIECE_OFFSETS_DEFAULT,
    ]


# The rate


@given(
    rate=st.floats(0.5, 1e5),
    burst=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.integers(0, 1500), st.floats(0, 2)), max_size=30),
)
def test_no_period_exceeds_the_rate(rate, burst, steps):
    """Holds however long the steps take, and if they contain fewer records than expected."""
    now, largest, went = 1e6, burst, []
    limiter = RateLimiter(rate, burst=burst, now_s=now)
    for records, took in steps:
        now += limiter.wait_s(records, now)
        assert limiter.wait_s(records, now) == 0, "the announced wait was too short"
        went.append((now, records))
        largest = max(largest, records)
        now += took
        limiter.spend(records, now)
    for first in range(len(went)):
        for last in range(first, len(went)):
            passed = went[last][0] - went[first][0]
            sent = sum(records for _, records in went[first:last])
            assert sent <= passed * rate + burst + largest + 0.5


def test_only_the_first_burst_does_not_wait():
    limiter, now, started = RateLimiter(10, burst=20, now_s=0), 0.0, []
    for _ in range(4):
        now += limiter.wait_s(20, now)
        started.append(now)
        limiter.spend(20, now)
    assert started == [0, 2, 4, 6]


def test_a_step_with_few_records_causes_a_short_wait():
    limiter = RateLimiter(10, burst=20, now_s=0)
    limiter.spend(1, 0)
    assert limiter.wait_s(20, 0) == 0.1


def test_a_clock_that_is_set_back_does_not_change_the_rate():
    limiter = RateLimiter(10, burst=20, now_s=1000)
    limiter.spend(20, 500)
    assert limiter.wait_s(20, 500) == 2
