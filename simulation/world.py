"""The event queue: simulated milliseconds, one seeded source of chance, and lives that can freeze or end."""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any, Final

#: How many of the latest events a failure shows.
_MEMORY: Final = 80

Note = tuple[int, str, tuple[Any, ...]]


class Life:
    """What one process does, from its start to its end; events of an ended life never happen."""

    __slots__ = ("is_frozen", "is_over", "name", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_over = False
        self.is_frozen = False
        self.waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def __repr__(self) -> str:
        return f"<Life {self.name}{' over' if self.is_over else ''}{' frozen' if self.is_frozen else ''}>"


class World:
    __slots__ = ("_queue", "_serial", "after_step", "events", "now_ms", "random", "recent", "tell")

    def __init__(self, seed: int, *, tell: Callable[[str], None] | None = None) -> None:
        self.random = Random(seed)
        self.now_ms = 0
        self.events = 0
        self.recent: deque[Note] = deque(maxlen=_MEMORY)
        self.tell = tell
        #: Called after every event: the invariants that can only be judged between steps.
        self.after_step: Callable[[], None] | None = None
        self._queue: list[tuple[int, int, Life, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def __repr__(self) -> str:
        return f"<World at {self.now_ms} ms, {self.events} events, {len(self._queue)} ahead>"

    def serial(self) -> int:
        """A number never given before."""
        self._serial += 1
        return self._serial

    def after(self, delay_ms: int, life: Life, call: Callable[..., None], *args: Any) -> None:
        assert delay_ms >= 0, delay_ms
        self._serial += 1
        heappush(self._queue, (self.now_ms + delay_ms, self._serial, life, call, args))

    def draw(self, below: int) -> int:
        """A number from 0 to below - 1."""
        return int(self.random.random() * below)

    def between(self, least: int, most: int) -> int:
        return least + int(self.random.random() * (most - least + 1))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def note(self, what: str, *details: Any) -> None:
        """For whoever reads the story of a failure; formatted only when somebody does."""
        self.recent.append((self.now_ms, what, details))
        if self.tell is not None:
            self.tell(told(self.recent[-1]))

    def freeze(self, life: Life) -> None:
        life.is_frozen = True

    def thaw(self, life: Life) -> None:
        life.is_frozen = False
        waiting, life.waiting = life.waiting, []
        for call, args in waiting:
            self.after(0, life, call, *args)

    def run(self, until_ms: int, is_done: Callable[[], bool] | None = None) -> bool:
        """Let everything happen up to a time; True as soon as `is_done` says so."""
        queue, after_step = self._queue, self.after_step
        while queue and queue[0][0] <= until_ms:
            self.now_ms, _, life, call, args = heappop(queue)
            if life.is_over:
                continue
            if life.is_frozen:
                life.waiting.append((call, args))
                continue
            self.events += 1
            call(*args)
            if after_step is not None:
                after_step()
            if is_done is not None and is_done():
                return True
        self.now_ms = max(self.now_ms, until_ms)
        return False


def told(note: Note) -> str:
    at_ms, what, details = note
    return f"{at_ms:>7} ms  {what} {' '.join(str(detail) for detail in details)}"
