"""Stops a program on SIGTERM or SIGINT, with an event that a signal handler may set without taking a lock."""

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SignalEvent(threading.Event):
    """An event that a signal handler may set.

    A signal handler interrupts the main thread at any point. `threading.Event.set` takes a lock that is not reentrant:
    if the main thread holds it, in `wait` or `set`, the process hangs forever. `SimpleQueue.put` is reentrant.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._wake_ups.put(None)

    def clear(self) -> None:
        """Call this only while no thread waits."""
        self._is_set = False
        for _ in range(self._wake_ups.qsize()):
            self._wake_ups.get()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            try:
                self._wake_ups.get(timeout=timeout)
            except queue.Empty:
                return self._is_set
            self._wake_ups.put(None)  # for others that wait
        return self._is_set


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Makes SIGTERM and SIGINT call `stop` during the block. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
