"""The circuit breaker around a handler: while what it depends on fails, messages wait instead of using up attempts."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any, Final

from penstock.client.app.failing import Reject
from penstock.client.app.figures import Figures
from penstock.client.app.handling import Call, Unreadable
from penstock.client.breaker import Breaker, BreakerState, Phase, Verdict

__all__ = ["Guard", "Stopped", "guarded", "guarded_async"]

_LOOK_S: Final = 0.2


class Stopped(Exception):
    """The application ends while a message waits: it was not tried."""


class Guard:
    """Threads of handlers share it."""

    def __init__(self, breaker: Breaker, figures: Figures, stopping: threading.Event) -> None:
        self._state = BreakerState(breaker)
        self._figures = figures
        self._stopping = stopping
        self._lock = threading.Lock()

    def ask(self) -> Verdict:
        """Raises Stopped."""
        if self._stopping.is_set():
            raise Stopped
        with self._lock:
            return self._state.allow(time.monotonic())

    def succeeded(self, turn: int) -> None:
        with self._lock:
            self._state.succeeded(time.monotonic(), turn)

    def failed(self, error: BaseException, turn: int) -> None:
        """What is wrong with a message says nothing of what the handler depends on."""
        with self._lock:
            if isinstance(error, (Unreadable, Reject)) or not isinstance(error, Exception):
                self._state.undecided(turn)
                return
            was_open = self._state.phase is Phase.OPEN
            self._state.failed(time.monotonic(), turn)
            if self._state.phase is Phase.OPEN and not was_open:
                self._figures.breaks += 1


def _rest_s(verdict: Verdict) -> float:
    if verdict.until_s is None:
        return _LOOK_S / 4
    return min(max(verdict.until_s - time.monotonic(), 0.001), _LOOK_S)


def _allowed(guard: Guard) -> Verdict:
    verdict = guard.ask()
    while not verdict.go:
        time.sleep(_rest_s(verdict))
        verdict = guard.ask()
    return verdict


async def _allowed_async(guard: Guard) -> Verdict:
    verdict = guard.ask()
    while not verdict.go:
        await asyncio.sleep(_rest_s(verdict))
        verdict = guard.ask()
    return verdict


def guarded(call: Call, guard: Guard) -> Call:
    def handle(raw: Any, **handles: Any) -> Any:
        verdict = _allowed(guard)
        try:
            result = call(raw, **handles)
        except BaseException as error:
            guard.failed(error, verdict.turn)
            raise
        guard.succeeded(verdict.turn)
        return result

    return handle


def guarded_async(call: Call, guard: Guard) -> Call:
    async def handle(raw: Any, **handles: Any) -> Any:
        verdict = await _allowed_async(guard)
        try:
            result = await call(raw, **handles)
        except BaseException as error:
            guard.failed(error, verdict.turn)
            raise
        guard.succeeded(verdict.turn)
        return result

    return handle
