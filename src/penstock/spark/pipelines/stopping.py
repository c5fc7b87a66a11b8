"""How a run is told to end: by a signal, by a wish on the board, by another runner that takes it over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from penstock.client.signals import SignalEvent

_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopping:
    """Somebody wants it to end, and why."""

    def __init__(self) -> None:
        self._event = SignalEvent()
        self.reason = ""

    @property
    def is_wanted(self) -> bool:
        return self._event.is_set()

    def want(self, reason: str) -> None:
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)


class StopNow(BaseException):
    """A second signal: not even the batch is waited for."""


@contextmanager
def signals_of(stopping: Stopping) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # who runs several in one process stops them in another way
        return
    before = {number: signal.getsignal(number) for number in _ENDING}
    take_signals(stopping)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def take_signals(stopping: Stopping) -> None:
    """A session of Spark takes Ctrl-C for itself."""
    if threading.current_thread() is not threading.main_thread():
        return

    def handle(number: int, _frame: object) -> None:
        if stopping.is_wanted:
            raise StopNow
        stopping.want(signal.Signals(number).name)

    for number in _ENDING:
        # Who started us with nohup does not want us to notice that the terminal is gone.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)
