"""How often a failed message is tried again, and how long it rests in between, as an application declares it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from penstock.client.durations import Duration, seconds
from penstock.client.retrying import Backoff as Rests

__all__ = ["ATTEMPTS_MAX", "Backoff"]

#: Every retry has a topic of its own.
ATTEMPTS_MAX: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """After attempt n, counted from 1, a message rests for min(cap, base * 2^(n-1)) + random(0, base).

    `attempts` counts all deliveries: 5 are the first and four retries, 1 means none. Raises ValueError for what
    cannot be.
    """

    base: Duration = "1s"
    cap: Duration = "5m"
    attempts: int = 5

    def __post_init__(self) -> None:
        base_s, cap_s = seconds(self.base), seconds(self.cap)
        if base_s == 0:
            raise ValueError(f"base={self.base!r} leaves no rest between attempts: it is longer than 0")
        if cap_s < base_s:
            raise ValueError(f"cap={self.cap!r} is shorter than base={self.base!r}")
        if type(self.attempts) is not int or not 1 <= self.attempts <= ATTEMPTS_MAX:
            raise ValueError(f"attempts={self.attempts!r} is a whole number from 1 to {ATTEMPTS_MAX}")

    def delay_s(self, attempt: int, chance: Random) -> float:
        """The rest after `attempt`, counted from 1, has failed."""
        assert attempt >= 1, f"attempts count from 1, not {attempt}"
        return self._rests().delay_ms(attempt - 1, chance) / 1000

    def longest_s(self) -> float:
        """All rests of one message together at their longest: no retry comes later than that, if none is late."""
        rests = self._rests()
        return sum(rests.longest_ms(attempt) for attempt in range(self.attempts - 1)) / 1000

    def _rests(self) -> Rests:
        return Rests(base_ms=seconds(self.base) * 1000, cap_ms=seconds(self.cap) * 1000)
