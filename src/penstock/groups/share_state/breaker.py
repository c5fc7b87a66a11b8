"""The breaker of one group's dead letters: how many may be buried now, by rate and by their share of the traffic.

It bounds a flood, such as a whole topic that is rejected because something behind the consumers is down: what is over
the bounds waits, nothing is dropped. A few are let through at any time, so that single poison messages are not held up
in a group with little traffic, and so that one that is held up goes on in the end. The bounds hold for what one
coordinator buries.
"""

from typing import Final

#: Traffic counts for so long.
_WINDOW_MS: Final = 60_000
_SLOTS: Final = 60
#: So many in a window are let through, whatever their share of the traffic is.
FREE: Final = 10
#: How soon traffic may have changed enough to ask again.
_LOOK_MS: Final = 1_000


class _Window:
    """A sum over the last minute, in slots of a second."""

    __slots__ = ("_slots", "total")

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self.total = 0

    def add(self, count: int, at_ms: int) -> None:
        slot = _slot(at_ms)
        self._slots[slot] = self._slots.get(slot, 0) + count
        self.total += count
        if len(self._slots) > 2 * _SLOTS:  # nobody has asked for long
            self.forget_before(at_ms)

    def take_back(self, count: int, added_at_ms: int) -> None:
        """What was added then was too much, and counts no longer if it still does."""
        if _slot(added_at_ms) in self._slots:
            self.add(-count, added_at_ms)

    def forget_before(self, now_ms: int) -> None:
        oldest = _slot(now_ms) - _SLOTS
        for slot in [slot for slot in self._slots if slot <= oldest]:
            self.total -= self._slots.pop(slot)


def _slot(at_ms: int) -> int:
    return at_ms * _SLOTS // _WINDOW_MS


class Breaker:
    __slots__ = ("_buried", "_finished", "_tokens", "_tokens_at_ms", "rate_max", "share_max")

    def __init__(self, rate_max: float | None = None, share_max: float | None = None) -> None:
        """Dead letters per second, and as a part of what is finished; None has no bound."""
        self.rate_max = rate_max
        self.share_max = share_max
        self._finished = _Window()
        self._buried = _Window()
        self._tokens = self._burst
        self._tokens_at_ms: int | None = None

    def __repr__(self) -> str:
        return f"<Breaker of {self.rate_max}/s and {self.share_max}, {self._tokens:.1f} tokens>"

    @property
    def _burst(self) -> float:
        """A second's worth at once."""
        return max(self.rate_max or 0.0, 1.0)

    def configure(self, rate_max: float | None, share_max: float | None) -> None:
        if (rate_max, share_max) != (self.rate_max, self.share_max):
            self.rate_max, self.share_max = rate_max, share_max
            self._tokens = min(self._tokens, self._burst)

    def finished(self, count: int, at_ms: int) -> None:
        """So many records of the group were acknowledged or given up then."""
        self._finished.add(count, at_ms)

    def take(self, wanted: int, now_ms: int) -> int:
        """How many of these may be buried now. They count at once, as others may ask before they are."""
        self._refill(now_ms)
        self._finished.forget_before(now_ms)
        self._buried.forget_before(now_ms)
        allowed = wanted
        if self.rate_max is not None:
            allowed = min(allowed, int(self._tokens))
        if self.share_max is not None:
            bound = max(int(self.share_max * self._finished.total), FREE)
            allowed = min(allowed, max(bound - self._buried.total, 0))
        if self.rate_max is not None:
            self._tokens -= allowed  # without a rate nobody runs into debt that would count under one
        self._buried.add(allowed, now_ms)
        return allowed

    def give_back(self, count: int, taken_at_ms: int) -> None:
        """So many of those that were allowed then are not buried after all."""
        if self.rate_max is not None:
            self._tokens = min(self._tokens + count, self._burst)
        self._buried.take_back(count, taken_at_ms)

    def wait_ms(self) -> int:
        """How long until it is worth asking again, when none was allowed."""
        if self.rate_max and self._tokens < 1:
            return min(int((1 - self._tokens) / self.rate_max * 1000) + 1, _LOOK_MS)
        return _LOOK_MS

    def _refill(self, now_ms: int) -> None:
        if self.rate_max is None:
            return
        if self._tokens_at_ms is not None:
            passed_ms = max(now_ms - self._tokens_at_ms, 0)
            self._tokens = min(self._tokens + self.rate_max * passed_ms / 1000, self._burst)
        self._tokens_at_ms = now_ms
