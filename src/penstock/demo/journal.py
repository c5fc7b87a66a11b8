"""What happened, for people: the last events with their times; each trouble is told when it comes and when it goes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from penstock.demo.parts import Part
from penstock.demo.scene import Event

_KEPT: Final = 100


class Journal:
    """Written to by all parts."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=_KEPT)
        self._troubles: dict[str, str | None] = {}
        self._count = 0

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str, *, is_trouble: bool = False) -> None:
        with self._lock:
            self._events.append(Event(at_s=self.now_s, text=text, is_trouble=is_trouble))
            self._count += 1

    def watch(self, parts: Iterable[Part]) -> None:
        """Tell of what has changed with these."""
        for part in parts:
            trouble = part.trouble
            if trouble != self._troubles.get(part.name):
                self._troubles[part.name] = trouble
                if trouble is not None:
                    self.say(f"{part.name}: {trouble}", is_trouble=True)
                else:
                    self.say(f"{part.name} works again")

    @property
    def events(self) -> tuple[Event, ...]:
        with self._lock:
            return tuple(self._events)

    def since(self, seen: int) -> tuple[int, tuple[Event, ...]]:
        """How many there have been, and those after the first `seen` of them that are still kept."""
        with self._lock:
            new = self._count - seen
            return self._count, tuple(self._events)[-new:] if new else ()
