"""The request of a replay, parsed from settings that are text. Times are milliseconds or dates. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final

from penstock.client.deadletters.headers import is_failure_topic, original_topic, retry_level
from penstock.client.deadletters.writer import ReplayTarget
from penstock.client.errors import ClientError
from penstock.spark.option_reader import invalid_option


def parse_time_ms(name: str, text: str) -> int | None:
    """Parse milliseconds since 1970, or a date with or without a time. UTC is the default time zone.

    Returns None for an empty text. Raises OptionError, which names the setting.
    """
    if not text:
        return None
    if re.fullmatch(r"\d{1,15}", text):
        return int(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise invalid_option(
            name, text, "must be a time such as 2026-03-01T12:00:00Z, or milliseconds"
        ) from None
    aware = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    return round(aware.timestamp() * 1000)


_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,120}")
_EARLIEST, _LATEST = "earliest", "latest"


class ReplayError(ClientError):
    """The request is invalid, or cannot be carried out."""


class SourceKind(Enum):
    """The source of the records. The values are the settings that name it."""

    TOPIC = "topic"
    ARCHIVE = "archive"
    DEAD_LETTERS = "letters"


class TimestampMode(Enum):
    """The timestamps of the replayed records."""

    #: The time of writing.
    NOW = "now"
    #: The original timestamp. Brokers may delete old records at once.
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJobRequest:
    kind: SourceKind
    #: The topic, the folder of the archive, or the dead-letter topic.
    source: str
    #: A topic. None: the original topic of each dead letter. "group": the retry topics of the group that failed.
    to: str | None = None
    #: A SQL condition over the columns of the source.
    where: str | None = None
    #: As the options startingOffsets and endingOffsets of the source.
    starting: str = _EARLIEST
    ending: str = _LATEST
    #: since <= timestamp < until.
    since_ms: int | None = None
    until_ms: int | None = None
    times: TimestampMode = TimestampMode.NOW
    rate_per_s: float | None = None
    id: str = ""

    @property
    def is_to_group(self) -> bool:
        """Whether each dead letter goes to a retry topic, where only the group that failed reads it."""
        return self.kind is SourceKind.DEAD_LETTERS and self.to == ReplayTarget.GROUP.value

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that identify the replay. The rate is not one of them."""
        return {
            "from": {self.kind.value: self.source},
            "to": self.to,
            "where": self.where,
            "starting": self.starting,
            "ending": self.ending,
            "since": self.since_ms,
            "until": self.until_ms,
            "times": self.times.value,
        }


def parse_request(
    *,
    from_: str = "",
    topic: str = "",
    archive: str = "",
    letters: str = "",
    to: str = "",
    where: str = "",
    starting: str = _EARLIEST,
    ending: str = _LATEST,
    since: str = "",
    until: str = "",
    times: str = "now",
    rate: str = "",
    id: str = "",
) -> ReplayJobRequest:
    """Parse the settings. Raises ReplayError or OptionError, which name the setting."""
    if from_:
        kind, source = _kind_of_source(from_), from_
    else:
        kind, source = _source(topic=topic, archive=archive, letters=letters)
    if not to and kind is not SourceKind.DEAD_LETTERS:
        raise ReplayError("to= is missing: only dead letters can go back to their original topics")
    request = ReplayJobRequest(
        kind=kind,
        source=source,
        to=_target(kind, to),
        where=where or None,
        starting=starting,
        ending=ending,
        since_ms=parse_time_ms("since", since),
        until_ms=parse_time_ms("until", until),
        times=_timestamp_mode(times),
        rate_per_s=_rate(rate),
        id=id,
    )
    _refuse_two_ranges(request)
    return _with_id(request)


def _target(kind: SourceKind, to: str) -> str | None:
    """Return the target. The name of the default on the command line is accepted too."""
    is_original = not to or (kind is SourceKind.DEAD_LETTERS and to == ReplayTarget.ORIGINAL.value)
    return None if is_original else to


def _kind_of_source(source: str) -> SourceKind:
    """Return the kind: a path is an archive, and dead-letter topics have a suffix."""
    if "/" in source:
        return SourceKind.ARCHIVE
    is_dead = is_failure_topic(source) and original_topic(source) != source and retry_level(source) is None
    return SourceKind.DEAD_LETTERS if is_dead else SourceKind.TOPIC


def _source(**named: str) -> tuple[SourceKind, str]:
    given = {name: value for name, value in named.items() if value}
    if len(given) != 1:
        names = ", ".join(f"{name}=" for name in ("from", *named))
        raise ReplayError(f"exactly one of {names} is needed (given: {', '.join(given) or 'none'})")
    ((name, value),) = given.items()
    return SourceKind(name), value


def _refuse_two_ranges(request: ReplayJobRequest) -> None:
    is_by_time = request.since_ms is not None or request.until_ms is not None
    is_by_offset = (request.starting, request.ending) != (_EARLIEST, _LATEST)
    if is_by_time and is_by_offset:
        raise ReplayError("give a range either by time (since=, until=) or by offset (starting=, ending=)")
    if is_by_offset and request.kind is SourceKind.ARCHIVE:
        raise ReplayError(
            "give the range of an archive by time (since=, until=) or by where=, such as _offset < 10"
        )
    if None not in (request.since_ms, request.until_ms) and request.since_ms >= request.until_ms:  # type: ignore[operator]
        raise ReplayError("since= must be before until=")


def _timestamp_mode(text: str) -> TimestampMode:
    names = [each.value for each in TimestampMode]
    if text not in names:
        raise ReplayError(f"times={text}: must be one of {', '.join(names)}")
    return TimestampMode(text)


def _rate(text: str) -> float | None:
    if not text:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1e12:
        raise ReplayError(f"rate={text}: must be a number of records per second, above 0")
    return rate


def _with_id(request: ReplayJobRequest) -> ReplayJobRequest:
    """Set the id if it is missing. The same request gets the same id every time."""
    if request.id and _ID.fullmatch(request.id) is None:
        raise ReplayError(f"id={request.id}: use up to 120 letters, digits, '.', '_', '-'")
    if request.id:
        return request
    text = json.dumps(request.identity, sort_keys=True)
    return replace(request, id=f"{request.kind.value}-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
