"""The breaker limits dead letters by rate and by share of the traffic, and lets all of them through in the end."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.groups.share.state.dead_letters import FREE_PER_WINDOW, DeadLetterBreaker


def test_without_bounds_nothing_waits() -> None:
    assert DeadLetterBreaker().take(1_000_000, 0) == 1_000_000


def test_a_rate_allows_a_seconds_worth_and_then_as_many_as_time_brings() -> None:
    breaker = DeadLetterBreaker(rate_max=10)
    assert breaker.take(50, 0) == 10
    assert breaker.take(50, 0) == 0
    assert breaker.wait_ms() == 101
    assert breaker.take(50, 101) == 1
    assert breaker.take(50, 60_000) == 10  # time that was not used is not saved up
    assert breaker.take(3, 70_000) == 3


def test_a_share_follows_the_traffic_of_the_last_minute() -> None:
    breaker = DeadLetterBreaker(share_max=0.1)
    assert breaker.take(1_000, 0) == FREE_PER_WINDOW
    breaker.finished(1_000, 500)
    assert breaker.take(1_000, 500) == 100 - FREE_PER_WINDOW
    assert breaker.take(1_000, 1_000) == 0
    assert breaker.take(1_000, 61_500) == FREE_PER_WINDOW  # forgotten, and it goes on
    breaker.configure(None, None)
    assert breaker.take(1_000, 61_500) == 1_000


def test_traffic_without_dead_letters_takes_no_memory() -> None:
    breaker = DeadLetterBreaker(share_max=0.1)
    for second in range(10_000):
        breaker.finished(1, second * 1_000)
    assert len(breaker._finished._slots) <= 120
    assert breaker.take(1_000, 10_000_000) == FREE_PER_WINDOW


def test_what_was_not_used_is_there_for_others() -> None:
    breaker = DeadLetterBreaker(rate_max=10, share_max=0.5)
    assert breaker.take(50, 900) == 10
    breaker.give_back(4, 900)
    assert breaker.take(50, 1_100) == 4
    # What was given back does not count twice when that second is forgotten.
    assert breaker.take(50, 60_500) == 6
    assert breaker.take(50, 62_000) == 4


def test_dead_letters_written_without_a_rate_are_no_debt_under_one() -> None:
    breaker = DeadLetterBreaker()
    assert breaker.take(1_000_000, 0) == 1_000_000
    breaker.configure(10, None)
    assert breaker.take(5, 1_000) == 1
    assert breaker.take(5, 2_000) == 5


@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 100), st.integers(0, 9)), max_size=60),
    st.floats(0.1, 50),
)
def test_a_rate_is_never_exceeded(steps: list[tuple[int, int, int]], rate: float) -> None:
    breaker, now_ms, total = DeadLetterBreaker(rate_max=rate), 0, 0
    for passed_ms, wanted, unused in steps:
        now_ms += passed_ms
        taken = breaker.take(wanted, now_ms)
        unused = min(taken, unused)
        breaker.give_back(unused, now_ms)
        total += taken - unused
        assert total <= max(rate, 1) + rate * now_ms / 1000 + 1e-6
