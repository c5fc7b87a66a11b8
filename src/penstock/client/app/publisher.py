"""Publishing: one producer, a thread that hears its reports, and an offset for whoever waits for it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Any, Final, NamedTuple

from penstock.client.app.promises import Promise
from penstock.client.app.settings import ApplicationError, Settings
from penstock.client.errors import ClientError
from penstock.client.letters import MESSAGE_ID, Header

__all__ = ["MessageIds", "NotPublished", "Published", "Publisher", "header_list"]

_LOG: Final = logging.getLogger("penstock.client")
_POLL_S: Final = 0.05
#: A sender hears what became of others after so many; whoever sends as many in a moment is busy.
_HEAR_EVERY: Final = 200
_AWAY_S: Final = 0.005
FULL_REST_S: Final = 0.01
_CLOSE_S: Final = 30.0
#: As the client library has them.
_ANY_PARTITION: Final = -1
_NOW: Final = 0
#: Of what no broker has confirmed, by the publisher's own choice.
UNKNOWN_OFFSET: Final = -1

Headers = Mapping[str, str | bytes | None] | Iterable[tuple[str, str | bytes | None]]


class Published(NamedTuple):
    """Where a message is now."""

    topic: str
    partition: int
    offset: int

    def __int__(self) -> int:
        return self.offset


class NotPublished(ClientError):
    """The broker did not take a message, or nobody knows whether it did: the sentence says which.

    `may_be_there` where it may have been written after all.
    """

    def __init__(self, sentence: str, *, may_be_there: bool = False, too_large: bool = False) -> None:
        super().__init__(sentence)
        self.may_be_there = may_be_there
        self.too_large = too_large


class MessageIds:
    """Unlike those of any other publisher, and counting up within one."""

    __slots__ = ("_numbers", "_prefix")

    def __init__(self) -> None:
        self._prefix = os.urandom(10).hex()
        self._numbers = count()

    def next(self) -> bytes:
        return f"{self._prefix}-{next(self._numbers):x}".encode()


class Publisher:
    """Threads may share it. What was published is on its way until `flush` or `close`.

    A thread of its own hears what became of messages, and tells those who wait. Two threads that hear at a time would
    wait for each other at every report, so while somebody sends many, it is the sender that hears.
    """

    def __init__(self, settings: Settings, check_full: Callable[[], None] = lambda: None) -> None:
        """`check_full` raises NotPublished when it is no use to wait any longer for room in the queue."""
        self._producer = producer(settings)
        self._check_full = check_full
        self._ids = MessageIds()
        self._sent = 0
        self._numbers = count(1)
        self._untold: deque[tuple[_Promise, Any, Any]] = deque()
        #: The library takes nothing more for this one: another is needed.
        self.is_spent = False
        self._is_closed = False
        self._hearing = threading.Thread(target=self._hear, name="penstock-publisher", daemon=True)
        self._hearing.start()

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: list[Header] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> Future[Published]:
        """On its way; the future has its place, or raises NotPublished. Waits while the queue is full."""
        while True:
            sent = self.try_send(
                topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms
            )
            if sent is not None:
                return sent
            self._check_full()
            self._serve(self._producer.poll, FULL_REST_S)

    def try_send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: list[Header] | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> Future[Published] | None:
        """The same without waiting: None while the queue is full. Raises NotPublished."""
        if self._is_closed:
            raise NotPublished(f"{topic}: the publisher is closed")
        promise = _Promise(self._untold)
        try:
            self._producer.produce(
                topic,
                value,
                key,
                _ANY_PARTITION if partition is None else partition,
                headers=with_id(headers, self._ids),
                on_delivery=promise.report,
                timestamp=timestamp_ms or _NOW,
            )
        except BufferError:
            return None
        except Exception as error:
            self.is_spent |= _is_fatal(error)
            raise not_published(topic, error) from None
        self._sent = next(self._numbers)
        if self._sent % _HEAR_EVERY == 0:
            self._serve(self._producer.poll, 0)
        return promise

    def flush(self, timeout_s: float = _CLOSE_S) -> int:
        """How many are still on their way."""
        while True:
            was_spent, left = self.is_spent, self._serve(self._producer.flush, timeout_s)
            if self.is_spent == was_spent:
                break
        self._tell()
        return left

    def close(self, timeout_s: float = _CLOSE_S) -> int:
        """How many were given up, which their futures tell too."""
        left = self.flush(timeout_s)
        if left:
            self._producer.purge()
            self._serve(self._producer.flush, 1.0)
        self._is_closed = True
        if self._hearing is not threading.current_thread():
            self._hearing.join(timeout_s)
        self._tell()
        return left

    def _hear(self) -> None:
        before = 0
        while not self._is_closed:
            is_busy, before = self._sent - before >= _HEAR_EVERY, self._sent
            if is_busy:
                time.sleep(_AWAY_S)
            else:
                self._serve(self._producer.poll, _POLL_S)
            self._tell()

    def _serve(self, call: Callable[[float], int], timeout_s: float) -> int:
        """What cannot be mended is raised once, by whatever call comes next; what it means for messages is reported."""
        from confluent_kafka import KafkaException

        try:
            return int(call(timeout_s))
        except KafkaException as error:
            self.is_spent = True
            _LOG.error("a publisher is given up: %s", error.args[0].str())
            return len(self._producer)

    def _tell(self) -> None:
        with suppress(IndexError):
            while True:
                promise, error, message = self._untold.popleft()
                promise.end(error, message)


def producer(settings: Settings) -> Any:
    """Raises ApplicationError for settings that do not go together."""
    from confluent_kafka import KafkaException, Producer

    try:
        return Producer(settings)
    except KafkaException as error:
        raise ApplicationError(error.args[0].str()) from None


class _Promise(Promise[Published]):
    """Whoever hears of a message may be sending another one, perhaps with locks held: nobody is called back there."""

    def __init__(self, untold: deque[tuple[_Promise, Any, Any]]) -> None:
        super().__init__()
        self._untold = untold

    def report(self, error: Any, message: Any) -> None:
        """Of the client library."""
        if error is not None or not self.settle_unseen(_place_of(message)):
            self._untold.append((self, error, message))

    def end(self, error: Any, message: Any) -> None:
        if error is not None:
            self.set_exception(not_published(message.topic(), error))
        else:
            self.set_result(_place_of(message))


def _place_of(message: Any) -> Published:
    offset = message.offset()  # None where no broker has told one
    return Published(message.topic(), message.partition(), UNKNOWN_OFFSET if offset is None else offset)


def with_id(headers: list[Header] | None, ids: MessageIds) -> list[Header]:
    """A message that has an id keeps it."""
    told = headers or []
    for name, _ in told:
        if name == MESSAGE_ID:
            return told
    return [*told, (MESSAGE_ID, ids.next())]


def header_list(headers: Headers | None) -> list[Header]:
    """Text becomes UTF-8."""
    if headers is None:
        return []
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    return [(name, value.encode() if isinstance(value, str) else value) for name, value in pairs]


def _is_fatal(error: Any) -> bool:
    from confluent_kafka import KafkaException

    return isinstance(error, KafkaException) and bool(error.args[0].fatal())


def not_published(topic: str, error: Any) -> NotPublished:
    """Of a KafkaError, or whatever the library raised."""
    from confluent_kafka import KafkaError, KafkaException

    if isinstance(error, KafkaException):
        error = error.args[0]
    if not isinstance(error, KafkaError):
        return NotPublished(f"{topic}: {error}")
    match error.code():
        case KafkaError.MSG_SIZE_TOO_LARGE:
            return NotPublished(f"{topic}: the message is larger than is allowed", too_large=True)
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
            return NotPublished(f"{topic}: no broker has confirmed it in time", may_be_there=True)
        case KafkaError._FATAL | KafkaError._PURGE_INFLIGHT:
            return NotPublished(f"{topic}: given up on the way: {error.str()}", may_be_there=True)
        case _:
            return NotPublished(f"{topic}: {error.str()}", may_be_there=bool(error.retriable()))
