"""`Penstock`, the application object: publishes messages, runs subscriptions and opens plain consumers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final, Self, TypeVar

from penstock.client.app.breaker import Breaker
from penstock.client.app.exactly_once import drafts
from penstock.client.app.failures import Backoff
from penstock.client.app.figures import Figures
from penstock.client.app.librdkafka import Acks, ApplicationError, checked_acks, checked_settings
from penstock.client.app.message import Message
from penstock.client.app.overflow import BLOCK, Overflow, PublishFigures, Rule, checked_overflow
from penstock.client.app.plain_consumer import AsyncConsumer, GroupPlainConsumer, PlainConsumer
from penstock.client.app.publisher import (
    QUEUE_FULL_WAIT_S,
    Draft,
    Headers,
    LazyFuture,
    Published,
    Publisher,
    header_list,
)
from penstock.client.app.resources import Resources
from penstock.client.app.share_consumer import SharePlainConsumer
from penstock.client.app.share_worker import ShareWorker
from penstock.client.app.subscription import (
    Delivery,
    Subscription,
    check_group_contract,
    declare_subscription,
)
from penstock.client.app.wait_reporter import BlockingCall, CallWaitReporter, WaitReporter
from penstock.client.app.worker import SubscriptionWorker
from penstock.client.ledgers import Ledger
from penstock.client.payloads import encode
from penstock.client.retry import Duration
from penstock.client.salting import salted
from penstock.client.signals import SignalEvent, stop_on_signals
from penstock.client.stores import DedupeStore
from penstock.client.wire.topics import BROKER_DEFAULT, NewTopic, create_topics

__all__ = ("UNACKNOWLEDGED_MAX", "Penstock", "is_imported_to_run")


#: How many messages may be unacknowledged. A loop that has more has forgotten to call ack, nack or commit.
UNACKNOWLEDGED_MAX: Final = 100_000


def _handler_placeholder(message: Message) -> Any:
    """Takes the place of a handler: a plain consumer has none, the user's own loop handles its messages."""


_handler_placeholder.__qualname__ = "consumer"


_LOG: Final = logging.getLogger("penstock.client")
_PUBLISH_TIMEOUT_S: Final = 300.0
_STOP_CHECK_S: Final = 0.2
_CLOSE_TIMEOUT_S: Final = 30.0
_IN_TRANSACTION: Final = Published("", -1, -1)
#: Set while `penstock app run` imports a program to run its application. If the program called `run` during that
#: import, the import would never return.
is_imported_to_run: Final[ContextVar[bool]] = ContextVar("is_run_elsewhere", default=False)

Handler = TypeVar("Handler", bound=Callable[..., Any])


