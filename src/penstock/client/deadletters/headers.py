"""Names of retry and dead-letter topics, and the headers that say where a failed record is from and why.

A failed record keeps its key, value and headers, and gets headers about the failure. In a retry topic its timestamp is
the time when it is due, so that brokers can find the first record that is not due yet; a header has the time when it
was published. Headers are text that anyone may have written: a reader takes a value that makes no sense for absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock.protocol.dead_letter_headers import (
    DEAD_LETTER_RETENTION_MS,
    DELIVERY_COUNT_HEADER,
    ERROR_CLASS_HEADER,
    ERROR_MESSAGE_BYTES_MAX,
    ERROR_MESSAGE_HEADER,
    ERROR_STACK_BYTES_MAX,
    ERROR_STACK_HEADER,
    GROUP_HEADER,
    HEADER_PREFIXES,
    MESSAGE_ID,
    OFFSET_HEADER,
    PARTITION_HEADER,
    REASON_HEADER,
    TIMESTAMP_HEADER,
    TOPIC_HEADER,
    truncate_text,
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
    "failure_headers",
    "is_failure_topic",
    "is_for_group",
    "original_headers",
    "original_topic",
    "read_failure",
    "read_origin",
    "replayed_key",
    "replayed_topic",
    "retry_level",
    "retry_topic",
]

Header = tuple[str, bytes | None]

_RETRY_TOPIC: Final = re.compile(r"(?P<topic>.+)\.retry\.(?P<level>[1-9][0-9]{0,2})", re.DOTALL)
_DEAD_LETTER_SUFFIX: Final = ".dlq"
_REPLAYED_SUFFIX: Final = ".replayed"
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
    return topic + _DEAD_LETTER_SUFFIX


def replayed_topic(dead_letters: str) -> str:
    """Which letters of that topic were published again, so that none is twice."""
    return dead_letters + _REPLAYED_SUFFIX


def retry_level(topic: str) -> int | None:
    """None for what is no retry topic by its name."""
    match = _RETRY_TOPIC.fullmatch(topic)
    return int(match["level"]) if match is not None else None


def original_topic(topic: str) -> str:
    """Whose retries or dead letters these are; any other topic is its own."""
    match = _RETRY_TOPIC.fullmatch(topic)
    if match is not None:
        return match["topic"]
    return topic.removesuffix(_DEAD_LETTER_SUFFIX) or topic


def is_failure_topic(topic: str) -> bool:
    """By its name: retries, dead letters, or the list of those that were replayed."""
    return retry_level(topic) is not None or topic.removesuffix(_REPLAYED_SUFFIX).endswith(
        _DEAD_LETTER_SUFFIX
    )


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


def read_origin(
    headers: Iterable[Header] | None, *, topic: str, partition: int, offset: int, timestamp_ms: int
) -> Origin:
    """As its headers say; a record that is no letter, or names no place, is where it has always been."""
    fields = _failure_fields(headers)
    attempts, group = (
        _number_field(fields, DELIVERY_COUNT_HEADER, _INT_MAX - 1) or 0,
        fields.get(GROUP_HEADER),
    )
    named = (
        fields.get(TOPIC_HEADER),
        _number_field(fields, PARTITION_HEADER, _INT_MAX),
        _number_field(fields, OFFSET_HEADER, _LONG_MAX),
    )
    if named[0] is not None and named[1] is not None and named[2] is not None:
        topic, partition, offset = named[0], named[1], named[2]
        published_ms = _number_field(fields, TIMESTAMP_HEADER, _TIMESTAMP_MS_MAX)
        timestamp_ms = timestamp_ms if published_ms is None else published_ms
    return Origin(
        topic=topic,
        partition=partition,
        offset=offset,
        timestamp_ms=timestamp_ms,
        attempts=attempts,
        group=group,
    )


def is_for_group(headers: Iterable[Header] | None, group: str) -> bool:
    """Records in retry topics name the group that retries them; one that names none is for all."""
    return _failure_fields(headers).get(GROUP_HEADER, group) == group


def _failure_fields(headers: Iterable[Header] | None) -> dict[str, str]:
    """Headers of letters, the last of each name."""
    return {
        name: value.decode(errors="replace")
        for name, value in headers or ()
        if value is not None and name.startswith(HEADER_PREFIXES)
    }


def _number_field(fields: dict[str, str], name: str, most: int) -> int | None:
    text = fields.get(name, "")
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


def read_failure(headers: Iterable[Header] | None) -> Failure | None:
    """None where the record is no letter."""
    fields = _failure_fields(headers)
    if not fields:
        return None
    return Failure(
        error_class=fields.get(ERROR_CLASS_HEADER, ""),
        message=fields.get(ERROR_MESSAGE_HEADER, ""),
        stack=fields.get(ERROR_STACK_HEADER, ""),
        reason=fields.get(REASON_HEADER, ""),
    )


def failure_headers(
    headers: Iterable[Header] | None, origin: Origin, failure: Failure, *, group: str, attempts: int
) -> list[Header]:
    """The record's own headers, and what is to be told of it, in place of what was told before."""
    fields = {
        TOPIC_HEADER: origin.topic,
        PARTITION_HEADER: str(origin.partition),
        OFFSET_HEADER: str(origin.offset),
        TIMESTAMP_HEADER: str(origin.timestamp_ms),
        GROUP_HEADER: group,
        DELIVERY_COUNT_HEADER: str(attempts),
        REASON_HEADER: failure.reason,
        ERROR_CLASS_HEADER: failure.error_class,
        ERROR_MESSAGE_HEADER: truncate_text(failure.message, ERROR_MESSAGE_BYTES_MAX),
        ERROR_STACK_HEADER: truncate_text(failure.stack, ERROR_STACK_BYTES_MAX),
    }
    return original_headers(headers) + [
        (name, text.encode(errors="replace")) for name, text in fields.items()
    ]


def original_headers(headers: Iterable[Header] | None) -> list[Header]:
    """The record's own headers, as they were before it failed."""
    return [(name, value) for name, value in headers or () if not name.startswith(HEADER_PREFIXES)]


# Published again


def replayed_key(partition: int, offset: int) -> bytes:
    """Of a letter, in the topic of those that were replayed."""
    return b"%d:%d" % (partition, offset)
