"""The backoff: its formula, and that no caller waits past its deadline."""

from random import Random

from penstock.client.retry import Deadline, attempts
from penstock.protocol.backoff import ExponentialBackoff


class Time:
    """A clock that advances when `sleep` is called."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.rests_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, rest_s: float) -> None:
        self.rests_s.append(rest_s)
        self.now_s += rest_s


def test_the_rest_doubles_up_to_the_cap_and_is_never_quite_the_same() -> None:
    backoff = ExponentialBackoff(base_ms=100, cap_ms=1000)
    for attempt, least in enumerate([100, 200, 400, 800, 1000, 1000]):
        rests = [backoff.delay_ms(attempt, Random(seed)) for seed in range(50)]
        assert all(least <= rest <= least + 100 for rest in rests)
        assert len(set(rests)) == 50
    assert backoff.delay_ms(10**6, Random(1)) <= 1100


def test_a_deadline_counts_down_and_stays_over() -> None:
    time = Time()
    deadline = Deadline(1500, clock=time.clock)
    assert (deadline.left_s, deadline.left_ms, deadline.is_over) == (1.5, 1500, False)
    time.sleep(2)
    assert (deadline.left_s, deadline.is_over) == (0, True)


def test_attempts_end_before_the_deadline() -> None:
    time = Time()
    deadline = Deadline(3000, clock=time.clock)
    count = len(
        list(attempts(deadline, ExponentialBackoff(base_ms=100, cap_ms=400), Random(1), sleep=time.sleep))
    )
    assert count == len(time.rests_s) + 1
    assert 6 <= count <= 12
    assert not deadline.is_over


def test_there_is_always_one_attempt() -> None:
    deadline = Deadline(0)
    assert list(attempts(deadline, ExponentialBackoff(), Random(1))) == [0]
