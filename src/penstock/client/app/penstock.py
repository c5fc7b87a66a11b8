"""An application: what it publishes, and what it subscribes to."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, Self, TypeVar

from penstock.client.app.consumption import Consumption
from penstock.client.app.exactly import Draft, drafts
from penstock.client.app.figures import Figures
from penstock.client.app.plain import PlainConsumer
from penstock.client.app.plain_async import AsyncConsumer
from penstock.client.app.plain_opening import open_consumer
from penstock.client.app.promises import Promise
from penstock.client.app.publishing import Headers, Published, header_list
from penstock.client.app.resources import Resources
from penstock.client.app.settings import ApplicationError, checked
from penstock.client.app.sharing import Sharing
from penstock.client.app.subscription import Subscription, subscription
from penstock.client.app.waits import WaitReporter
from penstock.client.letters import Header
from penstock.client.payloads import encode
from penstock.client.topics import BROKER_DEFAULT, NewTopic, create_topics

__all__ = ["Penstock"]

_LOG: Final = logging.getLogger("penstock.client")
_PUBLISH_S: Final = 300.0
_LOOK_S: Final = 0.2
_CLOSE_S: Final = 30.0
_IN_TRANSACTION: Final = Published("", -1, -1)

Handler = TypeVar("Handler", bound=Callable[..., Any])


class Penstock:
    """Publishes and subscribes on one cluster, of Penstock or Apache Kafka.

    `settings` are librdkafka's, for security, batching, compression and limits; what a contract depends on is not
    among them. Threads may share it.
    """

    def __init__(
        self, bootstrap: str, *, name: str = "penstock", settings: Mapping[str, Any] | None = None
    ) -> None:
        self._resources = Resources(bootstrap, name, checked(settings))
        self._subscriptions: list[Subscription] = []
        self._running: list[Consumption] = []
        self._waits: WaitReporter | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()

    # -- publishing ----------------------------------------------------------------------------------

    def publish(
        self,
        topic: str,
        value: object,
        *,
        key: str | bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp: datetime | None = None,
    ) -> Published:
        """Returns when the brokers have it, with its place. None as a value is a tombstone.

        In a handler that is exactly-once it becomes part of the transaction, and its offset is not known yet (-1).
        Raises PayloadError, NotPublished.
        """
        key, data, moment_ms = _as_bytes(key, value, timestamp)
        with self._resources.spans.publish(topic, header_list(headers), key=key) as told:
            sent = self._send(topic, data, key, told, partition, moment_ms)
            return self._resources.await_published(sent, _PUBLISH_S)

    def publish_soon(
        self,
        topic: str,
        value: object,
        *,
        key: str | bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp: datetime | None = None,
    ) -> Future[Published]:
        """Returns at once: many together make large batches. The future has the place, or raises NotPublished."""
        key, data, moment_ms = _as_bytes(key, value, timestamp)
        with self._resources.spans.publish(topic, header_list(headers), key=key) as told:
            return self._send(topic, data, key, told, partition, moment_ms)

    async def apublish(self, topic: str, value: object, **more: Any) -> Published:
        """`publish` for coroutines."""
        return await asyncio.wrap_future(self.publish_soon(topic, value, **more))

    def _send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: list[Header],
        partition: int | None,
        timestamp_ms: int | None,
    ) -> Future[Published]:
        """At once, or with the transaction of the handler that publishes it."""
        held = drafts.get()
        if held is not None:
            held.append(Draft(topic, value, key, headers, partition, timestamp_ms))
            return _in_transaction(topic)
        return self._resources.publisher().send(
            topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms
        )

    def flush(self, timeout_s: float = _CLOSE_S) -> int:
        """Waits for what was published soon; how much is still on its way."""
        return self._resources.publisher().flush(timeout_s)

    # -- subscribing ---------------------------------------------------------------------------------

    def subscribe(self, *topics: str, group: str, **how: Any) -> Callable[[Handler], Handler]:
        """A decorator for handlers; `subscription()` lists what may be given. Raises ApplicationError."""

        def register(handler: Handler) -> Handler:
            self._subscriptions.append(subscription(handler, topics, group=group, **how))
            return handler

        return register

    def consumer(self, *topics: str, group: str, **how: Any) -> PlainConsumer:
        """For a loop of one's own; `open_consumer()` lists what may be given. Raises ApplicationError, ClientError."""
        return open_consumer(self._resources, topics, group=group, **how)

    def aconsumer(self, *topics: str, group: str, **how: Any) -> AsyncConsumer:
        """`consumer` for coroutines: `async with app.aconsumer(...) as c`."""
        return AsyncConsumer(lambda: open_consumer(self._resources, topics, group=group, **how))

    @property
    def subscriptions(self) -> tuple[Subscription, ...]:
        return tuple(self._subscriptions)

    def figures(self) -> dict[str, Figures]:
        """By the handler's name: what each has done so far."""
        return {each.name: self._resources.figures_of(each) for each in self._subscriptions}

    @property
    def is_running(self) -> bool:
        """Since `start`, and no subscription has ended by itself; `close` raises why one did."""
        return bool(self._running) and all(each.is_alive for each in self._running)

    def run(self) -> None:
        """Until SIGTERM, SIGINT or `stop`: then what is in hand is finished and committed.

        Raises what ended a subscription, where one has ended by itself. A handler that raises SystemExit,
        KeyboardInterrupt or the like ends the application: its message counts as not handled, and the exit code
        is never 0.
        """
        with _signals(self.stop):
            self.start()
            try:
                self._wait()
            finally:
                self._finish()

    def _wait(self) -> None:
        while not self._stop.wait(_LOOK_S) and self.is_running:
            pass

    async def arun(self) -> None:
        """`run` for coroutines; it ends when it is cancelled."""
        loop = asyncio.get_running_loop()
        self.start()
        try:
            await loop.run_in_executor(None, self._wait)
        finally:
            self.stop()
            await loop.run_in_executor(None, self._finish)

    def start(self) -> None:
        """Begin, in threads of their own; `close` ends them."""
        if not self._subscriptions:
            raise ApplicationError("nothing is subscribed to")
        with self._lock:
            if self._running:
                raise ApplicationError("the application runs already")
            self._stop.clear()
            self._resources.ending.clear()
            self._running = [self._consumption(each) for each in self._subscriptions]
            for each in self._running:
                each.start()
            self._waits = WaitReporter(self._running, self._resources)
            self._waits.start()

    def _consumption(self, subscription: Subscription) -> Consumption:
        return (Sharing if subscription.share else Consumption)(subscription, self._resources)

    def stop(self) -> None:
        """From any thread, or a signal: begin nothing more."""
        self._stop.set()

    def _finish(self) -> None:
        self._stop.set()
        with self._lock:
            running, self._running = self._running, []
            waits, self._waits = self._waits, None
        if waits is not None:
            waits.end()
        if running:
            self._resources.ending.set()
        for each in running:
            each.stop()
        for each in running:
            each.end()
        errors = [each.error for each in running if each.error is not None]
        if errors:
            raise _ending(errors[0])

    # -- topics and the end --------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = BROKER_DEFAULT,
        replicas: int = BROKER_DEFAULT,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Returns when it can be used. Raises Refused where it is there, or cannot be."""
        cluster = self._resources.cluster()
        try:
            create_topics(
                cluster,
                [
                    NewTopic(
                        name=name, partitions=partitions, replicas=replicas, settings=dict(settings or {})
                    )
                ],
            )
        finally:
            cluster.close()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Ends subscriptions that `start` began, and waits for what was published."""
        try:
            self._finish()
        finally:
            left = self._resources.close(timeout_s)
            if left:
                _LOG.warning("%d messages were not published", left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ending(error: BaseException) -> BaseException:
    """What a handler raised to end the process ends it, but never as if all were well."""
    if isinstance(error, SystemExit) and not error.code:
        failed = SystemExit(1)
        failed.__cause__ = error
        return failed
    return error


def _in_transaction(topic: str) -> Future[Published]:
    done: Future[Published] = Promise()
    done.set_result(_IN_TRANSACTION._replace(topic=topic))
    return done


def _as_bytes(
    key: str | bytes | None, value: object, timestamp: datetime | None
) -> tuple[bytes | None, bytes | None, int | None]:
    """Raises PayloadError."""
    return (
        key.encode() if isinstance(key, str) else key,
        None if value is None else encode(value),
        None if timestamp is None else round(timestamp.timestamp() * 1000),
    )


@contextmanager
def _signals(stop: Callable[[], None]) -> Iterator[None]:
    """In the main thread, for as long as it runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
