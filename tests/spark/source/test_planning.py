"""Limits and splits: no offset twice, none left out, and no partition starves."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.offsets import OffsetRange, is_batch_due, limit_offsets, split_ranges, unread_offsets

sizes = st.integers(0, 50) | st.integers(0, 1 << 40)
backlogs = st.lists(st.tuples(st.integers(0, 1 << 40), sizes), min_size=1, max_size=12)


def partitions(backlog: list[tuple[int, int]]) -> tuple[dict, dict]:
    begins = {("t", index): begin for index, (begin, _) in enumerate(backlog)}
    return begins, {("t", index): begin + size for index, (begin, size) in enumerate(backlog)}


@given(backlogs, st.integers(1, 1 << 41))
def test_a_batch_reaches_but_does_not_exceed_its_limit(backlog, offsets_max):
    begins, available = partitions(backlog)
    ends = limit_offsets(begins, available, offsets_max)
    assert ends.keys() == available.keys()
    assert all(begins[tp] <= ends[tp] <= available[tp] for tp in ends)
    waits = sum(unread_offsets(begins, available).values())
    assert sum(ends[tp] - begins[tp] for tp in ends) == min(waits, offsets_max)


@given(backlogs, st.integers(1, 1 << 41))
def test_shares_are_in_proportion_to_the_backlog(backlog, offsets_max):
    begins, available = partitions(backlog)
    ends = limit_offsets(begins, available, offsets_max)
    total = sum(size for _, size in backlog)
    for index, (begin, size) in enumerate(backlog):
        share = ends["t", index] - begin
        assert abs(share * total - size * min(offsets_max, total)) <= total


def test_a_small_backlog_gets_a_share_beside_a_large_one():
    begins, available = partitions([(0, 1_000_000), (0, 3)])
    ends = limit_offsets(begins, available, 100)
    assert ends == {("t", 0): 99, ("t", 1): 1}


def test_a_truncated_log_takes_nothing_from_the_others():
    begins, available = {("t", 0): 10, ("t", 1): 0}, {("t", 0): 4, ("t", 1): 100}
    assert limit_offsets(begins, available, 50) == {("t", 0): 4, ("t", 1): 50}


def test_a_batch_waits_for_enough_offsets_or_for_the_delay():
    assert is_batch_due(1, None, 0, 1000)
    assert not is_batch_due(9, 10, 999, 1000)
    assert is_batch_due(10, 10, 0, 1000)
    assert is_batch_due(1, 10, 1000, 1000)


@st.composite
def range_lists(draw):
    backlog = draw(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 300)), max_size=6))
    return [OffsetRange("t", None, index, begin, begin + size) for index, (begin, size) in enumerate(backlog)]


bounds = st.none() | st.integers(1, 400)


@given(range_lists(), bounds, bounds)
def test_tasks_read_every_offset_once(ranges, partitions_min, records_max):
    tasks = split_ranges(ranges, partitions_min=partitions_min, records_max=records_max)
    assert all(task.size > 0 for task in tasks)
    read = [(task.partition, offset) for task in tasks for offset in range(task.start, task.end)]
    assert read == [(each.partition, offset) for each in ranges for offset in range(each.start, each.end)]


@given(range_lists(), bounds, bounds)
def test_there_are_as_many_tasks_as_requested(ranges, partitions_min, records_max):
    tasks = split_ranges(ranges, partitions_min=partitions_min, records_max=records_max)
    total = sum(each.size for each in ranges)
    if records_max is not None:
        assert all(task.size <= records_max for task in tasks)
    if partitions_min is not None:
        assert len(tasks) >= min(partitions_min, total)
    if partitions_min is None and records_max is None:
        assert tasks == [each for each in ranges if each.size]


def test_large_partitions_get_more_tasks_than_small_ones():
    ranges = [OffsetRange("t", None, 0, 0, 900), OffsetRange("t", None, 1, 0, 100)]
    tasks = split_ranges(ranges, partitions_min=10)
    assert [task.partition for task in tasks] == [0] * 9 + [1]
    assert {task.size for task in tasks} == {100}
