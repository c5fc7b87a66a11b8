"""What happens to a message that failed: backoff, and publishing it to a retry or dead-letter topic.

`FailurePolicy` decides without I/O. `FailurePublisher` publishes the failure record, and waits for it before the
offset of the failed message is committed. In a Kafka transaction both are part of the transaction.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from random import Random
from types import TracebackType
from typing import Any, Final, NamedTuple

from penstock.client.app.figures import Figures
from penstock.client.app.handler import UnreadableMessage
from penstock.client.app.message import message_id_of
from penstock.client.app.publisher import Draft, Published
from penstock.client.deadletters.headers import (
    Failure,
    Header,
    Origin,
    dead_letter_topic,
    failure_headers,
    original_topic,
    read_origin,
    retry_topic,
)
from penstock.client.errors import NotPublished
from penstock.client.payloads import PayloadError
from penstock.client.retry import Duration, duration_s
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.dead_letter_headers import HANDLER_HEADER, MESSAGE_ID, WITHOUT_RECORD_HEADER

__all__ = ("ATTEMPTS_MAX", "Backoff", "FailurePolicy", "FailurePublisher", "FailureRecord", "Reject", "Retry")


#: Every retry has a topic of its own, so this also bounds the number of retry topics.
ATTEMPTS_MAX: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential backoff between retries: after attempt n, from 1, wait min(cap, base * 2^(n-1)) + random(0, base).

    `attempts` counts all deliveries: 5 means the first one and four retries, 1 means no retry. Raises ValueError for
    values that are out of range.
    """

    base: Duration = "1s"
    cap: Duration = "5m"
    attempts: int = 5

    def __post_init__(self) -> None:
        base_s, cap_s = duration_s(self.base), duration_s(self.cap)
        if base_s == 0:
            raise ValueError(f"base={self.base!r} leaves no delay between attempts: it must be longer than 0")
        if cap_s < base_s:
            raise ValueError(f"cap={self.cap!r} is shorter than base={self.base!r}")
        if type(self.attempts) is not int or not 1 <= self.attempts <= ATTEMPTS_MAX:
            raise ValueError(f"attempts={self.attempts!r} must be a whole number from 1 to {ATTEMPTS_MAX}")

    def delay_s(self, attempt: int, chance: Random) -> float:
        """The delay after failed attempt number `attempt`, counted from 1."""
        assert attempt >= 1, f"attempts count from 1, not {attempt}"
        return self._exponential().delay_ms(attempt - 1, chance) / 1000

    def longest_s(self) -> float:
        """The longest possible sum of all delays of one message: the time from its first failure to its last retry."""
        exponential = self._exponential()
        return sum(exponential.longest_ms(attempt) for attempt in range(self.attempts - 1)) / 1000

    def _exponential(self) -> ExponentialBackoff:
        return ExponentialBackoff(base_ms=duration_s(self.base) * 1000, cap_ms=duration_s(self.cap) * 1000)


FAILED, ATTEMPTS_EXHAUSTED, REJECTED, UNREADABLE, FOLLOWS_FAILED_KEY = (
    "failed",
    "attempts exhausted",
    "rejected",
    "unreadable",
    "follows a failed message of its key",
)


_CLIENT_PACKAGE: Final = "penstock.client"
_APP_MODULES: Final = f"{_CLIENT_PACKAGE}.app."


class Reject(Exception):
    """Raise this in a handler if retries are of no use: the message becomes a dead letter at once."""


class Retry(Exception):
    """Raise this in a handler to get the message again, after `delay` if given (such as "5s", or seconds)."""

    def __init__(self, reason: str = "", *, delay: Any = None) -> None:
        super().__init__(reason)
        self.delay = delay


