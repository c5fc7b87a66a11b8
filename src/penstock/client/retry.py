"""Durations, deadlines and backoff: how long a client tries, and how long it waits between attempts.

Users write a duration as "250ms", "1s", "5m", "2h", "7d", a timedelta, or a number of seconds. `Backoff` is the one
backoff of the client side.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Final

__all__ = (
    "UNITS_MS",
    "Duration",
    "DurationError",
    "duration_s",
)


Duration = str | float | timedelta

UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
#: A hundred years: what is longer is a slip of the pen, and would leave the range of timestamps.
_DURATION_S_MAX: Final = 36_500 * 86_400.0
_DURATION_TEXT: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?(ms|s|min|m|h|d)", re.ASCII)


class DurationError(ValueError):
    """No length of time; a sentence for whoever wrote it."""


def duration_s(value: Duration) -> float:
    """At least 0. Raises DurationError."""
    length_s = _parse_duration_s(value)
    if not 0 <= length_s <= _DURATION_S_MAX:  # false for what is no number, too
        raise DurationError(f"{value!r} is no length of time: it is at least 0, and at most 36500d")
    return length_s


def _parse_duration_s(value: object) -> float:
    match value:
        case str():
            return _parse_text_s(value)
        case timedelta():
            return value.total_seconds()
        case bool():
            pass
        case int() | float():
            return float(value) if abs(value) <= _DURATION_S_MAX else math.inf
    raise DurationError(f'{value!r} is no length of time: write "250ms", "1s", "5m", "2h", "7d" or seconds')


def _parse_text_s(text: str) -> float:
    match = _DURATION_TEXT.fullmatch(text.strip())
    if match is None:
        raise DurationError(
            f'{text!r} is no length of time: write a number and a unit, as in "250ms", "1s", "5m"'
        )
    return float(match[1]) * UNITS_MS[match[2]] / 1000


Clock = Callable[[], float]


class Deadline:
    """A moment after which nothing more is waited for."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Longer after every attempt, and never the same for two who fail together."""

    base_ms: float = 50
    cap_ms: float = 1_000

    def delay_ms(self, attempt: int, chance: Random) -> float:
        """The rest after `attempt`, counted from 0: min(cap, base * 2^attempt) + random(0, base)."""
        return self._least_ms(attempt) + chance.uniform(0, self.base_ms)

    def longest_ms(self, attempt: int) -> float:
        """What `delay_ms` stays within."""
        return self._least_ms(attempt) + self.base_ms

    def _least_ms(self, attempt: int) -> float:
        # A float overflows at 2^1024, and no cap lies anywhere near.
        return min(self.cap_ms, self.base_ms * 2.0 ** min(attempt, 64))


def attempts(
    deadline: Deadline, backoff: Backoff, chance: Random, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[int]:
    """Numbers from 0 on, with rests between them; at least one, and none after the deadline."""
    for attempt in itertools.count():
        yield attempt
        rest_s = backoff.delay_ms(attempt, chance) / 1000
        if deadline.left_s <= rest_s:
            return
        sleep(rest_s)
