"""Publishing: one producer, a thread that polls its delivery reports, and a future with the offset of each message.

The futures are cheap to make, because most of them are read once, when they are done.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any, Final, NamedTuple, TypeVar

from confluent_kafka import KafkaError, KafkaException, Producer

from penstock.client.app.librdkafka import ApplicationError, Settings
from penstock.client.app.overflow import (
    BLOCK,
    CLOSED,
    DROP_NEWEST,
    DROP_OLDEST,
    PublishCounters,
    Rule,
    WaitingMessages,
    drop_oldest_bounds,
)
from penstock.client.deadletters.headers import MESSAGE_ID, Header
from penstock.client.errors import NotPublished

__all__ = (
    "LazyFuture",
    "MessageIds",
    "Published",
    "Publisher",
    "header_list",
)


T = TypeVar("T")

#: As `concurrent.futures` names them.
_PENDING: Final = "PENDING"
_FINISHED: Final = "FINISHED"
#: The attributes that waiting for a future needs, made when a thread waits for it.
_WAITING_PARTS: Final[dict[str, Any]] = {
    "_condition": threading.Condition,
    "_waiters": list,
    "_done_callbacks": list,
}
_LOCK: Final = threading.Lock()


class LazyFuture(Future[T]):
    """A future that makes its lock and lists only if a thread waits for it or adds a callback.

    It cannot be cancelled, because a message that was sent cannot be withdrawn.
    """

    _is_watched = False

    def __init__(self) -> None:
        # Without Future.__init__: making a condition and two lists takes longer than sending the message.
        self._state = _PENDING
        self._result: T | None = None
        self._exception: BaseException | None = None

    def __getattr__(self, name: str) -> Any:
        make = _WAITING_PARTS.get(name)
        if make is None:
            raise AttributeError(name)
        with _LOCK:
            self._is_watched = True
            return self.__dict__.setdefault(name, make())

    def set_if_unwatched(self, result: T) -> bool:
        """Sets the result unless a thread waits already. Returns whether it did; if not, the caller must notify."""
        with _LOCK:
            if not self._is_watched:
                self._result, self._state = result, _FINISHED
            return not self._is_watched

    def set_result(self, result: T) -> None:
        if not self.set_if_unwatched(result):
            super().set_result(result)

    def result(self, timeout: float | None = None) -> T:
        if self._state == _FINISHED and self._exception is None:
            return self._result  # type: ignore[return-value]
        return super().result(timeout)

    def done(self) -> bool:
        return self._state == _FINISHED

    def cancel(self) -> bool:
        return False


_LOG: Final = logging.getLogger("penstock.client")
_POLL_S: Final = 0.05
#: A sending thread polls for delivery reports after this many messages. If this many messages were sent since the
#: publisher's own thread last looked, the senders are busy and poll often enough.
_POLL_EVERY_MESSAGES: Final = 200
_BUSY_WAIT_S: Final = 0.005
QUEUE_FULL_WAIT_S: Final = 0.01
_CLOSE_TIMEOUT_S: Final = 30.0
#: Values that the client library takes for "not given".
_ANY_PARTITION: Final = -1
_NOW: Final = 0
#: Of a message that no broker confirms because it was sent with acks=0.
UNKNOWN_OFFSET: Final = -1

Headers = Mapping[str, str | bytes | None] | Iterable[tuple[str, str | bytes | None]]


class Published(NamedTuple):
    """The topic, partition and offset of a published message. int() gives the offset."""

    topic: str
    partition: int
    offset: int

    def __int__(self) -> int:
        return self.offset


class Draft(NamedTuple):
    """A message to publish, now or when the handler of an exactly-once subscription has returned."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: list[Header]
    partition: int | None = None
    timestamp_ms: int | None = None


class MessageIds:
    """Makes message ids: a random prefix that no other publisher has, and a counter."""

    __slots__ = ("_numbers", "_prefix")

    def __init__(self) -> None:
        self._prefix = os.urandom(10).hex()
        self._numbers = count()

    def next(self) -> bytes:
        return f"{self._prefix}-{next(self._numbers):x}".encode()


