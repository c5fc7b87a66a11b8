"""Salted keys: the key can be restored, all buckets are used, and equal keys stay together."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.salting import BUCKETS_MAX, salted, salted_keys, unsalted


@given(key=st.binary(max_size=40), buckets=st.integers(1, BUCKETS_MAX), of=st.none() | st.binary(max_size=8))
def test_the_key_comes_back(key, buckets, of):
    once = salted(key, buckets, of=of)
    assert unsalted(once) == key
    assert unsalted(salted(once, 3)) == once


@given(key=st.binary(max_size=40).filter(lambda key: b"\x1f" not in key))
def test_a_key_without_salt_stays_as_it_is(key):
    assert unsalted(key) == key


def test_it_goes_to_all_buckets_alike_and_to_no_other():
    chance = random.Random(7)
    found = [salted(b"hot", 8, chance=chance) for _ in range(8_000)]
    counts = {key: found.count(key) for key in salted_keys(b"hot", 8)}
    assert sum(counts.values()) == 8_000
    assert min(counts.values()) > 800


def test_what_belongs_together_stays_together():
    by_customer = {of: salted(b"hot", 16, of=of) for of in (b"%d" % number for number in range(200))}
    assert all(salted(b"hot", 16, of=of) == key for of, key in by_customer.items())
    assert set(by_customer.values()) == set(salted_keys(b"hot", 16))


@pytest.mark.parametrize("buckets", [0, -1, BUCKETS_MAX + 1])
def test_nothing_to_choose_from(buckets):
    with pytest.raises(ValueError, match="buckets"):
        salted(b"k", buckets)