class FailureRecord(NamedTuple):
    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[Header]
    timestamp_ms: int
    is_dead: bool

    def draft(self) -> Draft:
        return Draft(self.topic, self.value, self.key, self.headers, self.partition, self.timestamp_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """Decides what a failed message of one subscription becomes. Without a backoff there are no retries."""

    group: str
    handler: str
    backoff: Backoff | None
    #: The number of partitions of each retry and dead-letter topic.
    partitions: Mapping[str, int]
    now_ms: Callable[[], int]
    chance: Random

    def failure_record(self, raw: Any, error: BaseException) -> FailureRecord:
        origin, attempts = self._origin(raw)
        level = self._level(attempts, error)
        if level is None:
            failure = describe_failure(error, _reason(error, attempts, self.backoff))
            return self._dead(raw, origin, attempts, failure)
        delay_s = self._delay_s(attempts, error)
        return self._waiting(raw, origin, level, attempts, describe_failure(error, FAILED), delay_s)

    def following_record(self, raw: Any, level: int) -> FailureRecord:
        """Returns a record that sends a later message of a failed key to the same retry level, behind the failed one.

        The message was not tried, so this does not count as an attempt.
        """
        origin, attempts = self._origin(raw)
        failure = Failure(error_class="", message=FOLLOWS_FAILED_KEY, reason=FOLLOWS_FAILED_KEY)
        return self._waiting(raw, origin, level, attempts - 1, failure, 0.0)

    def _origin(self, raw: Any) -> tuple[Origin, int]:
        """Returns where the message was published first, and the number of attempts, including this one."""
        origin = read_origin(
            raw.headers(),
            topic=raw.topic(),
            partition=raw.partition(),
            offset=raw.offset(),
            timestamp_ms=raw.timestamp()[1],
        )
        if origin.group is not None and origin.group != self.group:
            origin = replace(origin, attempts=0)  # these are attempts of another group
        return origin, origin.attempts + 1

    def _level(self, attempts: int, error: BaseException) -> int | None:
        """The retry level; None for the dead-letter topic."""
        if self.backoff is None or isinstance(error, (Reject, UnreadableMessage)):
            return None
        return attempts if attempts < self.backoff.attempts else None

    def _delay_s(self, attempts: int, error: BaseException) -> float:
        assert self.backoff is not None
        if isinstance(error, Retry) and error.delay is not None:
            return duration_s(error.delay)
        return self.backoff.delay_s(attempts, self.chance)

    def _waiting(
        self, raw: Any, origin: Origin, level: int, attempts: int, failure: Failure, delay_s: float
    ) -> FailureRecord:
        due_ms = self.now_ms() + round(delay_s * 1000)
        return self._make_record(retry_topic(origin.topic, level), raw, origin, attempts, failure, due_ms)

    def _dead(self, raw: Any, origin: Origin, attempts: int, failure: Failure) -> FailureRecord:
        topic = dead_letter_topic(origin.topic)
        return self._make_record(topic, raw, origin, attempts, failure, self.now_ms())._replace(is_dead=True)

    def _make_record(
        self, topic: str, raw: Any, origin: Origin, attempts: int, failure: Failure, timestamp_ms: int
    ) -> FailureRecord:
        headers = failure_headers(raw.headers(), origin, failure, group=self.group, attempts=attempts)
        headers.append((HANDLER_HEADER, self.handler.encode()))
        if not any(name == MESSAGE_ID and value for name, value in headers):
            headers.append(
                (MESSAGE_ID, message_id_of(raw).encode())
            )  # otherwise each failure record would get an id of its own
        count = self.partitions.get(topic) or origin.partition + 1
        partition = origin.partition % count
        return FailureRecord(topic, partition, raw.key(), raw.value(), headers, timestamp_ms, False)


def describe_failure(error: BaseException, reason: str) -> Failure:
    stack = "".join(traceback.format_exception(type(error), error, _handler_traceback(error.__traceback__)))
    return Failure(error_class=_error_class(error), message=str(error), stack=stack, reason=reason)


def _handler_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback from the handler on, without the frames of this package above it."""
    below = trace
    while below is not None and below.tb_frame.f_globals.get("__name__", "").startswith(_APP_MODULES):
        below = below.tb_next
    return below if below is not None else trace


def _error_class(error: BaseException) -> str:
    """The name of the class as a user would import it."""
    kind = PayloadError if isinstance(error, UnreadableMessage) else type(error)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    home = _CLIENT_PACKAGE if kind.__module__.startswith(f"{_CLIENT_PACKAGE}.") else kind.__module__
    return f"{home}.{kind.__qualname__}"


def _reason(error: BaseException, attempts: int, backoff: Backoff | None) -> str:
    if isinstance(error, UnreadableMessage):
        return UNREADABLE
    if isinstance(error, Reject):
        return REJECTED
    return ATTEMPTS_EXHAUSTED if backoff is not None and attempts >= backoff.attempts else FAILED


_LOG: Final = logging.getLogger("penstock.client")
_PUBLISH_TIMEOUT_S: Final = 300.0

#: Publishes a failure record.
PublishRecord = Callable[[FailureRecord], "Future[Published]"]


class FailurePublisher:
    """Publishes failure records, from any thread.

    With `waits`, it waits for each record before the next message is handled. With `gives_up`, for at-most-once, which
    retries nothing, it drops and counts a record that cannot be published.
    """

    def __init__(
        self,
        policy: FailurePolicy,
        publish: PublishRecord,
        figures: Figures,
        *,
        waits: bool,
        gives_up: bool = False,
        await_published: Callable[[Future[Published], float], Published] = Future.result,
    ) -> None:
        self._policy = policy
        self._publish = publish
        self._figures = figures
        self._waits = waits
        self._gives_up = gives_up
        self._await_published = await_published
        self._lock = threading.Lock()
        #: A rebalance may call `settle` in one thread while another thread does: only one awaits each record.
        self._settling = threading.Lock()
        self._unconfirmed: list[tuple[FailureRecord, Future[Published]]] = []

    def failed(self, raw: Any, error: Exception) -> FailureRecord:
        record = self._policy.failure_record(raw, error)
        words = "is a dead letter" if record.is_dead else f"goes to {record.topic}"
        record_text = f"{raw.topic()}[{raw.partition()}]@{raw.offset()}"
        _LOG.warning("%s %s: %s: %s", record_text, words, type(error).__name__, error)
        with self._lock:
            if record.is_dead:
                self._figures.dead += 1
            else:
                self._figures.retried += 1
        self.send(record)
        return record

    def send(self, record: FailureRecord) -> None:
        """Publishes a failure record. With `waits`, raises NotPublished if that fails."""
        try:
            future = self._publish(record)
        except NotPublished as error:
            self._send_smaller(record, error)
            return
        if self._waits:
            self._await(record, future)
            return
        with self._lock:
            self._unconfirmed.append((record, future))

    def settle(self) -> None:
        """Waits until all records are published. Raises NotPublished.

        After that every further call raises it again: the subscription must start over with a new publisher.
        """
        with self._settling:
            with self._lock:
                waiting = list(self._unconfirmed)
            for record, future in waiting:
                self._await(record, future)
            with self._lock:
                del self._unconfirmed[: len(waiting)]

    def _await(self, record: FailureRecord, future: Future[Published]) -> None:
        try:
            self._await_published(future, _PUBLISH_TIMEOUT_S)
        except NotPublished as error:
            self._send_smaller(record, error)
        except TimeoutError:
            self._not_published(record, NotPublished(f"{record.topic}: no broker answers", may_be_there=True))

    def _send_smaller(self, record: FailureRecord, error: NotPublished) -> None:
        """Tries smaller forms of a record that is too large: in the dead-letter topic, then without its value.

        The headers of a dead record without a value say where the original message is.
        """
        smaller = _smaller_record(record, error) if error.too_large else None
        if smaller is None:
            self._not_published(record, error)
            return
        _LOG.warning("%s; it goes to %s instead", error, smaller.topic)
        try:
            self._await(smaller, self._publish(smaller))
        except NotPublished as again:
            self._send_smaller(smaller, again)

    def _not_published(self, record: FailureRecord, error: NotPublished) -> None:
        if not self._gives_up:
            raise error
        with self._lock:
            self._figures.dropped += 1
        _LOG.warning("%s; the message is dropped", error)


def _smaller_record(record: FailureRecord, error: NotPublished) -> FailureRecord | None:
    """Returns a dead letter instead of a retry, or a dead letter without its value instead of a dead letter.

    Otherwise the subscription would stop at this message forever. Returns None if there is no smaller form.
    """
    if not record.is_dead:
        return record._replace(topic=dead_letter_topic(original_topic(record.topic)), is_dead=True)
    if record.value is None:
        return None
    return record._replace(
        value=None, headers=[*record.headers, (WITHOUT_RECORD_HEADER, str(error).encode())]
    )
