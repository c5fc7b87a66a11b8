"""An application: what it publishes, and what it subscribes to."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final, Self, TypeVar

from penstock.client.app.consumption import Consumption
from penstock.client.app.delivery import Delivery
from penstock.client.app.exactly import Draft, drafts
from penstock.client.app.figures import Figures
from penstock.client.app.plain import PlainConsumer
from penstock.client.app.plain_async import AsyncConsumer
from penstock.client.app.plain_opening import UNANSWERED_MAX, open_consumer
from penstock.client.app.promises import Promise
from penstock.client.app.publishing import FULL_REST_S, Headers, Published, Publisher, header_list
from penstock.client.app.resources import Resources
from penstock.client.app.settings import Acks, ApplicationError, checked, checked_acks
from penstock.client.app.sharing import Sharing
from penstock.client.app.subscription import Subscription, check_together, subscription
from penstock.client.app.waits import PlainCall, PlainWait, WaitReporter
from penstock.client.backoff import Backoff
from penstock.client.breaker import Breaker
from penstock.client.durations import Duration
from penstock.client.ledgers import Ledger
from penstock.client.letters import Header
from penstock.client.payloads import encode
from penstock.client.salting import salted
from penstock.client.signals import SignalEvent, ended_by_signals
from penstock.client.stores import DedupeStore
from penstock.client.topics import BROKER_DEFAULT, NewTopic, create_topics

__all__ = ["Penstock", "is_run_elsewhere"]

_LOG: Final = logging.getLogger("penstock.client")
_PUBLISH_S: Final = 300.0
_LOOK_S: Final = 0.2
_CLOSE_S: Final = 30.0
_IN_TRANSACTION: Final = Published("", -1, -1)
#: While a program is imported by what runs its application: one that ran itself meanwhile would never be imported.
is_run_elsewhere: Final[ContextVar[bool]] = ContextVar("is_run_elsewhere", default=False)

Handler = TypeVar("Handler", bound=Callable[..., Any])


class Penstock:
    """Publishes and subscribes on one cluster, of Penstock or Apache Kafka.

    `settings` are librdkafka's, for security, batching, compression and limits; what a contract depends on is not
    among them. `acks` is whose confirmation a publish waits for ("all", 1 or 0), or that of each topic by name.
    Threads may share it.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        name: str = "penstock",
        settings: Mapping[str, Any] | None = None,
        acks: Acks | Mapping[str, Acks] = "all",
    ) -> None:
        confirmed = (
            {topic: checked_acks(each) for topic, each in acks.items()}
            if isinstance(acks, Mapping)
            else checked_acks(acks)
        )
        self._resources = Resources(bootstrap, name, checked(settings), confirmed)
        self._subscriptions: list[Subscription] = []
        self._running: list[Consumption] = []
        self._waits: WaitReporter | None = None
        self._stop = SignalEvent()
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
        acks: Acks | None = None,
        salt: int | None = None,
        salt_by: str | bytes | None = None,
    ) -> Published:
        """Returns when the brokers have it, with its place. None as a value is a tombstone.

        `acks` is whose confirmation is waited for, instead of the application's: "all" replicas in sync, 1 for the
        leader, 0 for nobody (the offset is then not known, -1). `salt=N` spreads a hot key over N keys, by chance or
        always the same one for the same `salt_by`. In a handler that is exactly-once the message becomes part of the
        transaction, and its offset is not known yet (-1). Raises PayloadError, NotPublished, ApplicationError.
        """
        key, data, moment_ms = _as_bytes(key, value, timestamp, salt, salt_by)
        with self._resources.spans.publish(topic, header_list(headers), key=key) as told:
            sent = self._send(acks, topic, data, key, told, partition, moment_ms)
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
        acks: Acks | None = None,
        salt: int | None = None,
        salt_by: str | bytes | None = None,
    ) -> Future[Published]:
        """Returns at once, unless the queue is full: many together make large batches.

        The future has the place, or raises NotPublished.
        """
        key, data, moment_ms = _as_bytes(key, value, timestamp, salt, salt_by)
        with self._resources.spans.publish(topic, header_list(headers), key=key) as told:
            return self._send(acks, topic, data, key, told, partition, moment_ms)

    async def apublish(
        self,
        topic: str,
        value: object,
        *,
        key: str | bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp: datetime | None = None,
        acks: Acks | None = None,
        salt: int | None = None,
        salt_by: str | bytes | None = None,
    ) -> Published:
        """`publish` for coroutines: other tasks go on, also while the queue is full."""
        key, data, moment_ms = _as_bytes(key, value, timestamp, salt, salt_by)
        with self._resources.spans.publish(topic, header_list(headers), key=key) as told:
            # The library does not tell when there is room again.
            while (sent := self._try_send(acks, topic, data, key, told, partition, moment_ms)) is None:
                await self._resources.check_ending_async()
                await asyncio.sleep(FULL_REST_S)
        return await self._resources.await_published_async(sent, _PUBLISH_S)

    def _send(
        self,
        acks: Acks | None,
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
            return _held_back(held, Draft(topic, value, key, headers, partition, timestamp_ms), acks)
        return self._publisher(topic, acks).send(
            topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms
        )

    def _try_send(
        self,
        acks: Acks | None,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        headers: list[Header],
        partition: int | None,
        timestamp_ms: int | None,
    ) -> Future[Published] | None:
        """The same without waiting: None while the queue is full."""
        held = drafts.get()
        if held is not None:
            return _held_back(held, Draft(topic, value, key, headers, partition, timestamp_ms), acks)
        return self._publisher(topic, acks).try_send(
            topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms
        )

    def _publisher(self, topic: str, acks: Acks | None) -> Publisher:
        wanted = self._resources.acks_of(topic) if acks is None else checked_acks(acks)
        return self._resources.publisher(wanted)

    def flush(self, timeout_s: float = _CLOSE_S) -> int:
        """Waits for what was published soon; how much is still on its way."""
        return self._resources.flush(timeout_s)

    # -- subscribing ---------------------------------------------------------------------------------

    def subscribe(
        self,
        *topics: str,
        group: str,
        delivery: Delivery | str = Delivery.AT_LEAST_ONCE,
        retry: Backoff | int | None = None,
        dead_letters: bool = True,
        concurrency: int = 1,
        batch: int | None = None,
        breaker: Breaker | None = None,
        keep_order: bool = False,
        start: str = "earliest",
        commit_every: Duration = "100ms",
        taken_max: int | None = None,
        in_flight_max: int | None = None,
        store: DedupeStore | str | None = None,
        remember: Duration | None = None,
        ledger: Ledger | str | None = None,
        to: str | None = None,
        share: bool = False,
        lock: Duration | None = None,
    ) -> Callable[[Handler], Handler]:
        """A decorator for handlers. Raises ApplicationError for what cannot work, in a sentence.

        group          positions are kept under this name; its members share the partitions
        delivery       "at-most-once", "at-least-once", "effectively-once" or "exactly-once"
        retry          how often and when a failed message is tried again; a number is Backoff(attempts=number)
        dead_letters   what fails for good goes to TOPIC.dlq; False: an exception ends the subscription
        concurrency    how many threads, or tasks of an async handler, work at a time
        batch          the handler takes lists of up to so many
        breaker        stops calling a handler that keeps failing, for a while
        keep_order     later messages of a failed key wait for its retries
        start          where a new group begins: "earliest" or "latest"
        commit_every   how long positions may stay uncommitted
        taken_max      how many messages are taken at a time (500; 1 in a share group)
        in_flight_max  how many are with the handlers at most
        store          effectively-once: where ids are kept, a URL or a store
        remember       effectively-once: for how long
        ledger         exactly-once: the database that keeps results and positions, a URL or a ledger
        to             a topic for what the handler returns
        share          a share group: single messages, more members than partitions
        lock           share group: for how long a message is one member's
        """

        def register(handler: Handler) -> Handler:
            made = subscription(
                handler,
                topics,
                group=group,
                delivery=delivery,
                retry=retry,
                dead_letters=dead_letters,
                concurrency=concurrency,
                batch=batch,
                breaker=breaker,
                keep_order=keep_order,
                start=start,
                commit_every=commit_every,
                taken_max=taken_max,
                in_flight_max=in_flight_max,
                store=store,
                remember=remember,
                ledger=ledger,
                to=to,
                share=share,
                lock=lock,
            )
            check_together(made, self._subscriptions)
            self._subscriptions.append(made)
            return handler

        return register

    def consumer(
        self,
        *topics: str,
        group: str,
        delivery: Delivery | str = Delivery.AT_LEAST_ONCE,
        retry: Backoff | int | None = None,
        dead_letters: bool | None = None,
        start: str = "earliest",
        commit_every: Duration = "100ms",
        in_flight_max: int = UNANSWERED_MAX,
        share: bool = False,
        lock: Duration | None = None,
    ) -> PlainConsumer:
        """For a loop of one's own: poll, ack, nack, commit, seek. Raises ApplicationError, ClientError.

        Parameters mean what they mean for `subscribe`; `dead_letters` is on with `retry` and in share groups.
        """
        return open_consumer(
            self._resources,
            topics,
            group=group,
            delivery=delivery,
            retry=retry,
            dead_letters=dead_letters,
            start=start,
            commit_every=commit_every,
            in_flight_max=in_flight_max,
            share=share,
            lock=lock,
        )

    def aconsumer(
        self,
        *topics: str,
        group: str,
        delivery: Delivery | str = Delivery.AT_LEAST_ONCE,
        retry: Backoff | int | None = None,
        dead_letters: bool | None = None,
        start: str = "earliest",
        commit_every: Duration = "100ms",
        in_flight_max: int = UNANSWERED_MAX,
        share: bool = False,
        lock: Duration | None = None,
    ) -> AsyncConsumer:
        """`consumer` for coroutines: `async with app.aconsumer(...) as c`."""
        return AsyncConsumer(
            lambda: self.consumer(
                *topics,
                group=group,
                delivery=delivery,
                retry=retry,
                dead_letters=dead_letters,
                start=start,
                commit_every=commit_every,
                in_flight_max=in_flight_max,
                share=share,
                lock=lock,
            )
        )

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
        _check_run_here()
        with ended_by_signals(self.stop):
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
        _check_run_here()
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
        wait = PlainWait(PlainCall(f"create_topic({name!r})", [name]), self._resources)
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
            wait.end()
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


def _check_run_here() -> None:
    """Raises ApplicationError."""
    if is_run_elsewhere.get():
        raise ApplicationError(
            "run() is called while the program is imported to be run: "
            'it belongs under `if __name__ == "__main__":`'
        )


def _ending(error: BaseException) -> BaseException:
    """What a handler raised to end the process ends it, but never as if all were well."""
    if isinstance(error, SystemExit) and not error.code:
        failed = SystemExit(1)
        failed.__cause__ = error
        return failed
    return error


def _held_back(held: list[Draft], draft: Draft, acks: Acks | None) -> Future[Published]:
    """Until the transaction of the handler is committed. Raises ApplicationError."""
    if acks not in (None, "all"):
        raise ApplicationError(f'acks={acks!r} does not go with exactly-once: a transaction waits for "all"')
    held.append(draft)
    done: Future[Published] = Promise()
    done.set_result(_IN_TRANSACTION._replace(topic=draft.topic))
    return done


def _as_bytes(
    key: str | bytes | None,
    value: object,
    timestamp: datetime | None,
    salt: int | None,
    salt_by: str | bytes | None,
) -> tuple[bytes | None, bytes | None, int | None]:
    """Raises PayloadError, ApplicationError."""
    key = key.encode() if isinstance(key, str) else key
    if salt is not None:
        key = _salted(key, salt, salt_by.encode() if isinstance(salt_by, str) else salt_by)
    elif salt_by is not None:
        raise ApplicationError("salt_by= chooses among the keys of salt=: say how many")
    return (
        key,
        None if value is None else encode(value),
        None if timestamp is None else round(timestamp.timestamp() * 1000),
    )


def _salted(key: bytes | None, salt: int, salt_by: bytes | None) -> bytes:
    if key is None:
        raise ApplicationError(
            "salt= spreads a key: give one, or leave salt= out (keyless messages are spread)"
        )
    try:
        return salted(key, salt, of=salt_by)
    except ValueError as flaw:
        raise ApplicationError(f"salt={salt!r}: {flaw}") from None
