"""Bisection finds every record that fails alone, in few tries, and no other."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.deadletters.headers import Failure
from penstock.spark.pipelines.batch import (
    NotReproducible,
    RecordRange,
    TooManyPoisonRecords,
    find_poison_records,
    halves,
)

WHOLE = Failure(error_class="E", message="together")


class Trial:
    def __init__(self, poison):
        self.poison, self.count = set(poison), 0

    def __call__(self, record_ranges):
        self.count += 1
        found = [p for p in sorted(self.poison) for each in record_ranges if _holds(each, p)]
        return Failure(error_class="E", message=str(found[0])) if found else None


def _holds(record_range, tp):
    return record_range[:2] == tp[:2] and record_range.start <= tp[2] < record_range.end


def found(record_ranges, trial, found_max=100):
    isolated = find_poison_records(record_ranges, WHOLE, trial, found_max=found_max)
    return {(*each.record_range[:2], each.record_range.start): each.failure.message for each in isolated}


@pytest.mark.parametrize("offset", [0, 4_999, 5_000, 9_999, 1234])
def test_one_among_ten_thousand(offset):
    trial = Trial([("t", 0, offset)])
    assert found([RecordRange("t", 0, 0, 10_000)], trial) == {("t", 0, offset): str(("t", 0, offset))}
    assert trial.count <= 2 * math.ceil(math.log2(10_000)) + 1


_stretches = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 30)),
    min_size=1,
    max_size=4,
    unique_by=lambda s: s[0],
).map(lambda each: [RecordRange("t", part, start, start + size) for part, start, size in each])


@given(_stretches, st.data())
def test_all_that_fail_alone_and_no_others(record_ranges, data):
    partitions = [
        ("t", each.partition, offset) for each in record_ranges for offset in range(each.start, each.end)
    ]
    poison = data.draw(st.sets(st.sampled_from(partitions), min_size=1, max_size=5))
    assert found(record_ranges, Trial(poison)).keys() == poison


@given(_stretches)
def test_halves_are_complete(record_ranges):
    if sum(each.size for each in record_ranges) == 1:
        return
    left, right = halves(record_ranges)
    sizes = [sum(each.size for each in half) for half in (left, right)]
    assert sum(sizes) == sum(each.size for each in record_ranges)
    assert min(sizes) >= 1
    assert abs(sizes[0] - sizes[1]) <= 1


def test_too_many_and_not_reproducible():
    with pytest.raises(TooManyPoisonRecords):
        found([RecordRange("t", 0, 0, 64)], Trial([("t", 0, n) for n in range(64)]), found_max=10)
    with pytest.raises(NotReproducible):
        found([RecordRange("t", 0, 0, 64)], lambda record_ranges: None)
