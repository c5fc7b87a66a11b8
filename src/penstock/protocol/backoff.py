"""Exponential backoff: how long to wait before the next attempt. Clients and brokers share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ("Chance", "ExponentialBackoff")


class Chance(Protocol):
    """Where the random part of a delay comes from: a seeded `Random`, or the module `random`."""

    def uniform(self, a: float, b: float) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialBackoff:
    """A delay that doubles with every attempt up to a cap, plus a random part that spreads the clients' retries."""

    base_ms: float = 50
    cap_ms: float = 1_000

    def delay_ms(self, attempt: int, chance: Chance) -> float:
        """The delay after `attempt`, counted from 0: min(cap, base * 2^attempt) + random(0, base)."""
        return self.minimum_ms(attempt) + chance.uniform(0, self.base_ms)

    def spread_ms(self, attempt: int, chance: Chance, *, longest: float = 1.5) -> float:
        """The delay with a random part in proportion to it: from half to `longest` times min(cap, base * 2^attempt).

        Brokers use it, because a random part of a short base would not keep them apart once they wait for the cap.
        """
        return self.minimum_ms(attempt) * chance.uniform(0.5, longest)

    def longest_ms(self, attempt: int) -> float:
        """The longest delay that `delay_ms` may return."""
        return self.minimum_ms(attempt) + self.base_ms

    def minimum_ms(self, attempt: int) -> float:
        """The delay without its random part."""
        # 2^64 exceeds every cap, and a float overflows at 2^1024.
        return min(self.cap_ms, self.base_ms * 2.0 ** min(attempt, 64))
