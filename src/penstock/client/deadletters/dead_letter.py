"""A dead letter, its resolution, and filters that select dead letters. Pure.

A record of the topic `<topic>.replayed` has the id of a dead letter, PARTITION:OFFSET, as its key. A reader goes by
the keys: a dead letter with an entry there must not be published again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.client.deadletters.headers import (
    Failure,
    Header,
    Origin,
    original_headers,
    read_failure,
    read_origin,
    replayed_key,
)
from penstock.protocol.dead_letter_headers import (
    EDITED_FROM_HEADER,
    GROUP_HEADER,
    HANDLER_HEADER,
    WITHOUT_RECORD_HEADER,
)
from penstock.protocol.record_batch import Record

_DEAD_LETTER_ID: Final = re.compile(r"(?P<partition>\d{1,9}):(?P<offset>\d{1,18})")


class DeadLetterId(NamedTuple):
    """The partition and offset of a dead letter in its topic."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


def parse_dead_letter_id(text: str) -> DeadLetterId | None:
    """Returns None for text that is not PARTITION:OFFSET."""
    found = _DEAD_LETTER_ID.fullmatch(text)
    return None if found is None else DeadLetterId(int(found["partition"]), int(found["offset"]))


class DeadLetter(NamedTuple):
    topic: str
    partition: int
    record: Record

    @property
    def dead_letter_id(self) -> DeadLetterId:
        return DeadLetterId(self.partition, self.record.offset)

    @property
    def timestamp_ms(self) -> int:
        """When it became a dead letter."""
        return self.record.timestamp

    @property
    def origin(self) -> Origin | None:
        """None if the headers do not name an origin."""
        found = read_origin(
            self.record.headers, topic="", partition=0, offset=0, timestamp_ms=self.record.timestamp
        )
        return found if found.topic else None

    @property
    def attempts(self) -> int:
        origin = self.origin
        return 0 if origin is None else origin.attempts

    @property
    def failure(self) -> Failure:
        return read_failure(self.record.headers) or Failure(error_class="", message="", reason="")

    @property
    def group(self) -> str | None:
        return self.header(GROUP_HEADER)

    @property
    def handler(self) -> str | None:
        return self.header(HANDLER_HEADER)

    @property
    def edited_from(self) -> DeadLetterId | None:
        return parse_dead_letter_id(self.header(EDITED_FROM_HEADER) or "")

    @property
    def has_record(self) -> bool:
        """Whether the original record is included. Brokers may be configured not to copy it, or it was too large."""
        is_empty = self.record.key is None and self.record.value is None
        return self.header(WITHOUT_RECORD_HEADER) is None and not (is_empty and self.origin is not None)

    @property
    def own_headers(self) -> list[Header]:
        """The headers that the record had before it failed."""
        return original_headers(self.record.headers)

    def header(self, name: str) -> str | None:
        """Returns the last header of this name as text."""
        for key, value in reversed(self.record.headers):
            if key == name and value is not None:
                return value.decode(errors="replace")
        return None


AT: Final = "at"
REPLAY: Final = "replay"
TO: Final = "to"
TOPIC_ID: Final = "topicId"
STATE: Final = "state"


class ResolutionState(StrEnum):
    #: It was published again. Entries without a state, which replays on Spark write, mean this.
    REPLAYED = "replayed"
    #: A corrected dead letter replaces it.
    EDITED = "edited"
    #: It is not needed any more.
    PURGED = "purged"


class Resolution(NamedTuple):
    state: ResolutionState
    at_ms: int | None = None
    #: The id of the replay.
    replay: str | None = None
    #: The topic that the record went to.
    to: str | None = None


def resolution_key(dead_letter_id: DeadLetterId) -> bytes:
    return replayed_key(*dead_letter_id)


def resolution_value(resolution: Resolution, topic_id: UUID | None) -> bytes:
    fields = {
        AT: resolution.at_ms,
        REPLAY: resolution.replay,
        TO: resolution.to,
        TOPIC_ID: None if topic_id is None else str(topic_id),
        STATE: resolution.state.value,
    }
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def parse_resolution(
    key: bytes | None, value: bytes | None, topic_id: UUID | None
) -> tuple[DeadLetterId, Resolution] | None:
    """Returns None for an invalid entry, or one about an earlier topic of the same name."""
    dead_letter_id = parse_dead_letter_id((key or b"").decode(errors="replace"))
    fields = _json_object(value)
    is_other = topic_id is not None and fields.get(TOPIC_ID) not in (None, str(topic_id))
    if dead_letter_id is None or is_other:
        return None
    return dead_letter_id, Resolution(
        _parse_state(fields),
        _typed_field(fields, AT, int),
        _typed_field(fields, REPLAY, str),
        _typed_field(fields, TO, str),
    )


def _json_object(value: bytes | None) -> dict[str, Any]:
    try:
        found = json.loads(value or b"")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _parse_state(fields: dict[str, Any]) -> ResolutionState:
    try:
        return ResolutionState(fields.get(STATE, ResolutionState.REPLAYED))
    except ValueError:
        return ResolutionState.REPLAYED  # a state of a later version


def _typed_field(fields: dict[str, Any], name: str, kind: type) -> Any:
    found = fields.get(name)
    return found if isinstance(found, kind) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """Selects dead letters that match all given fields.

    A field with several values matches if one of them does. `headers` matches if all of them do.
    """

    #: since <= timestamp < until
    since_ms: int | None = None
    until_ms: int | None = None
    #: Patterns such as `*Timeout*` for the error class, with or without its module.
    errors: tuple[str, ...] = ()
    keys: tuple[bytes, ...] = ()
    headers: tuple[tuple[str, bytes], ...] = ()
    groups: tuple[str, ...] = ()
    handlers: tuple[str, ...] = ()
    partitions: tuple[int, ...] = ()
    #: Pairs of the first and the last offset.
    offsets: tuple[tuple[int, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        return self == DeadLetterFilter()

    def matches(self, letter: DeadLetter) -> bool:
        return (
            self._matches_offset(letter)
            and self._matches_time(letter)
            and self._matches_record(letter)
            and (
                not self.errors
                or any(matches_error(each, letter.failure.error_class) for each in self.errors)
            )
        )

    def _matches_offset(self, letter: DeadLetter) -> bool:
        partition, offset = letter.dead_letter_id
        return (not self.partitions or partition in self.partitions) and (
            not self.offsets or any(first <= offset <= last for first, last in self.offsets)
        )

    def _matches_time(self, letter: DeadLetter) -> bool:
        since_ms = letter.timestamp_ms if self.since_ms is None else self.since_ms
        return since_ms <= letter.timestamp_ms and (
            self.until_ms is None or letter.timestamp_ms < self.until_ms
        )

    def _matches_record(self, letter: DeadLetter) -> bool:
        return (
            (not self.keys or letter.record.key in self.keys)
            and all(each in letter.record.headers for each in self.headers)
            and (not self.groups or _matches_any(self.groups, letter.group))
            and (not self.handlers or _matches_any(self.handlers, letter.handler))
        )


def matches_error(pattern: str, error_class: str) -> bool:
    """Whether the pattern matches the error class, with or without its module."""
    return _matches(pattern, error_class) or _matches(pattern, error_class.rpartition(".")[2])


def _matches_any(patterns: tuple[str, ...], name: str | None) -> bool:
    return name is not None and any(_matches(each, name) for each in patterns)


def _matches(pattern: str, name: str) -> bool:
    """Compares first, because a name with brackets may not match itself as a pattern."""
    return name == pattern or fnmatchcase(name, pattern)
