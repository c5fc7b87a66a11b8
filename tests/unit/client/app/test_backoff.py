"""The backoff that an application declares: its formula, its bound, and invalid values."""

from datetime import timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.app.failures import Backoff
from penstock.protocol.backoff import ExponentialBackoff


class Top(Random):
    """Chance that always gives the most."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_the_rest_doubles_from_the_base_up_to_the_cap() -> None:
    backoff = Backoff(base="1s", cap="5s")
    for attempt, least_s in [(1, 1), (2, 2), (3, 4), (4, 5), (5, 5)]:
        rests = [backoff.delay_s(attempt, Random(seed)) for seed in range(50)]
        assert all(least_s <= rest <= least_s + 1 for rest in rests)
        assert len(set(rests)) == 50


def test_it_is_the_formula_of_the_whole_project() -> None:
    rests = ExponentialBackoff(base_ms=200, cap_ms=3_000)
    backoff = Backoff(base="200ms", cap="3s")
    for attempt in range(1, 10):
        expected_ms = rests.delay_ms(attempt - 1, Random(attempt))
        assert backoff.delay_s(attempt, Random(attempt)) * 1000 == pytest.approx(expected_ms)


def test_five_deliveries_have_four_rests() -> None:
    assert Backoff().attempts == 5
    assert Backoff(base="1s", cap="5m").longest_s() == pytest.approx((1 + 1) + (2 + 1) + (4 + 1) + (8 + 1))
    assert Backoff(attempts=1).longest_s() == 0


@given(st.floats(0.001, 1e4), st.floats(1, 1e4), st.integers(1, 100))
def test_no_message_waits_longer_than_the_bound(base_s: float, times: float, attempts: int) -> None:
    backoff = Backoff(base=base_s, cap=base_s * times, attempts=attempts)
    waited_s = sum(backoff.delay_s(attempt, Top()) for attempt in range(1, attempts))
    assert waited_s == pytest.approx(backoff.longest_s())


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ({"base": "soon"}, "'soon' is not a duration"),
        ({"cap": -1}, "-1 is not a duration"),
        ({"base": "0s"}, "leaves no delay"),
        ({"base": "10s", "cap": "1s"}, "cap='1s' is shorter than base='10s'"),
        ({"attempts": 0}, "attempts=0 must be a whole number from 1 to 100"),
        ({"attempts": 101}, "attempts=101"),
        ({"attempts": True}, "attempts=True"),
        ({"attempts": 2.5}, "attempts=2.5"),
    ],
)
def test_what_cannot_be_declared(given_: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Backoff(**given_)  # type: ignore[arg-type]


def test_lengths_may_be_written_in_any_way() -> None:
    backoff = Backoff(base=timedelta(seconds=2), cap=8, attempts=4)
    assert backoff.longest_s() == pytest.approx((2 + 2) + (4 + 2) + (8 + 2))
