"""What a loop of one's own was handed and has not answered for. Threads share it."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from penstock.client.app.places import Place, Spot, spot_of

__all__ = ["InHand"]


class InHand:
    """Positions wait for all that is here: with the user, or resting until it is to be handed out again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Spot, Any] = {}
        self._earlier: dict[Spot, int] = {}
        self._resting: list[tuple[float, int, Any]] = []
        self._numbers = count()
        #: Went to another member without an answer, since somebody last asked.
        self._gone = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, raws: Iterable[Any]) -> None:
        with self._lock:
            for raw in raws:
                self._open[spot_of(raw)] = raw

    def has(self, raw: Any) -> bool:
        """Not, once it was answered for, or its partition has gone; the same message read again is another one."""
        with self._lock:
            return self._open.get(spot_of(raw)) is raw

    def done(self, raw: Any) -> None:
        with self._lock:
            self._open.pop(spot_of(raw), None)
            self._earlier.pop(spot_of(raw), None)

    def done_all(self) -> int:
        """All that the user has. Returns how many of them had gone elsewhere before."""
        with self._lock:
            resting = {spot_of(raw) for _, _, raw in self._resting}
            self._open = {key: raw for key, raw in self._open.items() if key in resting}
            gone, self._gone = self._gone, 0
            return gone

    def rest(self, raw: Any, until_s: float, *, counts: bool = True) -> None:
        """It `counts` where somebody has tried it."""
        with self._lock:
            if counts:
                self._earlier[spot_of(raw)] = self._earlier.get(spot_of(raw), 0) + 1
            heapq.heappush(self._resting, (until_s, next(self._numbers), raw))

    def earlier(self, raw: Any) -> int:
        """How often it was handed out before, and came back."""
        return self._earlier.get(spot_of(raw), 0)

    def rested(self, now_s: float, count_max: int) -> list[Any]:
        """Whose time has come."""
        found: list[Any] = []
        with self._lock:
            while self._resting and self._resting[0][0] <= now_s and len(found) < count_max:
                found.append(heapq.heappop(self._resting)[2])
        return found

    def wait_s(self, now_s: float, most_s: float) -> float:
        """Until the next has rested."""
        with self._lock:
            return min(most_s, max(self._resting[0][0] - now_s, 0.0)) if self._resting else most_s

    def unanswered(self) -> list[Any]:
        with self._lock:
            return list(self._open.values())

    def forget(self, places: Sequence[Place]) -> int:
        """How many of them there were."""
        with self._lock:
            before = len(self._open)
            self._open = {key: raw for key, raw in self._open.items() if key[:2] not in places}
            self._earlier = {key: times for key, times in self._earlier.items() if key in self._open}
            self._resting = [each for each in self._resting if spot_of(each[2]) in self._open]
            heapq.heapify(self._resting)
            return before - len(self._open)

    def lose(self, places: Sequence[Place]) -> int:
        """To another member; how many, which `done_all` tells too."""
        lost = self.forget(places)
        with self._lock:
            self._gone += lost
        return lost
