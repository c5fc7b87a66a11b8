"""Hot keys from a sample: every record has the same chance, and the reported error bound holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.hotkeys import (
    HotKey,
    KeyCounter,
    SampleWindow,
    display_key,
    salting_advice,
    sample_sizes,
    sample_windows,
)

Log = list[tuple[bytes | None, int]]

# Where to look


@given(
    st.integers(0, 10**12), st.integers(0, 10**6), st.integers(1, 10**6), st.randoms(use_true_random=False)
)
def test_windows_lie_apart_within_the_log_and_are_alike(
    start: int, count: int, sample: int, chance: Random
) -> None:
    found = sample_windows(start, start + count, sample, chance)
    assert all(start <= each.start < each.end <= start + count for each in found)
    assert all(before.end <= after.start for before, after in pairwise(found))
    assert len({each.end - each.start for each in found}) <= 1
    assert sum(each.end - each.start for each in found) <= max(sample, count if sample >= count else sample)
    assert len(found) <= 100


def test_a_small_log_is_looked_at_as_a_whole() -> None:
    assert sample_windows(5, 105, 100, Random(1)) == [SampleWindow(5, 105)]
    assert sample_windows(5, 5, 100, Random(1)) == []
    assert len(sample_windows(0, 10**9, 10_000, Random(1))) == 100
    assert len(sample_windows(0, 10**9, 5, Random(1))) == 1


def test_every_part_of_a_log_is_looked_at() -> None:
    found = sample_windows(0, 1_000_000, 2_000, Random(1))
    assert [each.start // 10_000 for each in found] == list(range(100))


@given(st.integers(1, 10**6), st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_every_partition_has_its_part_of_the_sample(sample: int, sizes: list[int]) -> None:
    found = sample_sizes(sample, sizes)
    assert all(part <= size for part, size in zip(found, sizes, strict=True))
    assert all(part >= min(size, 20) for part, size in zip(found, sizes, strict=True))
    assert sum(found) <= max(sample, 0) + 21 * len(sizes)
    assert sum(found) >= min(sample, sum(sizes))


# What is counted


def looked_at(log: Log, sample: int, seed: int) -> KeyCounter:
    found = sample_windows(0, len(log), sample, Random(seed))
    seen = sum(each.end - each.start for each in found)
    counted = KeyCounter(part=seen / len(log))
    for each in found:
        counted.add_window(log[each.start : each.end])
    return counted


def test_a_log_that_was_read_as_a_whole_is_counted_exactly() -> None:
    log: Log = [(b"hot", 10)] * 6 + [(b"big", 1000)] + [(b"warm", 10)] * 2 + [(None, 10)]
    counted = looked_at(log, 100, seed=1)
    assert (counted.records, counted.keyless) == (10, 1)
    big, hot, warm = counted.heaviest(5)
    assert hot == HotKey(
        key=b"hot",
        records=6,
        bytes=60,
        share=0.6,
        share_error=0,
        bytes_share=60 / 1090,
        bytes_share_error=0,
    )
    assert (big.key, big.records, big.bytes, big.share) == (b"big", 1, 1000, 0.1)
    assert warm.key == b"warm"
    assert [each.is_hot for each in (big, hot, warm)] == [True, True, False]
    assert [each.key for each in counted.heaviest(1)] == [b"big"]


@given(st.lists(st.tuples(st.one_of(st.none(), st.binary(max_size=1)), st.integers(0, 100)), max_size=200))
def test_counts_are_those_of_the_sample(log: Log) -> None:
    counted = KeyCounter(part=1)
    for at in range(0, len(log), 7):
        counted.add_window(log[at : at + 7])
    expected = Counter(key for key, _ in log if key is not None)
    assert {each.key: each.records for each in counted.heaviest(1000)} == dict(expected)
    assert counted.keyless == sum(key is None for key, _ in log)


def mixed(chance: Random) -> Log:
    """Any order."""
    return [(b"hot" if chance.random() < 0.3 else b"%d" % chance.randrange(1000), 100) for _ in range(50_000)]


def in_bursts(chance: Random) -> Log:
    """A producer sends many of one key at a time."""
    log: Log = []
    while len(log) < 50_000:
        key = b"hot" if chance.random() < 0.3 else b"%d" % chance.randrange(1000)
        log += [(key, 100)] * 200
    return log


def late(chance: Random) -> Log:
    """The key has become hot lately."""
    size = 50_000
    return [(b"hot" if chance.random() < 0.6 * at / size else b"other", 100 + at % 7) for at in range(size)]


def in_step(chance: Random) -> Log:
    """It comes as regularly as the windows do."""
    return [(b"hot" if at % 500 < 150 else b"other", 100) for at in range(50_000)]


def nearly_all(chance: Random) -> Log:
    return [(b"hot" if chance.random() < 0.995 else b"other", 100) for _ in range(50_000)]


def fat(chance: Random) -> Log:
    """Few records with most of the bytes."""
    return [(b"hot", 50_000) if chance.random() < 0.01 else (b"%d" % at, 100) for at in range(50_000)]


@pytest.mark.parametrize("of_kind", [mixed, in_bursts, late, in_step, nearly_all, fat])
def test_the_truth_is_within_the_error_that_is_told(of_kind: Callable[[Random], Log]) -> None:
    log = of_kind(Random(1))
    share = sum(key == b"hot" for key, _ in log) / len(log)
    bytes_share = sum(size for key, size in log if key == b"hot") / sum(size for _, size in log)
    right = bytes_right = 0
    for seed in range(60):
        (hot,) = (each for each in looked_at(log, 4_000, seed).heaviest(50) if each.key == b"hot")
        right += abs(hot.share - share) <= hot.share_error
        bytes_right += abs(hot.bytes_share - bytes_share) <= hot.bytes_share_error
        assert 0 < hot.share_error < 0.2
    assert right >= 54
    assert bytes_right >= 54


def test_records_next_to_each_other_tell_less_than_records_drawn_one_by_one() -> None:
    (alike,) = looked_at(in_bursts(Random(1)), 4_000, seed=1).heaviest(1)
    (drawn,) = looked_at(mixed(Random(1)), 4_000, seed=1).heaviest(1)
    assert alike.share_error > 3 * drawn.share_error


def test_a_larger_sample_is_nearer_the_truth() -> None:
    log = mixed(Random(1))
    errors = [
        looked_at(log, sample, seed=1).heaviest(1)[0].share_error for sample in (500, 5_000, 40_000, 50_000)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == 0


def test_one_window_tells_nothing_about_the_rest() -> None:
    (hot,) = looked_at(mixed(Random(1)), 10, seed=1).heaviest(1)
    assert hot.share_error == 1


# When there are too many keys


@pytest.mark.parametrize("seed", range(10))
def test_what_was_forgotten_is_within_the_error(seed: int) -> None:
    chance = Random(seed)
    log: Log = [
        (b"%d" % min(int(chance.paretovariate(0.6)), 10**6), chance.randrange(100)) for _ in range(3_000)
    ]
    counted = KeyCounter(part=1, capacity=20)
    for at in range(0, len(log), 50):
        counted.add_window(log[at : at + 50])
    records = Counter(key for key, _ in log)
    found = counted.heaviest(20)
    assert found[0].key == records.most_common(1)[0][0]
    for each in found:
        assert each.share <= records[each.key] / len(log) <= each.share + each.share_error + 1e-9
        size = sum(size for key, size in log if key == each.key)
        whole = sum(size for _, size in log)
        assert each.bytes_share <= size / whole <= each.bytes_share + each.bytes_share_error + 1e-9


def test_a_heavy_key_survives_any_number_of_light_ones() -> None:
    counted = KeyCounter(part=1, capacity=100)
    for at in range(2_000):
        counted.add_window([(b"hot", 1), *((b"%d-%d" % (at, number), 1) for number in range(10))])
    (hot,) = counted.heaviest(1)
    assert (hot.key, hot.records) == (b"hot", 2_000)
    assert 0 < hot.share_error < 0.02


# For people


def test_keys_as_people_can_read_them() -> None:
    assert display_key(b"plain") == "plain"
    assert display_key(b"\x00\xff") == "\\x00\\xff"
    assert display_key(b"x" * 100) == "x" * 45 + "..."


def test_the_advice_names_the_price() -> None:
    assert salting_advice(0) is None
    assert "2. penstock.client.salting spreads a key over several partitions" in (salting_advice(2) or "")
