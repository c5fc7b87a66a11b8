"""The delay of a released record: `min(cap, base * 2^attempt) + random(0, jitter)`."""

import pytest

from penstock.groups.share.partition.share_partition_state import RedeliveryBackoff

FIXED = RedeliveryBackoff(base_ms=100, cap_ms=1_000, jitter_ms=0, is_exponential=False)
EXPONENTIAL = FIXED._replace(is_exponential=True)


@pytest.mark.parametrize(
    ("delivery_count", "expected_ms"), [(1, 100), (2, 200), (3, 400), (4, 800), (5, 1_000)]
)
def test_it_doubles_up_to_its_cap(delivery_count: int, expected_ms: int) -> None:
    assert EXPONENTIAL.delay_ms(delivery_count, 0.9) == expected_ms
    assert FIXED.delay_ms(delivery_count, 0.9) == 100


def test_any_number_of_deliveries_has_a_delay() -> None:
    assert EXPONENTIAL.delay_ms(255, 0.0) == EXPONENTIAL.delay_ms(10_000, 0.0) == 1_000


@pytest.mark.parametrize(("chance", "expected_ms"), [(0.0, 400), (0.5, 450), (1.0, 500)])
def test_jitter_is_added_also_beyond_the_cap(chance: float, expected_ms: int) -> None:
    assert EXPONENTIAL._replace(jitter_ms=100).delay_ms(3, chance) == expected_ms
    assert EXPONENTIAL._replace(jitter_ms=100, cap_ms=400).delay_ms(9, chance) == expected_ms
