"""How fast records may go out: a bucket that fills at a rate, and may owe. Pure: time is an argument."""

from __future__ import annotations

from typing import Final

#: Clocks do not tell shorter times apart, so nobody could wait for them.
_WAIT_S_MIN: Final = 1e-6


class Pace:
    """At most `rate_per_s` records in every second, but for one burst of `burst` records.

    Each step waits until its records are in the bucket, or the bucket is full; what it took beyond that is owed.
    """

    def __init__(self, rate_per_s: float, *, burst: int, now_s: float) -> None:
        assert rate_per_s > 0
        assert burst > 0
        self._rate_per_s = rate_per_s
        self._burst = float(burst)
        self._level = float(burst)
        self._now_s = now_s

    def wait_s(self, records: int, now_s: float) -> float:
        """How long to wait before a step of about so many records; 0 where it may be taken now."""
        self._fill(now_s)
        missing = min(float(records), self._burst) - self._level
        wait_s = missing / self._rate_per_s
        return wait_s if wait_s >= _WAIT_S_MIN else 0.0

    def spend(self, records: int, now_s: float) -> None:
        """So many went out."""
        self._fill(now_s)
        self._level -= records

    def _fill(self, now_s: float) -> None:
        # A clock that was set back fills nothing, and takes nothing away.
        passed_s = max(0.0, now_s - self._now_s)
        self._level = min(self._burst, self._level + passed_s * self._rate_per_s)
        self._now_s = now_s
