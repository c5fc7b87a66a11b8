"""Letters given up, and what is done with deleted.

A log can be cut off at its beginning only. So letters that nobody wants are put on the list first, and then every
partition is deleted up to its first letter that still waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from penstock.client.cluster import Cluster
from penstock.client.connection import Connection
from penstock.client.deadletters.filters import Filter
from penstock.client.deadletters.marks import Mark, State
from penstock.client.deadletters.reading import Marks, Span, letters, read_marks, spans
from penstock.client.deadletters.topics import ensure_list
from penstock.client.deadletters.turns import Turn, taken
from penstock.client.deadletters.writing import ENTRIES_MAX, Desk, Entry, chunks
from penstock.client.errors import check
from penstock.client.metadata import TopicInfo
from penstock.protocol.schemas import schema_class


@dataclass(slots=True, kw_only=True)
class Plan:
    """What a purge would do now: which letters it gives up, and up to where it deletes."""

    spans: list[Span]
    #: To be given up.
    chosen: int = 0
    #: Waiting, and not asked for.
    kept: int = 0
    #: First letter of each partition that stays; the end where none does.
    cuts: dict[int, int] = field(default_factory=dict)
    #: Letters before the cuts.
    deletable: int = 0

    @property
    def is_nothing(self) -> bool:
        return not self.chosen and not self.deletable


@dataclass(slots=True, kw_only=True)
class Purged:
    given_up: int = 0
    deleted: int = 0
    #: The new beginnings of partitions that were cut.
    beginnings: dict[int, int] = field(default_factory=dict)


def plan(cluster: Cluster, topic: TopicInfo, wanted: Filter | None) -> Plan:
    """Without a filter nothing is given up. Raises Unavailable, Refused, CorruptRecords."""
    there = _narrowed(spans(cluster, topic), wanted)
    found = Plan(spans=there)
    done = read_marks(cluster, topic, there, is_settled=False)
    for _ in _entries(cluster, topic, wanted, done, found, mark=Mark(State.PURGED)):
        pass
    return found


def _narrowed(there: list[Span], wanted: Filter | None) -> list[Span]:
    if wanted is None or not wanted.partitions:
        return there
    return [span for span in there if span.partition in wanted.partitions]


def _entries(
    cluster: Cluster, topic: TopicInfo, wanted: Filter | None, done: Marks, into: Plan, *, mark: Mark
) -> Iterator[Entry]:
    """Letters to give up, while `into` learns what that leads to."""
    ends = {span.partition: span.end for span in into.spans}
    into.cuts = dict(ends)
    for letter in letters(cluster, topic, into.spans):
        is_chosen = letter.spot not in done and wanted is not None and wanted.matches(letter)
        if is_chosen:
            into.chosen += 1
            yield Entry(letter, mark)
        is_kept = not is_chosen and letter.spot not in done
        into.kept += is_kept
        if is_kept and into.cuts[letter.partition] == ends[letter.partition]:
            into.cuts[letter.partition] = letter.spot.offset
        into.deletable += into.cuts[letter.partition] == ends[letter.partition]


def purge(
    cluster: Cluster,
    topic: TopicInfo,
    wanted: Filter | None,
    turn: Turn,
    *,
    id: str,
    now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
) -> Purged:
    """Raises Overtaken, Unavailable, Refused."""
    found = Plan(spans=_narrowed(spans(cluster, topic), wanted))
    list_topic = ensure_list(cluster, topic)
    with taken(cluster, turn, topic.name) as producer:
        done = read_marks(cluster, topic, found.spans, is_settled=True)
        desk = Desk(producer, topic, list_topic)
        mark = Mark(State.PURGED, at_ms=now_ms(), replay=id)
        for chunk in chunks(_entries(cluster, topic, wanted, done, found, mark=mark), ENTRIES_MAX):
            desk.write_all(chunk)
    return Purged(
        given_up=found.chosen,
        deleted=found.deletable,
        beginnings=delete_before(cluster, topic, found.spans, found.cuts),
    )


def purge_all(cluster: Cluster, topic: TopicInfo) -> Purged:
    """Everything that is there now, whether it was replayed or not. Raises Unavailable, Refused."""
    there = spans(cluster, topic)
    ends = {span.partition: span.end for span in there}
    count = sum(1 for _ in letters(cluster, topic, there))
    return Purged(given_up=0, deleted=count, beginnings=delete_before(cluster, topic, there, ends))


def delete_before(
    cluster: Cluster, topic: TopicInfo, there: list[Span], cuts: dict[int, int]
) -> dict[int, int]:
    """The new beginnings of those partitions of which there was something to delete. Raises Unavailable, Refused."""
    beginnings = {}
    for span in there:
        cut = cuts[span.partition]
        if cut > span.start:
            beginnings[span.partition] = _delete(cluster, topic, span.partition, cut)
    return beginnings


def _delete(cluster: Cluster, topic: TopicInfo, partition: int, before: int) -> int:
    request = _request(cluster, topic.name, partition, before)

    def ask(connection: Connection) -> int:
        (told,) = connection.call(request).topics
        (each,) = told.partitions
        check(each.error_code, f"deleting from {topic.name}[{partition}]")
        return int(each.low_watermark)

    return cluster.call_leader(topic.name, partition, ask, topic_id=topic.id)


def _request(cluster: Cluster, topic: str, partition: int, before: int) -> Any:
    module = "delete_records.v2.request"
    wanted = schema_class(f"{module}:DeleteRecordsPartition")(partition_index=partition, offset=before)
    return schema_class(f"{module}:DeleteRecordsRequest")(
        topics=(schema_class(f"{module}:DeleteRecordsTopic")(name=topic, partitions=(wanted,)),),
        timeout=timedelta(milliseconds=cluster.settings.request_timeout_ms),
    )
