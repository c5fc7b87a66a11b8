"""How long to try, and how long to rest in between: the one backoff of the client side."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

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
