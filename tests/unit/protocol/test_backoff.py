"""The delays of brokers: their random part grows with them."""

import random

import pytest

from penstock.protocol.backoff import ExponentialBackoff

BACKOFF = ExponentialBackoff(base_ms=20, cap_ms=100)


class Extremes:
    """A chance that returns a chosen end of the range."""

    def __init__(self, *, highest: bool) -> None:
        self._highest = highest

    def uniform(self, a: float, b: float) -> float:
        return b if self._highest else a


@pytest.mark.parametrize(("attempt", "middle_ms"), [(0, 20), (1, 40), (2, 80), (3, 100), (5_000, 100)])
def test_the_spread_is_in_proportion_to_the_delay(attempt: int, middle_ms: float) -> None:
    assert BACKOFF.spread_ms(attempt, Extremes(highest=False)) == pytest.approx(middle_ms / 2)
    assert BACKOFF.spread_ms(attempt, Extremes(highest=True)) == pytest.approx(middle_ms * 1.5)
    assert BACKOFF.spread_ms(attempt, Extremes(highest=True), longest=1) == pytest.approx(middle_ms)


def test_two_brokers_that_wait_for_the_cap_wake_apart() -> None:
    delays = {BACKOFF.spread_ms(20, random.Random(seed)) for seed in range(50)}
    assert len(delays) == 50
    assert max(delays) - min(delays) > BACKOFF.cap_ms / 2
