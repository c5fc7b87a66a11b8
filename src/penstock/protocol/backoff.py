"""Exponential backoff: how long to wait before the next attempt. Clients and brokers share it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

__all__ = ("ExponentialBackoff",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialBackoff:
    """A delay that doubles with every attempt up to a cap, plus a random part that spreads the clients' retries."""

    base_ms: float = 50
    cap_ms: float = 1_000

    def delay_ms(self, attempt: int, chance: Random) -> float:
        """The delay after `attempt`, counted from 0: min(cap, base * 2^attempt) + random(0, base)."""
        return self.minimum_ms(attempt) + chance.uniform(0, self.base_ms)

    def longest_ms(self, attempt: int) -> float:
        """The longest delay that `delay_ms` may return."""
        return self.minimum_ms(attempt) + self.base_ms

    def minimum_ms(self, attempt: int) -> float:
        """The delay without its random part."""
        # 2^64 exceeds every cap, and a float overflows at 2^1024.
        return min(self.cap_ms, self.base_ms * 2.0 ** min(attempt, 64))
