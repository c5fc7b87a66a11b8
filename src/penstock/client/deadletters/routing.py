"""Where a letter goes when it is replayed, and what it is there. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, NamedTuple

from penstock.client.deadletters.letter import Letter
from penstock.client.deadletters.placing import partition_of
from penstock.client.letters import Header, Origin, headers_for, retry_topic
from penstock.protocol.letters import HANDLER
from penstock.protocol.records import Record

#: The level that a group reads first.
_FIRST_LEVEL: Final = 1
_REASON: Final = "replayed"


class Aim(Enum):
    #: The topic that it is from, for everybody who reads that.
    ORIGINAL = "original"
    #: The retries of the group that gave it up, and nobody else.
    GROUP = "group"
    #: One topic for all.
    TOPIC = "topic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    aim: Aim = Aim.ORIGINAL
    topic: str | None = None
    #: Records get the time that they had once. In retry topics the time says when they are due, so it is now.
    keeps_times: bool = False

    def __str__(self) -> str:
        return self.topic if self.topic is not None else self.aim.value


class Left(Enum):
    """Why a letter cannot be replayed, as the end of a sentence about several."""

    BARE = "have no record in them"
    STRAY = "do not tell where they are from"
    UNCLAIMED = "do not tell which group gave them up"


class Route(NamedTuple):
    topic: str
    #: To whom it goes, where not to everybody.
    group: str | None = None


class Outgoing(NamedTuple):
    topic: str
    partition: int
    record: Record


def route_of(letter: Letter, destination: Destination) -> Route | Left:
    if not letter.has_record:
        return Left.BARE
    if destination.topic is not None:
        return Route(destination.topic)
    origin = letter.origin
    if origin is None:
        return Left.STRAY
    if destination.aim is Aim.ORIGINAL:
        return Route(origin.topic)
    if letter.group is None:
        return Left.UNCLAIMED
    return Route(retry_topic(origin.topic, _FIRST_LEVEL), letter.group)


def outgoing(
    letter: Letter, route: Route, destination: Destination, *, partitions: int, now_ms: int
) -> Outgoing:
    """The record as it was once; in a retry topic, with what tells the group where it is from."""
    record, origin = letter.record, letter.origin
    if route.group is not None:
        assert origin is not None, f"{letter.spot} has no origin"
        headers = _headers_of_retry(letter, origin, route.group)
        made = Record(0, now_ms, record.key, record.value, tuple(headers))
        return Outgoing(route.topic, origin.partition % partitions, made)
    timestamp_ms = now_ms
    if destination.keeps_times:
        timestamp_ms = record.timestamp if origin is None else origin.timestamp_ms
    made = Record(0, timestamp_ms, record.key, record.value, tuple(letter.own_headers))
    is_home = destination.topic is None
    return Outgoing(route.topic, _partition(letter, origin if is_home else None, partitions), made)


def _headers_of_retry(letter: Letter, origin: Origin, group: str) -> list[Header]:
    """Its attempts count anew, and why it failed stays with it until it fails again."""
    failure = replace(letter.failure, reason=_REASON)
    headers = headers_for(letter.record.headers, origin, failure, group=group, attempts=0)
    if letter.handler is not None:
        headers.append((HANDLER, letter.handler.encode()))
    return headers


def _partition(letter: Letter, origin: Origin | None, count: int) -> int:
    """The one that it was in, if that is there; else that of its key, and without one the same for its neighbours."""
    if origin is not None and origin.partition < count:
        return origin.partition
    key = letter.record.key
    return letter.partition % count if key is None else partition_of(key, count)
