"""The plain calls for coroutines. Each runs in one and the same thread, since the consumer belongs to one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import ParamSpec, Self, TypeVar

from penstock.client.app.figures import Figures
from penstock.client.app.message import Message
from penstock.client.app.plain import PlainConsumer
from penstock.client.app.settings import ApplicationError
from penstock.client.durations import Duration

__all__ = ["AsyncConsumer"]

P = ParamSpec("P")
T = TypeVar("T")


class AsyncConsumer:
    """`async with`: it joins on the way in. What a cancelled `poll` had got comes with the next one."""

    def __init__(self, make: Callable[[], PlainConsumer]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-consumer")
        self._consumer: PlainConsumer | None = None

    @property
    def figures(self) -> Figures:
        return self._opened().figures

    async def poll(self, max: int = 100, timeout: Duration = "1s") -> list[Message]:  # noqa: ASYNC109
        future = self._thread.submit(self._opened().poll, max, timeout)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.add_done_callback(self._give_back)
            raise

    def _give_back(self, future: Future[list[Message]]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._opened().unpoll(future.result())

    async def ack(self, message: Message) -> None:
        await self._call(self._opened().ack, message)

    async def nack(self, message: Message, delay: Duration | None = None, reason: str = "") -> None:
        await self._call(self._opened().nack, message, delay, reason)

    async def reject(self, message: Message, reason: str = "") -> None:
        await self._call(self._opened().reject, message, reason)

    async def commit(self) -> None:
        await self._call(self._opened().commit)

    async def seek(
        self, topic: str, partition: int, *, offset: int | None = None, timestamp: datetime | None = None
    ) -> None:
        await self._call(self._opened().seek, topic, partition, offset=offset, timestamp=timestamp)

    async def close(self) -> None:
        if self._consumer is not None:
            await self._call(self._consumer.close)
        self._thread.shutdown(wait=False)

    async def _call(self, function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Done whether or not whoever waits for it is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self._thread.submit(function, *args, **named)))

    def _opened(self) -> PlainConsumer:
        if self._consumer is None:
            raise ApplicationError("it is to be used in `async with`, which joins the group")
        return self._consumer

    async def __aenter__(self) -> Self:
        future = self._thread.submit(self._make)
        try:
            self._consumer = await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.add_done_callback(_close)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _close(future: Future[PlainConsumer]) -> None:
    """Nobody waits for it any more."""
    if not future.cancelled() and future.exception() is None:
        future.result().close()
