"""Edits a dead letter: one transaction publishes the corrected dead letter and resolves the old one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from penstock.client.deadletters.dead_letter import DeadLetter, DeadLetterId, Resolution, ResolutionState
from penstock.client.deadletters.headers import Header
from penstock.client.deadletters.reader import Resolutions, offset_ranges, read_dead_letter, read_resolutions
from penstock.client.deadletters.topics import DeadLetterError, ensure_replayed_topic
from penstock.client.deadletters.writer import (
    DeadLetterWriter,
    OutgoingRecord,
    ReplayLock,
    ResolutionEntry,
    locked_producer,
)
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicInfo
from penstock.protocol.dead_letter_headers import EDITED_FROM_HEADER, HEADER_PREFIXES, WITHOUT_RECORD_HEADER
from penstock.protocol.record_batch import Record


class _Unchanged:
    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = _Unchanged()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterEdit:
    key: bytes | _Unchanged | None = UNCHANGED
    value: bytes | _Unchanged | None = UNCHANGED
    #: They replace all headers of the same names.
    headers: tuple[Header, ...] = ()

    @property
    def is_none(self) -> bool:
        return self == DeadLetterEdit()


def apply_edit(letter: DeadLetter, change: DeadLetterEdit, now_ms: int) -> Record:
    """Returns the corrected record, with the same origin. Raises DeadLetterError."""
    for name, _ in change.headers:
        if name.startswith(HEADER_PREFIXES):
            raise DeadLetterError(f"header {name} is a failure header and cannot be changed")
    old = letter.record
    made = Record(
        0,
        now_ms,
        key=old.key if isinstance(change.key, _Unchanged) else change.key,
        value=old.value if isinstance(change.value, _Unchanged) else change.value,
        headers=tuple(_edited_headers(letter, change)),
    )
    if (made.key, made.value) == (old.key, old.value) and not change.headers:
        raise DeadLetterError(f"{letter.topic} {letter.dead_letter_id} has these values already")
    return made


def _edited_headers(letter: DeadLetter, change: DeadLetterEdit) -> Iterable[Header]:
    new = {name for name, _ in change.headers} | {EDITED_FROM_HEADER}
    if not isinstance(change.value, _Unchanged):
        new.add(WITHOUT_RECORD_HEADER)  # it has a value now
    yield from (each for each in letter.record.headers if each[0] not in new)
    yield from change.headers
    yield EDITED_FROM_HEADER, str(letter.dead_letter_id).encode()


def find_unresolved(cluster: Cluster, topic: TopicInfo, dead_letter_id: DeadLetterId) -> DeadLetter:
    """Raises DeadLetterError if there is no such dead letter, or it is resolved; Unavailable, Refused."""
    letter = read_dead_letter(cluster, topic, dead_letter_id)
    if letter is None:
        raise DeadLetterError(f"{topic.name} has no dead letter at {dead_letter_id}")
    _reject_resolved(
        topic,
        dead_letter_id,
        read_resolutions(cluster, topic, offset_ranges(cluster, topic), is_settled=False),
    )
    return letter


def _reject_resolved(topic: TopicInfo, dead_letter_id: DeadLetterId, done: Resolutions) -> None:
    resolution = done.get(dead_letter_id)
    if resolution is not None:
        to = f" to {resolution.to}" if resolution.state is ResolutionState.REPLAYED and resolution.to else ""
        raise DeadLetterError(
            f"{topic.name} {dead_letter_id} was {resolution.state.value}{to} already, and cannot be edited"
        )


def edit(
    cluster: Cluster,
    topic: TopicInfo,
    letter: DeadLetter,
    change: DeadLetterEdit,
    lock: ReplayLock,
    *,
    id: str,
    now_ms: int,
) -> DeadLetterId | None:
    """Publishes the corrected dead letter and returns its id; None if the broker does not report its offset.

    Raises DeadLetterError, ReplayFenced, Refused.
    """
    record = apply_edit(letter, change, now_ms)
    list_topic = ensure_replayed_topic(cluster, topic)
    with locked_producer(cluster, lock, topic.name) as producer:
        done = read_resolutions(cluster, topic, offset_ranges(cluster, topic), is_settled=True)
        _reject_resolved(topic, letter.dead_letter_id, done)
        resolution = Resolution(ResolutionState.EDITED, at_ms=now_ms, replay=id, to=topic.name)
        entry = ResolutionEntry(letter, resolution, OutgoingRecord(topic.name, letter.partition, record))
        (sent,) = DeadLetterWriter(producer, topic, list_topic).write_all([entry])
    return None if sent.offset is None else DeadLetterId(letter.partition, sent.offset)