class Penstock:
    """An application that publishes to and subscribes to topics of one Penstock or Apache Kafka cluster.

    `bootstrap` lists some brokers as "host:port,host:port". `name` is the client id, and the name in logs and traces.
    `settings` are librdkafka settings for security, batching, compression and limits; settings that a delivery contract
    depends on are refused. `acks` says which replicas must confirm a message: "all" in-sync replicas, 1 for the leader
    only, 0 for none. `overflow` says what publishing does while the buffer is full: "block" (or Block(wait=...)),
    "reject", "drop-oldest" or "drop-newest". Both may be mappings from topic names to these values. Threads may share
    one application.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        name: str = "penstock",
        settings: Mapping[str, Any] | None = None,
        acks: Acks | Mapping[str, Acks] = "all",
        overflow: Overflow | Mapping[str, Overflow] = "block",
    ) -> None:
        confirmed = (
            {topic: checked_acks(each) for topic, each in acks.items()}
            if isinstance(acks, Mapping)
            else checked_acks(acks)
        )
        rules = (
            {topic: checked_overflow(each) for topic, each in overflow.items()}
            if isinstance(overflow, Mapping)
            else checked_overflow(overflow)
        )
        self._resources = Resources(bootstrap, name, checked_settings(settings), confirmed, rules)
        self._subscriptions: list[Subscription] = []
        self._running: list[SubscriptionWorker] = []
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
        overflow: Overflow | None = None,
        salt: int | None = None,
        salt_by: str | bytes | None = None,
    ) -> Published:
        """Publishes a message, waits until the brokers confirm it, and returns its partition and offset.

        The value None is a tombstone. `acks` overrides the application's setting for this message: "all" waits for all
        in-sync replicas, 1 for the leader, 0 for no broker (the offset is then unknown, -1). `overflow` overrides what
        happens while the buffer is full. `salt=N` spreads a hot key over N keys: one chosen at random, or always the
        same one for the same `salt_by`. In an exactly-once handler the message becomes part of the transaction, and its
        offset is not known yet (-1). Raises PayloadError, NotPublished (BufferFull), ApplicationError.
        """
        key, data, moment_ms = _encode_message(key, value, timestamp, salt, salt_by)
        with self._resources.spans.publish(topic, header_list(headers), key=key) as sent_headers:
            draft = Draft(topic, data, key, sent_headers, partition, moment_ms)
            sent = self._send(draft, acks, overflow)
            return self._resources.await_published(sent, _PUBLISH_TIMEOUT_S)

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
        overflow: Overflow | None = None,
        salt: int | None = None,
        salt_by: str | bytes | None = None,
    ) -> Future[Published]:
        """Queues a message and returns at once, so that many messages make large batches. Parameters as for `publish`.

        While the buffer is full, does what `overflow` says; the future of a dropped message raises BufferFull. The
        future returns the partition and offset, or raises NotPublished.
        """
        key, data, moment_ms = _encode_message(key, value, timestamp, salt, salt_by)
        with self._resources.spans.publish(topic, header_list(headers), key=key) as sent_headers:
            return self._send(Draft(topic, data, key, sent_headers, partition, moment_ms), acks, overflow)

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
        overflow: Overflow | None = None,
        salt: int | None = None,
        salt_by: str | bytes | None = None,
    ) -> Published:
        """`publish` for coroutines: other tasks keep running, also while the buffer is full."""
        key, data, moment_ms = _encode_message(key, value, timestamp, salt, salt_by)
        with self._resources.spans.publish(topic, header_list(headers), key=key) as sent_headers:
            draft = Draft(topic, data, key, sent_headers, partition, moment_ms)
            sent = await self._send_async(draft, acks, overflow)
        return await self._resources.await_published_async(sent, _PUBLISH_TIMEOUT_S)

    def _send(self, draft: Draft, acks: Acks | None, overflow: Overflow | None) -> Future[Published]:
        """Sends the message now or, in an exactly-once handler, adds it to the handler's transaction."""
        held = drafts.get()
        if held is not None:
            return _add_draft(held, draft, acks, overflow)
        rule = self._rule(draft.topic, overflow)
        return self._publisher(draft.topic, acks, rule).send(draft, rule)

    async def _send_async(
        self, draft: Draft, acks: Acks | None, overflow: Overflow | None
    ) -> Future[Published]:
        """Does the same as `_send` while other tasks keep running."""
        held = drafts.get()
        if held is not None:
            return _add_draft(held, draft, acks, overflow)
        rule = self._rule(draft.topic, overflow)
        until_s = time.monotonic() + rule.wait_s
        while True:
            sent = self._publisher(draft.topic, acks, rule).offer(draft, rule, until_s)
            if sent is not None:
                return sent
            # librdkafka does not report when the queue has room again.
            await self._resources.check_ending_async()
            await asyncio.sleep(QUEUE_FULL_WAIT_S)

    def _rule(self, topic: str, overflow: Overflow | None) -> Rule:
        return self._resources.overflow_of(topic) if overflow is None else checked_overflow(overflow)

    def _publisher(self, topic: str, acks: Acks | None, rule: Rule) -> Publisher:
        wanted = self._resources.acks_of(topic) if acks is None else checked_acks(acks)
        return self._resources.publisher(wanted, rule)

    def publish_figures(self) -> PublishFigures:
        """Returns how many messages were sent, and how many were not because the buffer was full."""
        return self._resources.publish_figures()

    def flush(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> int:
        """Waits for messages of `publish_soon`; returns how many are still unconfirmed after `timeout_s` seconds."""
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
        """Returns a decorator that registers a handler for `topics`. `run` or `start` begins to call it.

        Raises ApplicationError for parameters that cannot work, alone or together; the message explains why.

        group          the consumer group: it keeps the committed offsets, and its members share the partitions
        delivery       "at-most-once", "at-least-once", "effectively-once" or "exactly-once"
        retry          how often and when to retry a failed message; a number means Backoff(attempts=number)
        dead_letters   publish messages that fail for good to TOPIC.dlq; if False, an exception ends the subscription
        concurrency    how many threads, or tasks of an async handler, work at the same time
        batch          pass lists of up to this many messages to the handler
        breaker        stop calling a handler that keeps failing, for a while
        keep_order     hold later messages of a failed key back until its retries are done
        start          where a new group starts to read: "earliest" or "latest"
        commit_every   how long offsets may stay uncommitted
        taken_max      how many messages a poll returns at most (500; 1 in a share group)
        in_flight_max  how many messages the handlers have at most (twice taken_max; concurrency in a share group)
        store          effectively-once: where message ids are kept, a URL or a store
        remember       effectively-once: how long message ids are kept (a day, or twice the longest retry)
        ledger         exactly-once: the database that keeps results and positions, a URL or a ledger
        to             publish what the handler returns to this topic
        share          join a share group: it hands out single messages, and may have more members than partitions
        lock           share group: how long an acquired message belongs to one member
        """

        def register(handler: Handler) -> Handler:
            made = declare_subscription(
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
            check_group_contract(made, self._subscriptions)
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
        in_flight_max: int = UNACKNOWLEDGED_MAX,
        share: bool = False,
        lock: Duration | None = None,
    ) -> PlainConsumer:
        """Returns a consumer for a loop of your own: poll, ack, nack, commit, seek.

        Parameters mean the same as for `subscribe`, but `dead_letters` is by default on only with `retry` and in share
        groups, `in_flight_max` is how many messages may be unacknowledged, and `delivery` is "at-least-once" or
        "at-most-once". Raises ApplicationError, ClientError.
        """
        declared = declare_subscription(
            _handler_placeholder,
            topics,
            group=group,
            delivery=delivery,
            retry=retry,
            dead_letters=(share or retry is not None) if dead_letters is None else dead_letters,
            start=start,
            commit_every=commit_every,
            in_flight_max=in_flight_max,
            share=share,
            lock=lock,
        )
        if declared.delivery not in (Delivery.AT_LEAST_ONCE, Delivery.AT_MOST_ONCE):
            raise ApplicationError(f"{declared.delivery} needs a handler: use subscribe")
        return (SharePlainConsumer if declared.share else GroupPlainConsumer)(declared, self._resources)

    def aconsumer(
        self,
        *topics: str,
        group: str,
        delivery: Delivery | str = Delivery.AT_LEAST_ONCE,
        retry: Backoff | int | None = None,
        dead_letters: bool | None = None,
        start: str = "earliest",
        commit_every: Duration = "100ms",
        in_flight_max: int = UNACKNOWLEDGED_MAX,
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
        """Returns the counters of each subscription, by the name of its handler."""
        return {each.name: self._resources.figures_of(each) for each in self._subscriptions}

    @property
    def is_running(self) -> bool:
        """Whether `start` was called and all subscriptions still run. `close` raises the error that ended one."""
        return bool(self._running) and all(each.is_alive for each in self._running)

    def run(self) -> None:
        """Runs all subscriptions until SIGTERM, SIGINT or `stop`, then finishes and commits the messages in progress.

        If a subscription ends because of an error, raises that error. A handler that raises SystemExit,
        KeyboardInterrupt or the like ends the application: its message counts as not handled, and the exit code is
        never 0.
        """
        _check_may_run()
        with stop_on_signals(self.stop):
            self.start()
            try:
                self._wait()
            finally:
                self._finish()

    def _wait(self) -> None:
        while not self._stop.wait(_STOP_CHECK_S) and self.is_running:
            pass

    async def arun(self) -> None:
        """`run` for coroutines: runs until the task is cancelled or `stop` is called. It handles no signals."""
        _check_may_run()
        loop = asyncio.get_running_loop()
        self.start()
        try:
            await loop.run_in_executor(None, self._wait)
        finally:
            self.stop()
            await loop.run_in_executor(None, self._finish)

    def start(self) -> None:
        """Starts each subscription in a thread of its own and returns; `close` ends them. Raises ApplicationError."""
        if not self._subscriptions:
            raise ApplicationError("the application has no subscription")
        with self._lock:
            if self._running:
                raise ApplicationError("the application runs already")
            self._stop.clear()
            self._resources.ending.clear()
            self._running = [
                (ShareWorker if each.share else SubscriptionWorker)(each, self._resources)
                for each in self._subscriptions
            ]
            for each in self._running:
                each.start()
            self._waits = WaitReporter(self._running, self._resources)
            self._waits.start()

    def stop(self) -> None:
        """Makes `run` end. Any thread and any signal handler may call it."""
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
            raise _exit_error(errors[0])

    # -- topics and the end --------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = BROKER_DEFAULT,
        replicas: int = BROKER_DEFAULT,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Creates a topic and returns when it can be used. Raises Refused if it exists or the brokers refuse it."""
        topic = NewTopic(name=name, partitions=partitions, replicas=replicas, settings=dict(settings or {}))
        with self._resources.cluster() as cluster:
            wait = CallWaitReporter(BlockingCall(f"create_topic({name!r})", [name]), self._resources)
            try:
                create_topics(cluster, [topic])
            finally:
                wait.end()

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Ends the subscriptions that `start` began, and waits up to `timeout_s` seconds for unconfirmed messages.

        Raises the error that ended a subscription, if one failed.
        """
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


def _check_may_run() -> None:
    """Raises ApplicationError."""
    if is_imported_to_run.get():
        raise ApplicationError(
            "run() was called while `penstock app run` imports the program: "
            'put it under `if __name__ == "__main__":`'
        )


def _exit_error(error: BaseException) -> BaseException:
    """Returns the exception to end the process with: a handler's SystemExit never exits with code 0."""
    if isinstance(error, SystemExit) and not error.code:
        failed = SystemExit(1)
        failed.__cause__ = error
        return failed
    return error


def _add_draft(
    held: list[Draft], draft: Draft, acks: Acks | None, overflow: Overflow | None
) -> Future[Published]:
    """Holds a message back for the transaction of the handler. Raises ApplicationError."""
    if acks not in (None, "all"):
        raise ApplicationError(
            f'acks={acks!r} does not work with exactly-once: a transaction waits for "all"'
        )
    if overflow is not None and checked_overflow(overflow).policy != BLOCK.policy:
        raise ApplicationError(
            f"overflow={overflow!r} does not work with exactly-once: a transaction drops nothing"
        )
    held.append(draft)
    done: Future[Published] = LazyFuture()
    done.set_result(_IN_TRANSACTION._replace(topic=draft.topic))
    return done


def _encode_message(
    key: str | bytes | None,
    value: object,
    timestamp: datetime | None,
    salt: int | None,
    salt_by: str | bytes | None,
) -> tuple[bytes | None, bytes | None, int | None]:
    """Raises PayloadError, ApplicationError."""
    key = key.encode() if isinstance(key, str) else key
    if salt is not None:
        key = _salt_key(key, salt, salt_by.encode() if isinstance(salt_by, str) else salt_by)
    elif salt_by is not None:
        raise ApplicationError("salt_by= needs salt=, the number of keys to choose from")
    return (
        key,
        None if value is None else encode(value),
        None if timestamp is None else round(timestamp.timestamp() * 1000),
    )


def _salt_key(key: bytes | None, salt: int, salt_by: bytes | None) -> bytes:
    if key is None:
        raise ApplicationError(
            "salt= needs a key=; messages without a key are spread over all partitions anyway"
        )
    try:
        return salted(key, salt, of=salt_by)
    except ValueError as flaw:
        raise ApplicationError(f"salt={salt!r}: {flaw}") from None
