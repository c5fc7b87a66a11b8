"""Durations, deadlines and attempts: how long a client tries, and how long it waits between attempts.

Users write a duration as "250ms", "1s", "5m", "2h", "7d", a timedelta, or a number of seconds.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from random import Random
from typing import Final

from penstock.protocol.backoff import ExponentialBackoff

__all__ = ("UNITS_MS", "Deadline", "Duration", "DurationError", "attempts", "duration_s")


Duration = str | float | timedelta

UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
#: A hundred years: a longer duration is a mistake, and would exceed the range of timestamps.
_DURATION_S_MAX: Final = 36_500 * 86_400.0
_DURATION_TEXT: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?(ms|s|min|m|h|d)", re.ASCII)


class DurationError(ValueError):
    """The value is not a valid duration."""


def duration_s(value: Duration) -> float:
    """Returns the duration in seconds. Raises DurationError."""
    seconds = _parse_duration_s(value)
    if not 0 <= seconds <= _DURATION_S_MAX:  # also refuses NaN
        raise DurationError(f"{value!r} is not a duration: it must be from 0 to 36500d")
    return seconds


def _parse_duration_s(value: object) -> float:
    match value:
        case str():
            match = _DURATION_TEXT.fullmatch(value.strip())
            if match is None:
                raise DurationError(
                    f'{value!r} is not a duration: write a number and a unit, as in "250ms", "1s", "5m"'
                )
            return float(match[1]) * UNITS_MS[match[2]] / 1000
        case timedelta():
            return value.total_seconds()
        case bool():
            pass
        case int() | float():
            return float(value) if abs(value) <= _DURATION_S_MAX else math.inf
    raise DurationError(f'{value!r} is not a duration: write "250ms", "1s", "5m", "2h", "7d" or seconds')


Clock = Callable[[], float]


class Deadline:
    """A point in time after which the client stops waiting."""

    __slots__ = ("_clock", "_end_s", "timeout_ms")

    def __init__(self, timeout_ms: float, *, clock: Clock = time.monotonic) -> None:
        self.timeout_ms = timeout_ms
        self._clock = clock
        self._end_s = clock() + timeout_ms / 1000

    def __repr__(self) -> str:
        return f"<Deadline of {self.timeout_ms:g} ms, {self.left_s:.3f} s left>"

    @property
    def left_s(self) -> float:
        return max(self._end_s - self._clock(), 0.0)

    @property
    def left_ms(self) -> float:
        return self.left_s * 1000

    @property
    def is_over(self) -> bool:
        return self.left_s <= 0


def attempts(
    deadline: Deadline,
    backoff: ExponentialBackoff,
    chance: Random,
    *,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[int]:
    """Yields the number of each attempt, from 0 on, and sleeps in between. At least one; none after the deadline."""
    for attempt in itertools.count():
        yield attempt
        delay_s = backoff.delay_ms(attempt, chance) / 1000
        if deadline.left_s <= delay_s:
            return
        sleep(delay_s)
