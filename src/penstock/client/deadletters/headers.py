"""Names of retry and dead-letter topics, and the headers that say where a failed record is from and why.

A failed record keeps its key, value and headers, and gets headers about the failure. In a retry topic its timestamp is
the time when it is due, so that brokers can find the first record that is not due yet; a header has the time when it
was published. Any client may write these headers, so a reader ignores invalid values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock.protocol.dead_letter_headers import (
    DEAD_LETTER_RETENTION_MS,
    DEAD_LETTER_TOPIC_SETTINGS,
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
#: The last millisecond of the year 9999.
_TIMESTAMP_MS_MAX: Final = 253_402_300_799_999

#: Timestamps of retries are in the future, and brokers must not change them.
RETRY_SETTINGS: Final = {
    "message.timestamp.type": "CreateTime",
    "message.timestamp.after.max.ms": str(_LONG_MAX),
}
#: Dead letters are kept for at least thirty days, because people need more time for them than the default week.
DEAD_LETTER_SETTINGS: Final = {
    "message.timestamp.type": "CreateTime",
    "retention.ms": str(DEAD_LETTER_RETENTION_MS),
    **DEAD_LETTER_TOPIC_SETTINGS,
}
REPLAYED_SETTINGS: Final = {"cleanup.policy": "compact"}


# Names of topics


def retry_topic(topic: str, level: int) -> str:
    """Returns the retry topic of records that were tried `level` times."""
    assert level >= 1, f"retry levels start at 1, not {level}"
    return f"{topic}.retry.{level}"


def dead_letter_topic(topic: str) -> str:
    return topic + _DEAD_LETTER_SUFFIX


def replayed_topic(dead_letters: str) -> str:
    """Returns the topic that lists the resolved dead letters, so that none is published twice."""
    return dead_letters + _REPLAYED_SUFFIX


def retry_level(topic: str) -> int | None:
    """Returns the level of a retry topic; None for other topics."""
    match = _RETRY_TOPIC.fullmatch(topic)
    return int(match["level"]) if match is not None else None


def original_topic(topic: str) -> str:
    """Returns the topic whose retries or dead letters these are; returns any other topic unchanged."""
    match = _RETRY_TOPIC.fullmatch(topic)
    if match is not None:
        return match["topic"]
    return topic.removesuffix(_DEAD_LETTER_SUFFIX) or topic


def is_failure_topic(topic: str) -> bool:
    """Whether the name is that of a retry topic, a dead-letter topic or a list of resolved dead letters."""
    return retry_level(topic) is not None or topic.removesuffix(_REPLAYED_SUFFIX).endswith(
        _DEAD_LETTER_SUFFIX
    )


# The origin of a record


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a record was published first, and how often it was tried since."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    attempts: int = 0
    #: The group that has tried it.
    group: str | None = None


def read_origin(
    headers: Iterable[Header] | None, *, topic: str, partition: int, offset: int, timestamp_ms: int
) -> Origin:
    """Reads the origin from the headers. A record without such headers is its own origin."""
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
    """Whether a record of a retry topic is for this group. A record without a group is for all groups."""
    return _failure_fields(headers).get(GROUP_HEADER, group) == group


def _failure_fields(headers: Iterable[Header] | None) -> dict[str, str]:
    """Returns the failure headers; of several with one name, the last."""
    return {
        name: value.decode(errors="replace")
        for name, value in headers or ()
        if value is not None and name.startswith(HEADER_PREFIXES)
    }


def _number_field(fields: dict[str, str], name: str, most: int) -> int | None:
    text = fields.get(name, "")
    return int(text) if _NUMBER.fullmatch(text) is not None and int(text) <= most else None


# The failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error as text."""

    error_class: str
    message: str
    stack: str = ""
    #: Why the record is not retried, or "failed" if it is.
    reason: str = "failed"


def read_failure(headers: Iterable[Header] | None) -> Failure | None:
    """Returns None for a record without failure headers."""
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
    """Returns the record's own headers and new failure headers, without the old failure headers."""
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
    """Returns the headers that the record had before it failed."""
    return [(name, value) for name, value in headers or () if not name.startswith(HEADER_PREFIXES)]


# Resolved dead letters


def replayed_key(partition: int, offset: int) -> bytes:
    """Returns the key of a dead letter in the list of resolved ones."""
    return b"%d:%d" % (partition, offset)
