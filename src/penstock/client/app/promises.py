"""Futures of what is published: light, since most of them are looked at once, when they are done."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, Final, TypeVar

__all__ = ["Promise"]

T = TypeVar("T")

#: As `concurrent.futures` names them.
_PENDING: Final = "PENDING"
_FINISHED: Final = "FINISHED"
#: What waiting for a future needs, made when somebody does.
_FOR_WAITING: Final[dict[str, Any]] = {
    "_condition": threading.Condition,
    "_waiters": list,
    "_done_callbacks": list,
}
_LOCK: Final = threading.Lock()


class Promise(Future[T]):
    """What is on its way cannot be called back, so it cannot be cancelled."""

    _is_watched = False

    def __init__(self) -> None:
        # Not that of Future: a condition and two lists for each message take longer than to send it.
        self._state = _PENDING
        self._result: T | None = None
        self._exception: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        make = _FOR_WAITING.get(name)
        if make is None:
            raise AttributeError(name)
        with _LOCK:
            self._is_watched = True
            return self.__dict__.setdefault(name, make())

    def settle_unseen(self, result: T) -> bool:
        """Unless somebody looks on already, who is then still to be told."""
        with _LOCK:
            if not self._is_watched:
                self._result, self._state = result, _FINISHED
            return not self._is_watched

    def set_result(self, result: T) -> None:
        if not self.settle_unseen(result):
            super().set_result(result)

    def result(self, timeout: float | None = None) -> T:
        if self._state == _FINISHED and self._exception is None:
            return self._result  # type: ignore[return-value]
        return super().result(timeout)

    def done(self) -> bool:
        return self._state == _FINISHED

    def cancel(self) -> bool:
        return False
