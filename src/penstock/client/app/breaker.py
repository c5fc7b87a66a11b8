"""A circuit breaker: while a service that a handler depends on fails, messages wait and do not use up their attempts.

A closed breaker lets all calls through. After `failures` failed calls in a row within `within` it opens and lets none
through. After `open_for` it is half open: it lets `trials` calls through, and the first one that ends decides. A
success closes it; a failure opens it again for twice as long as before, up to `cap`. One success resets the count of
failures, so that a few bad messages among good ones never pause anything.

The rules are a table, and the clock is an argument; `BreakerGuard` adds the lock for threads that share one breaker.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

from penstock.client.app.failures import Reject
from penstock.client.app.figures import Figures
from penstock.client.app.handler import HandlerCall, UnreadableMessage
from penstock.client.retry import Duration, duration_s
from penstock.protocol.backoff import ExponentialBackoff

__all__ = (
    "TRANSITIONS",
    "ApplicationStopping",
    "Breaker",
    "BreakerEvent",
    "BreakerGuard",
    "BreakerPhase",
    "BreakerState",
    "CallPermit",
    "with_breaker",
    "with_breaker_async",
)


_COUNT_MAX: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """The circuit breaker of a subscription: when to stop calling a handler that keeps failing.

    After `failures` failed calls in a row within `within`, the subscription stops calling the handler for `open_for`.
    Then it tries `trials` calls. If the first one that ends succeeds, it goes on; if it fails, it waits twice as long
    as before, up to `cap`. Messages wait meanwhile and do not use up attempts. Raises ValueError for values that are
    out of range.
    """

    failures: int = 5
    within: Duration = "30s"
    open_for: Duration = "30s"
    trials: int = 1
    #: The longest time that the breaker stays open, however often its trials fail.
    cap: Duration = "5m"

    def __post_init__(self) -> None:
        for name, count in (("failures", self.failures), ("trials", self.trials)):
            if type(count) is not int or not 1 <= count <= _COUNT_MAX:
                raise ValueError(f"{name}={count!r} must be a whole number from 1 to {_COUNT_MAX}")
        for name, length in (("within", self.within), ("open_for", self.open_for)):
            if duration_s(length) == 0:
                raise ValueError(f"{name}={length!r} must be longer than 0")
        if duration_s(self.cap) < duration_s(self.open_for):
            raise ValueError(f"cap={self.cap!r} is shorter than open_for={self.open_for!r}")


class BreakerPhase(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class BreakerEvent(Enum):
    FAILED_TOO_OFTEN = "failed too often"
    OPEN_TIME_OVER = "open time over"
    TRIAL_SUCCEEDED = "trial succeeded"
    TRIAL_FAILED = "trial failed"


TRANSITIONS: Final = {
    BreakerPhase.CLOSED: {BreakerEvent.FAILED_TOO_OFTEN: BreakerPhase.OPEN},
    BreakerPhase.OPEN: {BreakerEvent.OPEN_TIME_OVER: BreakerPhase.HALF_OPEN},
    BreakerPhase.HALF_OPEN: {
        BreakerEvent.TRIAL_SUCCEEDED: BreakerPhase.CLOSED,
        BreakerEvent.TRIAL_FAILED: BreakerPhase.OPEN,
    },
}


class CallPermit(NamedTuple):
    go: bool
    #: When to request a permit again, in seconds of the monotonic clock. None if that depends on a running trial.
    until_s: float | None
    #: The caller passes it back with the outcome, so that a late outcome does not count as that of a trial.
    generation: int


class BreakerState:
    """The state of a breaker. A caller with a permit reports the outcome: `succeeded`, `failed` or `undecided`."""

    __slots__ = (
        "_failed_s",
        "_failed_trials",
        "_open_times",
        "_rules",
        "_trials_left",
        "_until_s",
        "_within_s",
        "generation",
        "phase",
    )

    def __init__(self, rules: Breaker) -> None:
        self._rules = rules
        self._within_s = duration_s(rules.within)
        self.phase = BreakerPhase.CLOSED
        #: Counts the changes of phase.
        self.generation = 0
        self._failed_s: deque[float] = deque(maxlen=rules.failures)
        self._open_times = ExponentialBackoff(
            base_ms=duration_s(rules.open_for) * 1000, cap_ms=duration_s(rules.cap) * 1000
        )
        self._failed_trials = 0
        self._until_s = 0.0
        self._trials_left = 0

    def __repr__(self) -> str:
        match self.phase:
            case BreakerPhase.CLOSED:
                more = f"failed {len(self._failed_s)} of {self._rules.failures}"
            case BreakerPhase.OPEN:
                more = f"until {self._until_s:.3f} s"
            case BreakerPhase.HALF_OPEN:
                more = f"{self._trials_left} trials left"
        return f"<BreakerState {self.phase.value}, {more}>"

    def allow(self, now_s: float) -> CallPermit:
        """Whether a call may begin now."""
        if self.phase is BreakerPhase.OPEN and now_s >= self._until_s:
            self._enter(BreakerEvent.OPEN_TIME_OVER)
            self._trials_left = self._rules.trials
        match self.phase:
            case BreakerPhase.CLOSED:
                return CallPermit(True, None, self.generation)
            case BreakerPhase.OPEN:
                return CallPermit(False, self._until_s, self.generation)
            case BreakerPhase.HALF_OPEN if self._trials_left == 0:
                return CallPermit(False, None, self.generation)
        self._trials_left -= 1
        return CallPermit(True, None, self.generation)

    def succeeded(self, now_s: float, generation: int | None = None) -> None:
        if self._is_late(generation) or self.phase is BreakerPhase.OPEN:
            return
        self._failed_s.clear()
        if self.phase is BreakerPhase.HALF_OPEN:
            self._enter(BreakerEvent.TRIAL_SUCCEEDED)
            self._failed_trials = 0

    def failed(self, now_s: float, generation: int | None = None) -> None:
        if self._is_late(generation) or self.phase is BreakerPhase.OPEN:
            return
        if self.phase is BreakerPhase.HALF_OPEN:
            self._failed_trials += 1
            self._open(BreakerEvent.TRIAL_FAILED, now_s)
            return
        self._failed_s.append(now_s)
        if len(self._failed_s) == self._rules.failures and now_s - self._failed_s[0] <= self._within_s:
            self._open(BreakerEvent.FAILED_TOO_OFTEN, now_s)

    def undecided(self, generation: int | None = None) -> None:
        """The call shows nothing about the service: it was abandoned, or its message caused the error."""
        if not self._is_late(generation) and self.phase is BreakerPhase.HALF_OPEN:
            self._trials_left = min(self._trials_left + 1, self._rules.trials)

    def _open(self, event: BreakerEvent, now_s: float) -> None:
        self._enter(event)
        self._failed_s.clear()
        self._until_s = now_s + self._open_times.minimum_ms(self._failed_trials) / 1000

    def _enter(self, event: BreakerEvent) -> None:
        self.phase = TRANSITIONS[self.phase][event]
        self.generation += 1

    def _is_late(self, generation: int | None) -> bool:
        """Whether the call began in an earlier phase, and so shows nothing about this one."""
        return generation is not None and generation != self.generation


_STOP_CHECK_S: Final = 0.2


class ApplicationStopping(Exception):
    """The application ends while a message waits for the breaker: the message was not tried."""


class BreakerGuard:
    """A breaker that handler threads share."""

    def __init__(self, breaker: Breaker, figures: Figures, stopping: threading.Event) -> None:
        self._state = BreakerState(breaker)
        self._figures = figures
        self._stopping = stopping
        self._lock = threading.Lock()

    def request_permit(self) -> CallPermit:
        """Raises ApplicationStopping."""
        if self._stopping.is_set():
            raise ApplicationStopping
        with self._lock:
            return self._state.allow(time.monotonic())

    @contextmanager
    def watching(self, permit: CallPermit) -> Iterator[None]:
        """Counts the success or the failure of the block, a call of the handler."""
        try:
            yield
        except BaseException as error:
            self.failed(error, permit.generation)
            raise
        self.succeeded(permit.generation)

    def succeeded(self, generation: int) -> None:
        with self._lock:
            self._state.succeeded(time.monotonic(), generation)

    def failed(self, error: BaseException, generation: int) -> None:
        """Counts a failure, unless the message caused it: that shows nothing about what the handler depends on."""
        with self._lock:
            if isinstance(error, (UnreadableMessage, Reject)) or not isinstance(error, Exception):
                self._state.undecided(generation)
                return
            was_open = self._state.phase is BreakerPhase.OPEN
            self._state.failed(time.monotonic(), generation)
            if self._state.phase is BreakerPhase.OPEN and not was_open:
                self._figures.breaks += 1


def _wait_s(permit: CallPermit) -> float:
    if permit.until_s is None:
        return _STOP_CHECK_S / 4
    return min(max(permit.until_s - time.monotonic(), 0.001), _STOP_CHECK_S)


def with_breaker(call: HandlerCall, guard: BreakerGuard) -> HandlerCall:
    def handle(raw: Any, **handles: Any) -> Any:
        permit = guard.request_permit()
        while not permit.go:
            time.sleep(_wait_s(permit))
            permit = guard.request_permit()
        with guard.watching(permit):
            return call(raw, **handles)

    return handle


def with_breaker_async(call: HandlerCall, guard: BreakerGuard) -> HandlerCall:
    async def handle(raw: Any, **handles: Any) -> Any:
        permit = guard.request_permit()
        while not permit.go:
            await asyncio.sleep(_wait_s(permit))
            permit = guard.request_permit()
        with guard.watching(permit):
            return await call(raw, **handles)

    return handle
