"""Named deadlines as plain data: the caller has the clock and queries which deadlines are due."""

import heapq
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)


class TimerKey(NamedTuple):
    kind: str  # "expire" belongs to the shard; each kind of group defines its own others
    group_id: str = ""
    member_id: str = ""


class Timers(Generic[Key]):
    """At most one deadline per key. Moving a deadline to a later time costs nothing until the old time comes.

    The heap holds one entry per key that is no later than the key's deadline; an entry that comes up early
    is put back. Heartbeats move deadlines far more often than a deadline expires.
    """

    __slots__ = ("_deadlines", "_heap", "_order", "_queued")

    def __init__(self) -> None:
        self._deadlines: dict[Key, int] = {}
        self._queued: dict[Key, int] = {}
        self._heap: list[tuple[int, int, Key]] = []
        # Equal deadlines come up in the order in which they were queued, whatever the keys.
        self._order = 0

    def __repr__(self) -> str:
        return f"Timers({self._deadlines})"

    def schedule(self, key: Key, at_ms: int) -> None:
        self._deadlines[key] = at_ms
        queued_ms = self._queued.get(key)
        if queued_ms is None or queued_ms > at_ms:
            self._queue(key, at_ms)

    def cancel(self, key: Key) -> None:
        self._deadlines.pop(key, None)

    def deadline_ms(self, key: Key) -> int | None:
        return self._deadlines.get(key)

    def next_deadline_ms(self) -> int | None:
        self._settle()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ms: int) -> Key | None:
        """Remove and return one key whose deadline has passed, earliest first."""
        self._settle()
        if not self._heap or self._heap[0][0] > now_ms:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._queued[key], self._deadlines[key]
        return key

    def shift(self, by_ms: int) -> None:
        """Shift every deadline, so that setting the clock changes no timeout."""
        deadlines, self._deadlines, self._queued, self._heap = self._deadlines, {}, {}, []
        for key, at_ms in sorted(deadlines.items(), key=lambda item: item[1]):
            self.schedule(key, at_ms + by_ms)

    def _queue(self, key: Key, at_ms: int) -> None:
        self._order += 1
        self._queued[key] = at_ms
        heapq.heappush(self._heap, (at_ms, self._order, key))

    def _settle(self) -> None:
        """Bring an entry with its key's current deadline to the top of the heap."""
        while self._heap:
            at_ms, _, key = self._heap[0]
            stale = self._queued.get(key) != at_ms
            deadline_ms = self._deadlines.get(key)
            if not stale and deadline_ms == at_ms:
                return
            heapq.heappop(self._heap)
            if stale:
                continue
            del self._queued[key]
            if deadline_ms is not None:
                self._queue(key, deadline_ms)
