"""Retries and dead letters: the topics they are in, and the headers that tell where they are from and why.

A record that failed goes on as it was, with headers about what happened added to its own. In a retry topic its
timestamp is the moment when it is due, so that brokers can find the first that is not due yet; when it was published
is in a header. Headers are text that anyone may have written: whoever reads them takes what makes no sense for absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock.protocol.letters import (
    DEAD_LETTER_RETENTION_MS,
    DELIVERY_COUNT,
    ERROR_CLASS,
    ERROR_STACK,
    GROUP,
    MESSAGE,
    MESSAGE_BYTES_MAX,
    MESSAGE_ID,
    OFFSET,
    PARTITION,
    PREFIXES,
    REASON,
    STACK_BYTES_MAX,
    TIMESTAMP,
    TOPIC,
    cut,
)

__all__ = [
    "DEAD_LETTER_SETTINGS",
    "MESSAGE_ID",
    "REPLAYED_SETTINGS",
    "RETRY_SETTINGS",
    "Failure",
    "Header",
    "Origin",
    "dead_letter_topic",
    "failure_in",
    "headers_for",
    "is_for",
    "is_letter_topic",
    "origin_of",
    "original_topic",
    "replayed_key",
    "replayed_topic",
    "restored",
    "retry_level",
    "retry_topic",
]

Header = tuple[str, bytes | None]

_RETRY: Final = re.compile(r"(?P<topic>.+)\.retry\.(?P<level>[1-9][0-9]{0,2})", re.DOTALL)
_DEAD: Final = ".dlq"
_REPLAYED: Final = ".replayed"
_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_INT_MAX: Final = (1 << 31) - 1
_LONG_MAX: Final = (1 << 63) - 1
#: The last moment that has four digits for its year.
_TIMESTAMP_MS_MAX: Final = 253_402_300_799_999

#: Records there lie in the future, and are read by the time they carry.
RETRY_SETTINGS: Final = {
    "message.timestamp.type": "CreateTime",
    "message.timestamp.after.max.ms": str(_LONG_MAX),
}
#: Dead letters are kept for at least thirty days: people need more time for them than the usual week of a topic.
DEAD_LETTER_SETTINGS: Final = {
    "message.timestamp.type": "CreateTime",
    "retention.ms": str(DEAD_LETTER_RETENTION_MS),
}
REPLAYED_SETTINGS: Final = {"cleanup.policy": "compact"}


# Names of topics


def retry_topic(topic: str, level: int) -> str:
    """Where records wait that have been tried `level` times."""
    assert level >= 1, f"no retries before attempt {level}"
    return f"{topic}.retry.{level}"


def dead_letter_topic(topic: str) -> str:
    return topic + _DEAD


def replayed_topic(dead_letters: str) -> str:
    """Which letters of that topic were published again, so that none is twice."""
    return dead_letters + _REPLAYED


def retry_level(topic: str) -> int | None:
    """None for what is no retry topic by its name."""
    match = _RETRY.fullmatch(topic)
    return int(match["level"]) if match is not None else None


def original_topic(topic: str) -> str:
    """Whose retries or dead letters these are; any other topic is its own."""
    match = _RETRY.fullmatch(topic)
    if match is not None:
        return match["topic"]
    return topic.removesuffix(_DEAD) or topic


def is_letter_topic(topic: str) -> bool:
    """By its name: retries, dead letters, or the list of those that were replayed."""
    return retry_level(topic) is not None or topic.removesuffix(_REPLAYED).endswith(_DEAD)


# Where a record is from


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a record was first, and how often it has been tried since."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    attempts: int = 0
    #: Whose attempts these were.
    group: str | None = None


def origin_of(
    headers: Iterable[Header] | None, *, topic: str, partition: int, offset: int, timestamp_ms: int
) -> Origin:
    """As its headers say; a record that is no letter, or names no place, is where it has always been."""
    told = _told(headers)
    attempts, group = _number(told, DELIVERY_COUNT, _INT_MAX - 1) or 0, told.get(GROUP)
    named = told.get(TOPIC), _number(told, PARTITION, _INT_MAX), _number(told, OFFSET, _LONG_MAX)
    if named[0] is not None and named[1] is not None and named[2] is not None:
        topic, partition, offset = named[0], named[1], named[2]
        published_ms = _number(told, TIMESTAMP, _TIMESTAMP_MS_MAX)
        timestamp_ms = timestamp_ms if published_ms is None else published_ms
    return Origin(
        topic=topic,
        partition=partition,
        offset=offset,
        timestamp_ms=timestamp_ms,
        attempts=attempts,
        group=group,
    )


def is_for(headers: Iterable[Header] | None, group: str) -> bool:
    """Records in retry topics name the group that retries them; one that names none is for all."""
    return _told(headers).get(GROUP, group) == group


def _told(headers: Iterable[Header] | None) -> dict[str, str]:
    """Headers of letters, the last of each name."""
    return {
        name: value.decode(errors="replace")
        for name, value in headers or ()
        if value is not None and name.startswith(PREFIXES)
    }


def _number(told: dict[str, str], name: str, most: int) -> int | None:
    text = told.get(name, "")
    return int(text) if _NUMBER.fullmatch(text) is not None and int(text) <= most else None


# Why it is here


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong, in words that can be sent."""

    error_class: str
    message: str
    stack: str = ""
    #: Why it is not tried again, or that it is.
    reason: str = "failed"


def failure_in(headers: Iterable[Header] | None) -> Failure | None:
    """None where the record is no letter."""
    told = _told(headers)
    if not told:
        return None
    return Failure(
        error_class=told.get(ERROR_CLASS, ""),
        message=told.get(MESSAGE, ""),
        stack=told.get(ERROR_STACK, ""),
        reason=told.get(REASON, ""),
    )


def headers_for(
    headers: Iterable[Header] | None, origin: Origin, failure: Failure, *, group: str, attempts: int
) -> list[Header]:
    """The record's own headers, and what is to be told of it, in place of what was told before."""
    told = {
        TOPIC: origin.topic,
        PARTITION: str(origin.partition),
        OFFSET: str(origin.offset),
        TIMESTAMP: str(origin.timestamp_ms),
        GROUP: group,
        DELIVERY_COUNT: str(attempts),
        REASON: failure.reason,
        ERROR_CLASS: failure.error_class,
        MESSAGE: cut(failure.message, MESSAGE_BYTES_MAX),
        ERROR_STACK: cut(failure.stack, STACK_BYTES_MAX),
    }
    return restored(headers) + [(name, text.encode(errors="replace")) for name, text in told.items()]


def restored(headers: Iterable[Header] | None) -> list[Header]:
    """The record's own headers, as they were before it failed."""
    return [(name, value) for name, value in headers or () if not name.startswith(PREFIXES)]


# Published again


def replayed_key(partition: int, offset: int) -> bytes:
    """Of a letter, in the topic of those that were replayed."""
    return b"%d:%d" % (partition, offset)
