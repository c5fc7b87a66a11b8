"""A letter corrected: the new one is published as a letter, and the old one is done with, in one transaction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock.client.cluster import Cluster
from penstock.client.deadletters.letter import Letter, Spot
from penstock.client.deadletters.marks import Mark, State
from penstock.client.deadletters.reading import Marks, letter_at, read_marks, spans
from penstock.client.deadletters.routing import Outgoing
from penstock.client.deadletters.topics import DeadLetterError, ensure_list
from penstock.client.deadletters.turns import Turn, taken
from penstock.client.deadletters.writing import Desk, Entry
from penstock.client.letters import Header
from penstock.client.metadata import TopicInfo
from penstock.protocol.letters import EDITED_FROM, PREFIXES, WITHOUT_RECORD
from penstock.protocol.records import Record


class _Unchanged:
    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged()


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    key: bytes | _Unchanged | None = UNCHANGED
    value: bytes | _Unchanged | None = UNCHANGED
    #: In place of all that have the same name.
    headers: tuple[Header, ...] = ()

    @property
    def is_none(self) -> bool:
        return self == Change()


def edited(letter: Letter, change: Change, now_ms: int) -> Record:
    """The corrected letter, which tells the same of its origin. Raises DeadLetterError."""
    for name, _ in change.headers:
        if name.startswith(PREFIXES):
            raise DeadLetterError(f"header {name} tells where a letter is from, and is not to be changed")
    old = letter.record
    made = Record(
        0,
        now_ms,
        key=old.key if isinstance(change.key, _Unchanged) else change.key,
        value=old.value if isinstance(change.value, _Unchanged) else change.value,
        headers=tuple(_headers(letter, change)),
    )
    if (made.key, made.value) == (old.key, old.value) and not change.headers:
        raise DeadLetterError(f"{letter.topic} {letter.spot} is like that already")
    return made


def _headers(letter: Letter, change: Change) -> Iterable[Header]:
    new = {name for name, _ in change.headers} | {EDITED_FROM}
    if not isinstance(change.value, _Unchanged):
        new.add(WITHOUT_RECORD)  # it has one now
    yield from (each for each in letter.record.headers if each[0] not in new)
    yield from change.headers
    yield EDITED_FROM, str(letter.spot).encode()


def find_waiting(cluster: Cluster, topic: TopicInfo, spot: Spot) -> Letter:
    """Raises DeadLetterError where there is none, or it is done with; Unavailable, Refused."""
    letter = letter_at(cluster, topic, spot)
    if letter is None:
        raise DeadLetterError(f"{topic.name} has no letter at {spot}")
    _refuse_done(topic, spot, read_marks(cluster, topic, spans(cluster, topic), is_settled=False))
    return letter


def _refuse_done(topic: TopicInfo, spot: Spot, done: Marks) -> None:
    mark = done.get(spot)
    if mark is not None:
        to = f" to {mark.to}" if mark.state is State.REPLAYED and mark.to else ""
        raise DeadLetterError(f"{topic.name} {spot} was {mark.state.value}{to} already, and cannot be edited")


def edit(
    cluster: Cluster, topic: TopicInfo, letter: Letter, change: Change, turn: Turn, *, id: str, now_ms: int
) -> Spot | None:
    """Where the corrected one is; None where the broker does not tell. Raises DeadLetterError, Overtaken, Refused."""
    record = edited(letter, change, now_ms)
    list_topic = ensure_list(cluster, topic)
    with taken(cluster, turn, topic.name) as producer:
        done = read_marks(cluster, topic, spans(cluster, topic), is_settled=True)
        _refuse_done(topic, letter.spot, done)
        mark = Mark(State.EDITED, at_ms=now_ms, replay=id, to=topic.name)
        entry = Entry(letter, mark, Outgoing(topic.name, letter.partition, record))
        (sent,) = Desk(producer, topic, list_topic).write_all([entry])
    return None if sent.offset is None else Spot(letter.partition, sent.offset)