class Publisher:
    """Sends messages with one producer. Threads may share it. `flush` or `close` waits for unconfirmed messages.

    A thread of the publisher polls delivery reports and completes the futures. Two threads that poll at the same time
    would wait for each other at every report, so while a thread sends many messages, that thread polls instead.
    """

    def __init__(
        self,
        settings: Settings,
        check_full: Callable[[], None] = lambda: None,
        counters: PublishCounters | None = None,
        *,
        drops_oldest: bool = False,
    ) -> None:
        """`check_full` raises NotPublished when waiting longer for room in the queue is of no use.

        With `drops_oldest`, a part of the buffer is not the producer's queue: the oldest messages there can be dropped.
        """
        self._waiting: WaitingMessages[tuple[Draft, _DeliveryFuture]] | None = None
        if drops_oldest:
            settings, bounds = drop_oldest_bounds(settings)
            self._waiting = WaitingMessages(bounds)
        self._waiting_lock = threading.Lock()
        self._producer = make_producer(settings)
        self._check_full = check_full
        self._counters = counters or PublishCounters()
        self._ids = MessageIds()
        self._sent = 0
        self._numbers = count(1)
        self._unreported: deque[tuple[_DeliveryFuture, Any, Any]] = deque()
        #: After a fatal error librdkafka accepts no more messages: a new publisher is needed.
        self.is_spent = False
        self._is_closed = False
        self._poll_thread = threading.Thread(
            target=self._poll_reports, name="penstock-publisher", daemon=True
        )
        self._poll_thread.start()

    @property
    def waiting(self) -> int:
        """How many messages wait in the buffer, not yet given to the producer."""
        return len(self._waiting) if self._waiting is not None else 0

    def send(self, draft: Draft, rule: Rule = BLOCK) -> Future[Published]:
        """Queues a message. While the buffer is full, does what the rule says.

        The future returns the partition and offset, or raises NotPublished. Raises NotPublished itself for a message
        that the producer refuses, and BufferFull.
        """
        sent = self.offer(draft, rule)
        if sent is None:
            until_s = time.monotonic() + rule.wait_s
            while sent is None:
                self._check_full()
                self._serve(self._producer.poll, QUEUE_FULL_WAIT_S)
                sent = self.offer(draft, rule, until_s)
        return sent

    def offer(self, draft: Draft, rule: Rule, until_s: float = math.inf) -> Future[Published] | None:
        """Does the same as `send` without waiting: returns None if the rule is to wait for room, until `until_s`."""
        if self._is_closed:
            raise NotPublished(f"{draft.topic}: the publisher is closed")
        promise = _DeliveryFuture(self._unreported)
        if self._waiting is not None:
            return self._add_waiting(self._waiting, draft, promise)
        if self._produce(draft, promise):
            return promise
        # Delivery reports that nothing has served yet still take up room.
        self._serve(self._producer.poll, 0)
        if self._produce(draft, promise):
            return promise
        if rule.policy == BLOCK.policy and time.monotonic() < until_s:
            return None
        error = self._counters.dropped(draft.topic, rule.policy)
        if rule.policy != DROP_NEWEST:
            raise error
        promise.set_exception(error)
        return promise

    def _produce(self, draft: Draft, promise: _DeliveryFuture) -> bool:
        """Gives a message to the producer. Returns False if its queue is full. Raises NotPublished."""
        topic, value, key, headers, partition, timestamp_ms = draft
        try:
            self._producer.produce(
                topic,
                value,
                key,
                _ANY_PARTITION if partition is None else partition,
                headers=with_message_id(headers, self._ids),
                on_delivery=promise.report,
                timestamp=timestamp_ms or _NOW,
            )
        except BufferError:
            return False
        except Exception as error:
            self.is_spent |= isinstance(error, KafkaException) and bool(error.args[0].fatal())
            self._counters.add_refused()
            raise not_published_error(topic, error) from None
        self._counters.add_sent()
        self._sent = next(self._numbers)
        if self._sent % _POLL_EVERY_MESSAGES == 0:
            self._serve(self._producer.poll, 0)
        return True

    def _add_waiting(
        self, waiting: WaitingMessages[tuple[Draft, _DeliveryFuture]], draft: Draft, promise: _DeliveryFuture
    ) -> Future[Published]:
        size = len(draft.value or b"") + len(draft.key or b"")
        with self._waiting_lock:
            self._hand_over(waiting)
            dropped = waiting.add((draft, promise), size)
            self._hand_over(waiting)
        self._end_dropped(dropped, DROP_OLDEST)
        return promise

    def _hand_over(self, waiting: WaitingMessages[tuple[Draft, _DeliveryFuture]]) -> None:
        """Gives waiting messages to the producer while it has room. The caller holds the lock."""
        while waiting:
            draft, promise = waiting.first()
            try:
                if not self._produce(draft, promise):
                    return
            except NotPublished as error:
                self._unreported.append((promise, error, None))
            waiting.remove_first()

    def _end_dropped(self, dropped: Iterable[tuple[Draft, _DeliveryFuture]], reason: str) -> None:
        for draft, promise in dropped:
            self._unreported.append((promise, self._counters.dropped(draft.topic, reason), None))

    def flush(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> int:
        """Waits for unconfirmed messages; returns how many are left."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            was_spent, left_s = self.is_spent, max(deadline_s - time.monotonic(), 0.0)
            self._hand_over_waiting()
            left = self._serve(self._producer.flush, left_s)
            if self.is_spent == was_spent and (not self.waiting or not left_s):
                break
        self._report_all()
        return left + self.waiting

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> int:
        """Returns how many messages were abandoned; their futures raise NotPublished."""
        left = self.flush(timeout_s)
        if left:
            self._drop_waiting()
            self._producer.purge()
            self._serve(self._producer.flush, 1.0)
        self._is_closed = True
        if self._poll_thread is not threading.current_thread():
            self._poll_thread.join(timeout_s)
        self._report_all()
        self._counters.log_drops(now=True)
        return left

    def _hand_over_waiting(self) -> None:
        if self._waiting:
            with self._waiting_lock:
                self._hand_over(self._waiting)

    def _drop_waiting(self) -> None:
        """Drops what waits when the publisher is closed."""
        with self._waiting_lock:
            dropped = []
            while self._waiting:
                dropped.append(self._waiting.first())
                self._waiting.remove_first()
        self._end_dropped(dropped, CLOSED)

    def _poll_reports(self) -> None:
        before = 0
        while not self._is_closed:
            is_busy, before = self._sent - before >= _POLL_EVERY_MESSAGES, self._sent
            if is_busy:
                time.sleep(_BUSY_WAIT_S)
            else:
                self._serve(self._producer.poll, _POLL_S)
            self._hand_over_waiting()
            self._report_all()
            self._counters.log_drops()

    def _serve(self, call: Callable[[float], int], timeout_s: float) -> int:
        """Calls poll or flush. A fatal error, which librdkafka raises once from any call, marks the publisher as spent.

        Delivery reports say what the error means for each message.
        """
        try:
            return int(call(timeout_s))
        except KafkaException as error:
            self.is_spent = True
            _LOG.error("a producer failed and is replaced: %s", error.args[0].str())
            return len(self._producer)

    def _report_all(self) -> None:
        with suppress(IndexError):
            while True:
                promise, error, message = self._unreported.popleft()
                promise.end(error, message)


def make_producer(settings: Settings) -> Any:
    """Raises ApplicationError for settings that do not go together."""
    try:
        return Producer(settings)
    except KafkaException as error:
        raise ApplicationError(error.args[0].str()) from None


class _DeliveryFuture(LazyFuture[Published]):
    """The future of one message. Its callbacks do not run in the thread that gets the delivery report.

    That thread may be sending another message and hold locks, so the publisher's own thread runs them.
    """

    def __init__(self, unreported: deque[tuple[_DeliveryFuture, Any, Any]]) -> None:
        super().__init__()
        self._unreported = unreported

    def report(self, error: Any, message: Any) -> None:
        """Called by the client library with the delivery report."""
        if error is not None or not self.set_if_unwatched(_published(message)):
            self._unreported.append((self, error, message))

    def end(self, error: Any, message: Any) -> None:
        if isinstance(error, NotPublished):
            self.set_exception(error)
        elif error is not None:
            self.set_exception(not_published_error(message.topic(), error))
        else:
            self.set_result(_published(message))


def _published(message: Any) -> Published:
    offset = message.offset()  # None if no broker has reported one
    return Published(message.topic(), message.partition(), UNKNOWN_OFFSET if offset is None else offset)


def with_message_id(headers: list[Header] | None, ids: MessageIds) -> list[Header]:
    """Adds a message id to the headers, unless there is one already."""
    result = headers or []
    for name, _ in result:
        if name == MESSAGE_ID:
            return result
    return [*result, (MESSAGE_ID, ids.next())]


def header_list(headers: Headers | None) -> list[Header]:
    """Returns headers as a list of pairs; encodes text as UTF-8."""
    if headers is None:
        return []
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return [(name, value.encode() if isinstance(value, str) else value) for name, value in pairs]


def not_published_error(topic: str, error: Any) -> NotPublished:
    """Returns NotPublished for a KafkaError or for any exception that the client library raised."""
    if isinstance(error, KafkaException):
        error = error.args[0]
    if not isinstance(error, KafkaError):
        return NotPublished(f"{topic}: {error}")
    match error.code():
        case KafkaError.MSG_SIZE_TOO_LARGE:
            return NotPublished(f"{topic}: the message is too large", too_large=True)
        case KafkaError.UNKNOWN_TOPIC_OR_PART | KafkaError._UNKNOWN_TOPIC:
            return NotPublished(f"{topic} does not exist")
        case KafkaError._UNKNOWN_PARTITION:
            return NotPublished(f"{topic} has no such partition")
        case (
            KafkaError._MSG_TIMED_OUT
            | KafkaError._TRANSPORT
            | KafkaError.REQUEST_TIMED_OUT
            | KafkaError._TIMED_OUT
        ):
            return NotPublished(f"{topic}: no broker has confirmed the message in time", may_be_there=True)
        case KafkaError._FATAL | KafkaError._PURGE_INFLIGHT:
            return NotPublished(f"{topic}: discarded while in flight: {error.str()}", may_be_there=True)
        case _:
            return NotPublished(f"{topic}: {error.str()}", may_be_there=bool(error.retriable()))
