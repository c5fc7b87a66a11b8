"""What becomes of a message that failed: the next level of retries, or the dead-letter topic.

Decided here without any I/O; whoever asked publishes the letter before the message's position is committed, or in the
same transaction.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from types import TracebackType
from typing import Any, Final, NamedTuple

from penstock.client.app.handling import Unreadable
from penstock.client.app.message import id_of
from penstock.client.backoff import Backoff
from penstock.client.letters import (
    Failure,
    Header,
    Origin,
    dead_letter_topic,
    headers_for,
    origin_of,
    retry_topic,
)
from penstock.client.payloads import PayloadError
from penstock.protocol.letters import HANDLER, MESSAGE_ID

__all__ = ["Failing", "Letter", "Reject", "Retry"]

FAILED, LAST, REJECTED, UNREADABLE, FOLLOWS = (
    "failed",
    "attempts exhausted",
    "rejected",
    "unreadable",
    "follows a failed message of its key",
)


_CLIENT: Final = "penstock.client"
_OURS: Final = f"{_CLIENT}.app."


class Reject(Exception):
    """Raise it in a handler for a message that need not be tried again: it becomes a dead letter at once."""


class Retry(Exception):
    """Raise it in a handler to have a message again, after `delay` if that is given ("5s", a number of seconds)."""

    def __init__(self, reason: str = "", *, delay: Any = None) -> None:
        super().__init__(reason)
        self.delay = delay


class Letter(NamedTuple):
    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[Header]
    timestamp_ms: int
    is_dead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """The rules of one subscription. Without a backoff every failure is the last."""

    group: str
    handler: str
    backoff: Backoff | None
    #: Of every letter topic.
    partitions: Mapping[str, int]
    now_ms: Callable[[], int]
    chance: Random

    def letter(self, raw: Any, error: BaseException) -> Letter:
        origin, attempts = self._origin(raw)
        level = self._level(attempts, error)
        if level is None:
            failure = failure_of(error, _reason(error, attempts, self.backoff))
            return self._dead(raw, origin, attempts, failure)
        delay_s = self._delay_s(attempts, error)
        return self._waiting(raw, origin, level, attempts, failure_of(error, FAILED), delay_s)

    def follower(self, raw: Any, level: int) -> Letter:
        """A later message of a failed key, to the same level behind it; it was not tried, and that does not count."""
        origin, attempts = self._origin(raw)
        failure = Failure(error_class="", message=FOLLOWS, reason=FOLLOWS)
        return self._waiting(raw, origin, level, attempts - 1, failure, 0.0)

    def _origin(self, raw: Any) -> tuple[Origin, int]:
        """Where it was first, and how often it has been tried, this time included."""
        origin = origin_of(
            raw.headers(),
            topic=raw.topic(),
            partition=raw.partition(),
            offset=raw.offset(),
            timestamp_ms=raw.timestamp()[1],
        )
        if origin.group is not None and origin.group != self.group:
            origin = replace(origin, attempts=0)  # somebody else's attempts
        return origin, origin.attempts + 1

    def _level(self, attempts: int, error: BaseException) -> int | None:
        """None for the dead-letter topic."""
        if self.backoff is None or isinstance(error, (Reject, Unreadable)):
            return None
        return attempts if attempts < self.backoff.attempts else None

    def _delay_s(self, attempts: int, error: BaseException) -> float:
        assert self.backoff is not None
        if isinstance(error, Retry) and error.delay is not None:
            from penstock.client.durations import seconds

            return seconds(error.delay)
        return self.backoff.delay_s(attempts, self.chance)

    def _waiting(
        self, raw: Any, origin: Origin, level: int, attempts: int, failure: Failure, delay_s: float
    ) -> Letter:
        due_ms = self.now_ms() + round(delay_s * 1000)
        return self._letter(retry_topic(origin.topic, level), raw, origin, attempts, failure, due_ms)

    def _dead(self, raw: Any, origin: Origin, attempts: int, failure: Failure) -> Letter:
        topic = dead_letter_topic(origin.topic)
        return self._letter(topic, raw, origin, attempts, failure, self.now_ms())._replace(is_dead=True)

    def _letter(
        self, topic: str, raw: Any, origin: Origin, attempts: int, failure: Failure, timestamp_ms: int
    ) -> Letter:
        headers = headers_for(raw.headers(), origin, failure, group=self.group, attempts=attempts)
        headers.append((HANDLER, self.handler.encode()))
        if not any(name == MESSAGE_ID and value for name, value in headers):
            headers.append((MESSAGE_ID, id_of(raw).encode()))  # or each letter of it would get one of its own
        count = self.partitions.get(topic) or origin.partition + 1
        partition = origin.partition % count
        return Letter(topic, partition, raw.key(), raw.value(), headers, timestamp_ms, False)


def failure_of(error: BaseException, reason: str) -> Failure:
    stack = "".join(traceback.format_exception(type(error), error, _below_us(error.__traceback__)))
    return Failure(error_class=_name(error), message=str(error), stack=stack, reason=reason)


def _below_us(trace: TracebackType | None) -> TracebackType | None:
    """From the handler on: how we came to call it tells nobody anything."""
    below = trace
    while below is not None and below.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        below = below.tb_next
    return below if below is not None else trace


def _name(error: BaseException) -> str:
    """As a user would import it."""
    kind = PayloadError if isinstance(error, Unreadable) else type(error)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    home = _CLIENT if kind.__module__.startswith(f"{_CLIENT}.") else kind.__module__
    return f"{home}.{kind.__qualname__}"


def _reason(error: BaseException, attempts: int, backoff: Backoff | None) -> str:
    if isinstance(error, Unreadable):
        return UNREADABLE
    if isinstance(error, Reject):
        return REJECTED
    return LAST if backoff is not None and attempts >= backoff.attempts else FAILED
