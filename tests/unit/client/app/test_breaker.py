"""The circuit breaker: its transition table, its promises for any sequence of calls, and invalid values."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.app.breaker import (
    TRANSITIONS,
    Breaker,
    BreakerEvent,
    BreakerPhase,
    BreakerState,
    CallPermit,
)

RULES = Breaker(failures=3, within="10s", open_for="30s", trials=1, cap="100s")


def opened(rules: Breaker = RULES, *, at_s: float = 0.0) -> BreakerState:
    state = BreakerState(rules)
    for _ in range(rules.failures):
        state.failed(at_s)
    assert state.phase is BreakerPhase.OPEN
    return state


def test_the_table() -> None:
    assert TRANSITIONS == {
        BreakerPhase.CLOSED: {BreakerEvent.FAILED_TOO_OFTEN: BreakerPhase.OPEN},
        BreakerPhase.OPEN: {BreakerEvent.OPEN_TIME_OVER: BreakerPhase.HALF_OPEN},
        BreakerPhase.HALF_OPEN: {
            BreakerEvent.TRIAL_SUCCEEDED: BreakerPhase.CLOSED,
            BreakerEvent.TRIAL_FAILED: BreakerPhase.OPEN,
        },
    }


def test_it_opens_after_so_many_failures_in_the_window() -> None:
    state = BreakerState(RULES)
    state.failed(0)
    state.failed(5)
    assert state.allow(5) == CallPermit(True, None, 0)
    state.failed(10)
    assert state.allow(10) == CallPermit(False, 40, 1)
    assert not state.allow(39.9).go


def test_failures_too_far_apart_do_not_open_it() -> None:
    state = BreakerState(RULES)
    for now_s in (0, 6, 12, 18, 24):
        state.failed(now_s)
        assert state.phase is BreakerPhase.CLOSED
    state.failed(25)
    assert state.phase is BreakerPhase.OPEN


def test_a_few_bad_messages_among_good_ones_do_not_open_it() -> None:
    state = BreakerState(RULES)
    for now_s in range(100):
        state.failed(now_s / 10)
        state.failed(now_s / 10)
        state.succeeded(now_s / 10)
    assert state.phase is BreakerPhase.CLOSED


def test_half_open_lets_a_trial_through_and_its_success_closes() -> None:
    state = opened()
    trial = state.allow(30)
    assert (trial.go, state.phase) == (True, BreakerPhase.HALF_OPEN)
    assert state.allow(31) == CallPermit(False, None, trial.generation)
    state.succeeded(32, trial.generation)
    assert state.phase is BreakerPhase.CLOSED
    assert state.allow(32).go


def test_a_failed_trial_opens_it_for_twice_as_long_up_to_the_cap() -> None:
    state = opened()
    now_s = 0.0
    for rest_s in (30, 60, 100, 100):
        assert state.allow(now_s).until_s == now_s + rest_s
        now_s += rest_s
        assert state.allow(now_s).go
        state.failed(now_s)
    now_s = state.allow(now_s).until_s or 0
    assert state.allow(now_s).go
    state.succeeded(now_s)
    for _ in range(3):
        state.failed(now_s)
    assert state.allow(now_s).until_s == now_s + 30


def test_a_late_outcome_is_not_taken_for_that_of_the_trial() -> None:
    state = BreakerState(RULES)
    slow = state.allow(0)
    for _ in range(3):
        state.failed(1)
    trial = state.allow(31)
    state.failed(32, slow.generation)
    assert state.phase is BreakerPhase.HALF_OPEN
    state.succeeded(32, slow.generation)
    assert state.phase is BreakerPhase.HALF_OPEN
    state.succeeded(33, trial.generation)
    assert state.phase is BreakerPhase.CLOSED


def test_a_trial_that_tells_nothing_is_tried_again() -> None:
    state = opened()
    trial = state.allow(30)
    state.undecided(trial.generation)
    assert state.allow(30).go
    assert not state.allow(30).go


@dataclass
class Calls:
    """Plays any sequence of calls on a breaker, as handlers would, and keeps the books that it is judged by."""

    rules: Breaker
    state: BreakerState = field(init=False)
    now_s: float = 0.0
    under_way: list[int] = field(default_factory=list)
    trials_under_way: dict[int, int] = field(default_factory=dict)
    failures_in_a_row_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.state = BreakerState(self.rules)

    def begin(self) -> None:
        permit = self.state.allow(self.now_s)
        if not permit.go:
            assert self.state.phase is not BreakerPhase.CLOSED
            return
        assert self.state.phase is not BreakerPhase.OPEN
        self.under_way.append(permit.generation)
        if self.state.phase is BreakerPhase.HALF_OPEN:
            count = self.trials_under_way.get(permit.generation, 0) + 1
            assert count <= self.rules.trials
            self.trials_under_way[permit.generation] = count

    def end(self, outcome: str) -> None:
        if not self.under_way:
            return
        generation, before = self.under_way.pop(0), self.state.phase
        if outcome == "undecided":
            self.state.undecided(generation)
            if generation in self.trials_under_way:
                self.trials_under_way[generation] -= 1
        elif outcome == "failed":
            if generation == self.state.generation:
                self.failures_in_a_row_s.append(self.now_s)
            self.state.failed(self.now_s, generation)
        else:
            if generation == self.state.generation:
                self.failures_in_a_row_s.clear()
            self.state.succeeded(self.now_s, generation)
        if before is BreakerPhase.CLOSED and self.state.phase is BreakerPhase.OPEN:
            last = self.failures_in_a_row_s[-self.rules.failures :]
            assert len(last) == self.rules.failures
            assert last[-1] - last[0] <= 10
        if before is not self.state.phase:
            self.failures_in_a_row_s.clear()


STEPS = st.lists(
    st.one_of(
        st.just("begin"),
        st.sampled_from(["succeeded", "failed", "failed", "undecided"]),
        st.floats(0, 40, allow_nan=False),
    ),
    max_size=200,
)


@given(st.integers(1, 4), st.integers(1, 3), STEPS)
def test_its_promises_hold_under_any_calls(failures: int, trials: int, steps: list[str | float]) -> None:
    calls = Calls(Breaker(failures=failures, within="10s", open_for="30s", trials=trials, cap="100s"))
    for step in steps:
        match step:
            case "begin":
                calls.begin()
            case str():
                calls.end(step)
            case _:
                calls.now_s += step
    for _ in range(len(calls.under_way)):
        calls.end("undecided")
    # In the end the breaker lets a call through, after any history.
    assert calls.state.allow(calls.now_s + 100).go


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ({"failures": 0}, "failures=0 must be a whole number from 1"),
        ({"trials": 1.5}, "trials=1.5 must be a whole number from 1"),
        ({"within": "0s"}, "within='0s' must be longer than 0"),
        ({"open_for": 0}, "open_for=0 must be longer than 0"),
        ({"open_for": "1h"}, "cap='5m' is shorter than open_for='1h'"),
        ({"within": "soon"}, "'soon' is not a duration"),
    ],
)
def test_what_cannot_be_declared(given_: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Breaker(**given_)  # type: ignore[arg-type]


def test_it_tells_where_it_stands() -> None:
    state = opened()
    assert repr(state) == "<BreakerState open, until 30.000 s>"
    state.allow(30)
    assert repr(state) == "<BreakerState half-open, 0 trials left>"
    assert repr(BreakerState(RULES)) == "<BreakerState closed, failed 0 of 3>"
