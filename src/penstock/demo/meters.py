"""How fast a count grows: over the last seconds as one number, and over the last minute as a line."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Final

#: Spark's batches come every few seconds; what is shown should not jump with each.
WINDOW_S: Final = 10.0
STEP_S: Final = 3.0
STEPS: Final = 8


class Meter:
    """Fed with a total and the time, whenever there is one."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEPS + 1)
        self._recent: deque[tuple[float, int]] = deque()

    def feed(self, total: int, now_s: float) -> None:
        if self._recent and total < self._recent[-1][1]:  # it counts anew
            self._recent.clear()
            self._steps.clear()
        self._recent.append((now_s, total))
        while len(self._recent) > 2 and self._recent[1][0] <= now_s - WINDOW_S:
            self._recent.popleft()
        if not self._steps or now_s - self._steps[-1][0] >= STEP_S:
            self._steps.append((now_s, total))

    @property
    def per_s(self) -> float | None:
        """None until there are two readings."""
        if len(self._recent) < 2:
            return None
        (then, before), (now, after) = self._recent[0], self._recent[-1]
        return (after - before) / (now - then) if now > then else None

    @property
    def history(self) -> tuple[float, ...]:
        """Per second, a number for each step, the latest last."""
        steps = list(self._steps)
        return tuple(
            (after - before) / (now - then)
            for (then, before), (now, after) in itertools.pairwise(steps)
            if now > then
        )
