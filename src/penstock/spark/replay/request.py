"""What a replay is asked to do, from settings that are text. Times are milliseconds or dates. Pure."""

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
    """Milliseconds since 1970, or a date with or without a time, which is of UTC where it does not say.

    None where nothing is given. Raises OptionError, which names the setting.
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
    """A replay cannot be done as it was asked for."""


class SourceKind(Enum):
    """Where records come from, by the setting that names it."""

    TOPIC = "topic"
    ARCHIVE = "archive"
    LETTERS = "letters"


class TimestampMode(Enum):
    """Which time records have where they go."""

    #: The moment in which they are written, as of any other record.
    NOW = "now"
    #: The one that they had; brokers may delete old records at once.
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJobRequest:
    kind: SourceKind
    #: The topic, the folder of the archive, or the topic of the dead letters.
    source: str
    #: None: where each dead letter is from; "group": the retries of the group that gave it up.
    to: str | None = None
    #: SQL over the columns of the source.
    where: str | None = None
    #: Offsets, as `startingOffsets` and `endingOffsets` of Spark's sources take them.
    starting: str = _EARLIEST
    ending: str = _LATEST
    #: since <= timestamp < until, by the time of the first record at or after each.
    since_ms: int | None = None
    until_ms: int | None = None
    times: TimestampMode = TimestampMode.NOW
    rate_per_s: float | None = None
    id: str = ""

    @property
    def is_to_group(self) -> bool:
        """Back to the group that gave each letter up, and nobody else."""
        return self.kind is SourceKind.LETTERS and self.to == ReplayTarget.GROUP.value

    @property
    def identity(self) -> dict[str, Any]:
        """What makes it this replay and no other; how fast it goes does not."""
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
    """Raises ReplayError or OptionError, which name the setting."""
    if from_:
        kind, source = _kind_of_source(from_), from_
    else:
        kind, source = _source(topic=topic, archive=archive, letters=letters)
    if not to and kind is not SourceKind.LETTERS:
        raise ReplayError(
            "to= names the topic that records go to; only dead letters know where they are from"
        )
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
    """The words that the command line has for letters mean the same here."""
    is_home = not to or (kind is SourceKind.LETTERS and to == ReplayTarget.ORIGINAL.value)
    return None if is_home else to


def _kind_of_source(source: str) -> SourceKind:
    """A folder is an archive, and dead letters are known by the name of their topic."""
    if "/" in source:
        return SourceKind.ARCHIVE
    is_dead = is_failure_topic(source) and original_topic(source) != source and retry_level(source) is None
    return SourceKind.LETTERS if is_dead else SourceKind.TOPIC


def _source(**named: str) -> tuple[SourceKind, str]:
    given = {name: value for name, value in named.items() if value}
    if len(given) != 1:
        told = f"not {' and '.join(given)}" if given else "none of them is given"
        names = ", ".join(f"{name}=" for name in ("from", *named))
        raise ReplayError(f"one of {names} says what to replay; {told}")
    ((name, value),) = given.items()
    return SourceKind(name), value


def _refuse_two_ranges(request: ReplayJobRequest) -> None:
    is_by_time = request.since_ms is not None or request.until_ms is not None
    is_by_offset = (request.starting, request.ending) != (_EARLIEST, _LATEST)
    if is_by_time and is_by_offset:
        raise ReplayError("a range is either by time (since=, until=) or by offset (starting=, ending=)")
    if is_by_offset and request.kind is SourceKind.ARCHIVE:
        raise ReplayError(
            "a range of an archive is by time (since=, until=) or by where=, such as _offset < 10"
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
    """With an id: the one that was given, or one that is the same whenever the same is asked for."""
    if request.id and _ID.fullmatch(request.id) is None:
        raise ReplayError(f"id={request.id}: use up to 120 letters, digits, '.', '_', '-'")
    if request.id:
        return request
    text = json.dumps(request.identity, sort_keys=True)
    return replace(request, id=f"{request.kind.value}-{hashlib.sha256(text.encode()).hexdigest()[:16]}")
