"""The breaker bounds a flood by rate and by share of the traffic, and lets everything through in the end."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.groups.share_state.breaker import FREE, Breaker


def test_without_bounds_nothing_waits() -> None:
    breaker = Breaker()
    assert breaker.allowed(1_000_000, 0) == 1_000_000
    assert not breaker.is_open


def test_a_rate_allows_a_seconds_worth_and_then_as_many_as_time_brings() -> None:
    breaker = Breaker(rate_max=10)
    assert breaker.allowed(50, 0) == 10
    assert breaker.is_open
    breaker.buried(10, 0)
    assert breaker.allowed(50, 0) == 0
    assert breaker.wait_ms() == 101
    assert breaker.allowed(50, 101) == 1
    assert breaker.allowed(50, 60_000) == 10  # time that was not used is not saved up
    assert breaker.allowed(3, 60_000) == 3
    assert not breaker.is_open


def test_a_share_follows_the_traffic_of_the_last_minute() -> None:
    breaker = Breaker(share_max=0.1)
    assert breaker.allowed(1_000, 0) == FREE
    breaker.finished(1_000, 500)
    assert breaker.allowed(1_000, 500) == 100
    breaker.buried(100, 500)
    assert breaker.allowed(1_000, 1_000) == 0
    assert breaker.is_open
    assert breaker.allowed(1_000, 61_500) == FREE  # forgotten, and it goes on
    breaker.configure(None, None)
    assert breaker.allowed(1_000, 61_500) == 1_000


@given(st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 100)), max_size=60), st.floats(0.1, 50))
def test_a_rate_is_never_exceeded(steps: list[tuple[int, int]], rate: float) -> None:
    breaker, now_ms, total = Breaker(rate_max=rate), 0, 0
    for passed_ms, wanted in steps:
        now_ms += passed_ms
        allowed = breaker.allowed(wanted, now_ms)
        breaker.buried(allowed, now_ms)
        total += allowed
        assert total <= max(rate, 1) + rate * now_ms / 1000 + 1e-6
