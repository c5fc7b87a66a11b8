"""Replies that wait for their records to be committed, oldest first, and what happens when that takes too long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class CommitWait:
    """Stalled from when the oldest has waited for too long until all of them are committed.

    One timer, set only while somebody waits: what is committed in time costs next to nothing.
    """

    __slots__ = ("_began", "_loop", "_on_stall", "_timeout_s", "_timer", "is_stalled")

    def __init__(self, timeout_s: float, on_stall: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._began: deque[float] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.is_stalled = False

    def begin(self) -> None:
        now = self._loop.time()
        self._began.append(now)
        if self._timer is None and not self.is_stalled:
            self._timer = self._loop.call_at(now + self._timeout_s, self._look)

    def end(self) -> float:
        """The oldest is committed. Returns how many seconds a stall lasted that this has ended, or 0."""
        began = self._began.popleft()
        if not self.is_stalled or self._began:
            return 0.0
        self.is_stalled = False
        return self._loop.time() - began

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if not self._began:
            return
        due = self._began[0] + self._timeout_s
        if due > self._loop.time():
            self._timer = self._loop.call_at(due, self._look)
        else:
            self.is_stalled = True
            self._on_stall()
