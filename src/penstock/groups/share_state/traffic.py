"""How many records groups have finished lately, for who bounds a part of them."""

from collections import deque
from typing import Final, NamedTuple

#: Told by the second, and of about the last minute in which there was some.
_SECOND_MS: Final = 1_000
_SECONDS_MAX: Final = 61


class Finished(NamedTuple):
    """How many records of each group became final in the second that began then."""

    at_ms: int
    counts: dict[str, int]


class Traffic:
    __slots__ = ("_finished", "_second_ms")

    def __init__(self) -> None:
        self._second_ms = 0
        self._finished: deque[Finished] = deque(maxlen=_SECONDS_MAX)

    def now(self, now_ms: int) -> None:
        """What is finished from here on is of this time."""
        self._second_ms = now_ms - now_ms % _SECOND_MS

    def finish(self, group: str, count: int) -> None:
        if not self._finished or self._finished[-1].at_ms != self._second_ms:
            self._finished.append(Finished(self._second_ms, {}))
        counts = self._finished[-1].counts
        counts[group] = counts.get(group, 0) + count

    def take(self) -> tuple[Finished, ...]:
        finished = tuple(self._finished)
        self._finished.clear()
        return finished
