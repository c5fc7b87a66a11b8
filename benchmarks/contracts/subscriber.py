"""The same with the application layer: handlers that do nothing, under a contract, with its defaults."""

import threading
from collections.abc import Callable
from typing import Any

from benchmarks.contracts.messages import Order

_DONE_S = 60.0


def by_message() -> Callable[..., Any]:
    from penstock.client import Message

    def handle(message: Message) -> None:
        pass

    return handle


def by_bytes() -> Callable[..., Any]:
    def handle(payload: bytes) -> None:
        pass

    return handle


def by_order() -> Callable[..., Any]:
    def handle(order: Order) -> None:
        pass

    return handle


def by_batch() -> Callable[..., Any]:
    def handle(payloads: list[bytes]) -> None:
        pass

    return handle


def by_coroutine() -> Callable[..., Any]:
    async def handle(payload: bytes) -> None:
        pass

    return handle


def by_connection() -> Callable[..., Any]:
    def handle(payload: bytes, connection: Any) -> None:
        pass

    return handle


def by_copy() -> Callable[..., Any]:
    def handle(payload: bytes) -> bytes:
        return payload

    return handle


HANDLERS = {
    "message": by_message,
    "bytes": by_bytes,
    "order": by_order,
    "batch": by_batch,
    "coroutine": by_coroutine,
    "connection": by_connection,
    "copy": by_copy,
}


class Subscriber:
    def __init__(self, bootstrap: str, topic: str, group: str, handler: str, how: dict[str, Any]) -> None:
        from penstock.client import Backoff, Penstock

        if how.pop("retries", False):
            how["retry"] = Backoff()
        self._app = Penstock(bootstrap)
        self._app.subscribe(topic, group=group, **how)(HANDLERS[handler]())
        (self._figures,) = self._app.figures().values()
        self._group = group

    @property
    def count(self) -> int:
        return self._figures.handled

    @property
    def thread(self) -> threading.Thread:
        return next(each for each in threading.enumerate() if each.name == f"penstock-{self._group}")

    def start(self) -> None:
        self._app.start()

    def stop(self) -> None:
        self._app.close()
        unwanted = {
            name: value for name, value in self._figures.as_dict().items() if value and name != "handled"
        }
        if unwanted:
            raise RuntimeError(f"nothing was to go wrong, and there are {unwanted}")
