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

    def set_result(self, result: T) -> None:
        with _LOCK:
            is_watched = self._is_watched
            if not is_watched:
                self._result, self._state = result, _FINISHED
        if is_watched:
            super().set_result(result)

    def result(self, timeout: float | None = None) -> T:
        if self._state == _FINISHED and self._exception is None:
            return self._result  # type: ignore[return-value]
        return super().result(timeout)

    def done(self) -> bool:
        return self._state == _FINISHED

    def cancel(self) -> bool:
        return False
