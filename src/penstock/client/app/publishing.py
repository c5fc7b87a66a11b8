"""Publishing: one producer, a thread that hears its reports, and an offset for whoever waits for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from itertools import count
from typing import Any, Final, NamedTuple

from penstock.client.app.promises import Promise
from penstock.client.app.settings import ApplicationError, Settings
from penstock.client.errors import ClientError
from penstock.client.letters import MESSAGE_ID, Header

__all__ = ["MessageIds", "NotPublished", "Published", "Publisher", "header_list"]

_POLL_S: Final = 0.1
_FULL_REST_S: Final = 0.01
_CLOSE_S: Final = 30.0
#: As the client library has them.
_ANY_PARTITION: Final = -1
_NOW: Final = 0

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
    """Threads may share it. What was published is on its way until `flush` or `close`."""

    def __init__(self, settings: Settings) -> None:
        self._producer = producer(settings)
        self._ids = MessageIds()
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
        promise = _Promise()
        told = with_id(headers, self._ids)
        while not self._is_closed:
            try:
                self._producer.produce(
                    topic,
                    value,
                    key,
                    _ANY_PARTITION if partition is None else partition,
                    headers=told,
                    on_delivery=promise.report,
                    timestamp=timestamp_ms or _NOW,
                )
                return promise
            except BufferError:
                self._producer.poll(_FULL_REST_S)
            except Exception as error:
                raise not_published(topic, error) from None
        raise NotPublished(f"{topic}: the publisher is closed")

    def flush(self, timeout_s: float = _CLOSE_S) -> int:
        """How many are still on their way."""
        return int(self._producer.flush(timeout_s))

    def close(self, timeout_s: float = _CLOSE_S) -> int:
        """How many were given up, which their futures tell too."""
        left = self.flush(timeout_s)
        if left:
            self._producer.purge()
            self._producer.flush(1.0)
        self._is_closed = True
        if self._hearing is not threading.current_thread():
            self._hearing.join(timeout_s)
        return left

    def _hear(self) -> None:
        while not self._is_closed:
            self._producer.poll(_POLL_S)


def producer(settings: Settings) -> Any:
    """Raises ApplicationError for settings that do not go together."""
    from confluent_kafka import KafkaException, Producer

    try:
        return Producer(settings)
    except KafkaException as error:
        raise ApplicationError(error.args[0].str()) from None


class _Promise(Promise[Published]):
    def report(self, error: Any, message: Any) -> None:
        """Of the client library."""
        if error is not None:
            self.set_exception(not_published(message.topic(), error))
        else:
            self.set_result(Published(message.topic(), message.partition(), message.offset()))


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
        case _:
            return NotPublished(f"{topic}: {error.str()}", may_be_there=bool(error.retriable()))
