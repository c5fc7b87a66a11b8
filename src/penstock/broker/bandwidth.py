"""Bounds on bytes per second, of what followers fetch and of what leaders send to followers that are not in sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.broker.dynamic_settings import DynamicSettings

#: Apache Kafka's default of a throttle's rate, which is no bound.
_NO_BOUND: Final = (1 << 63) - 1


def throttled_rate(settings: DynamicSettings, name: str) -> Callable[[], int]:
    """The rate of a throttle as `Bandwidth` wants it: -1 is no bound."""

    def rate() -> int:
        found = settings.integer(name)
        return -1 if found == _NO_BOUND else found

    return rate


class Bandwidth:
    """A bucket that fills at a bounded rate and holds a second's worth; what was taken too much is waited off."""

    __slots__ = ("_bytes_per_second", "_clock", "_left", "_limit", "_then")

    def __init__(self, limit: Callable[[], int], clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._bytes_per_second = -1
        self._left = 0.0
        self._then = clock()

    @property
    def is_limited(self) -> bool:
        limit = self._limit()
        if limit != self._bytes_per_second:
            self._bytes_per_second = limit
            self._left = float(max(limit, 0))
            self._then = self._clock()
        return limit >= 0

    def left(self) -> tuple[int, float]:
        """Bytes that may be fetched now, and seconds until there are some."""
        now, rate = self._clock(), self._bytes_per_second
        self._left = min(float(rate), self._left + (now - self._then) * rate)
        self._then = now
        # A rate of nothing stops moving altogether, until an operator allows more.
        return int(self._left), 1.0 if rate <= 0 else min(1.0, max(0.01, (1 - self._left) / rate))

    def take(self, size: int) -> None:
        self._left -= size
