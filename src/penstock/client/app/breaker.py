"""A circuit breaker: a handler whose downstream fails is paused, in place of burning the retries of every message.

Closed, all calls go through. After `failures` failed calls in a row within `within` it opens, and none does. After
`open_for` it is half open: `trials` calls go through, and the first that ends decides. A success closes it; a failure
opens it again for twice as long as before, up to `cap`. One success in between starts the count anew, so that a few
bad messages among good ones never pause anything.

The rules are a table, and the clock is an argument; who shares one among threads guards it with a lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from penstock.client.durations import Duration, seconds

__all__ = ["TRANSITIONS", "Breaker", "BreakerState", "Event", "Phase", "Verdict"]

_COUNT_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """What a subscription declares. Raises ValueError for what cannot be."""

    failures: int = 5
    within: Duration = "30s"
    open_for: Duration = "30s"
    trials: int = 1
    #: The longest that it stays open, however often its trials have failed.
    cap: Duration = "5m"

    def __post_init__(self) -> None:
        for name, count in (("failures", self.failures), ("trials", self.trials)):
            if type(count) is not int or not 1 <= count <= _COUNT_MAX:
                raise ValueError(f"{name}={count!r} is a whole number from 1 to {_COUNT_MAX}")
        for name, length in (("within", self.within), ("open_for", self.open_for)):
            if seconds(length) == 0:
                raise ValueError(f"{name}={length!r} is longer than 0")
        if seconds(self.cap) < seconds(self.open_for):
            raise ValueError(f"cap={self.cap!r} is shorter than open_for={self.open_for!r}")


class Phase(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Event(Enum):
    FAILED_TOO_OFTEN = "failed too often"
    RESTED = "rested"
    TRIAL_SUCCEEDED = "trial succeeded"
    TRIAL_FAILED = "trial failed"


TRANSITIONS: Final = {
    Phase.CLOSED: {Event.FAILED_TOO_OFTEN: Phase.OPEN},
    Phase.OPEN: {Event.RESTED: Phase.HALF_OPEN},
    Phase.HALF_OPEN: {Event.TRIAL_SUCCEEDED: Phase.CLOSED, Event.TRIAL_FAILED: Phase.OPEN},
}


class Verdict(NamedTuple):
    go: bool
    #: When to ask again; None where that depends on a trial that is under way.
    until_s: float | None
    #: To be handed back with the outcome, so that a late one is not taken for that of a trial.
    turn: int


class BreakerState:
    """Where a breaker stands. Whoever was let through reports back: `succeeded`, `failed`, or `undecided`."""

    __slots__ = (
        "_cap_s",
        "_failed_s",
        "_open_for_s",
        "_rules",
        "_trials_left",
        "_until_s",
        "_within_s",
        "phase",
        "turn",
    )

    def __init__(self, rules: Breaker) -> None:
        self._rules = rules
        self._within_s, self._cap_s = seconds(rules.within), seconds(rules.cap)
        self.phase = Phase.CLOSED
        #: Counts the changes of phase.
        self.turn = 0
        self._failed_s: deque[float] = deque(maxlen=rules.failures)
        self._open_for_s = seconds(rules.open_for)
        self._until_s = 0.0
        self._trials_left = 0

    def __repr__(self) -> str:
        match self.phase:
            case Phase.CLOSED:
                more = f"failed {len(self._failed_s)} of {self._rules.failures}"
            case Phase.OPEN:
                more = f"until {self._until_s:.3f} s"
            case Phase.HALF_OPEN:
                more = f"{self._trials_left} trials left"
        return f"<BreakerState {self.phase.value}, {more}>"

    def allow(self, now_s: float) -> Verdict:
        """Whether a call may begin now."""
        if self.phase is Phase.OPEN and now_s >= self._until_s:
            self._enter(Event.RESTED)
            self._trials_left = self._rules.trials
        match self.phase:
            case Phase.CLOSED:
                return Verdict(True, None, self.turn)
            case Phase.OPEN:
                return Verdict(False, self._until_s, self.turn)
            case Phase.HALF_OPEN if self._trials_left == 0:
                return Verdict(False, None, self.turn)
        self._trials_left -= 1
        return Verdict(True, None, self.turn)

    def succeeded(self, now_s: float, turn: int | None = None) -> None:
        if self._is_late(turn) or self.phase is Phase.OPEN:
            return
        self._failed_s.clear()
        if self.phase is Phase.HALF_OPEN:
            self._enter(Event.TRIAL_SUCCEEDED)
            self._open_for_s = seconds(self._rules.open_for)

    def failed(self, now_s: float, turn: int | None = None) -> None:
        if self._is_late(turn) or self.phase is Phase.OPEN:
            return
        if self.phase is Phase.HALF_OPEN:
            self._open_for_s = min(self._open_for_s * 2, self._cap_s)
            self._open(Event.TRIAL_FAILED, now_s)
            return
        self._failed_s.append(now_s)
        if len(self._failed_s) == self._rules.failures and now_s - self._failed_s[0] <= self._within_s:
            self._open(Event.FAILED_TOO_OFTEN, now_s)

    def undecided(self, turn: int | None = None) -> None:
        """The call said nothing about the downstream: it was given up, or its message was to blame."""
        if not self._is_late(turn) and self.phase is Phase.HALF_OPEN:
            self._trials_left = min(self._trials_left + 1, self._rules.trials)

    def _open(self, event: Event, now_s: float) -> None:
        self._enter(event)
        self._failed_s.clear()
        self._until_s = now_s + self._open_for_s

    def _enter(self, event: Event) -> None:
        self.phase = TRANSITIONS[self.phase][event]
        self.turn += 1

    def _is_late(self, turn: int | None) -> bool:
        """A call that began before the phase last changed tells nothing about this one."""
        return turn is not None and turn != self.turn
