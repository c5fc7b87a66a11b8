"""Purges dead letters: resolves the unwanted ones, then deletes resolved ones from the log.

Records can only be deleted from the start of a log. So a purge first adds the selected dead letters to
`<topic>.replayed`, and then deletes the records of each partition before its first unresolved dead letter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from penstock.client.deadletters import reader
from penstock.client.deadletters.dead_letter import DeadLetterFilter, Resolution, ResolutionState
from penstock.client.deadletters.topics import ensure_replayed_topic
from penstock.client.deadletters.writer import (
    ENTRIES_MAX,
    DeadLetterWriter,
    ReplayLock,
    ResolutionEntry,
    locked_producer,
    transaction_chunks,
)
from penstock.client.errors import raise_for_error
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.client.wire.metadata import TopicInfo
from penstock.protocol.schemas import schema_class


@dataclass(slots=True, kw_only=True)
class PurgePlan:
    """What a purge would do now: which dead letters it resolves, and up to which offsets it deletes."""

    spans: list[reader.OffsetRange]
    #: How many dead letters it resolves.
    chosen: int = 0
    #: Unresolved ones that the filter does not select.
    kept: int = 0
    #: The first remaining offset of each partition; the end if no dead letter remains.
    cuts: dict[int, int] = field(default_factory=dict)
    #: Dead letters before the cuts.
    deletable: int = 0

    @property
    def is_nothing(self) -> bool:
        return not self.chosen and not self.deletable


@dataclass(slots=True, kw_only=True)
class PurgeOutcome:
    given_up: int = 0
    deleted: int = 0
    #: The new log start offsets.
    beginnings: dict[int, int] = field(default_factory=dict)


def plan_purge(cluster: Cluster, topic: TopicInfo, wanted: DeadLetterFilter | None) -> PurgePlan:
    """Without a filter, resolves no dead letter. Raises Unavailable, Refused, CorruptRecords."""
    there = _in_partitions(reader.offset_ranges(cluster, topic), wanted)
    found = PurgePlan(spans=there)
    done = reader.read_resolutions(cluster, topic, there, is_settled=False)
    for _ in _purge_entries(
        cluster, topic, wanted, done, found, resolution=Resolution(ResolutionState.PURGED)
    ):
        pass
    return found


def _in_partitions(
    there: list[reader.OffsetRange], wanted: DeadLetterFilter | None
) -> list[reader.OffsetRange]:
    if wanted is None or not wanted.partitions:
        return there
    return [span for span in there if span.partition in wanted.partitions]


def _purge_entries(
    cluster: Cluster,
    topic: TopicInfo,
    wanted: DeadLetterFilter | None,
    done: reader.Resolutions,
    into: PurgePlan,
    *,
    resolution: Resolution,
) -> Iterator[ResolutionEntry]:
    """Yields the dead letters to resolve, and counts the results in `into`."""
    ends = {span.partition: span.end for span in into.spans}
    into.cuts = dict(ends)
    for letter in reader.read_dead_letters(cluster, topic, into.spans):
        is_chosen = letter.dead_letter_id not in done and wanted is not None and wanted.matches(letter)
        if is_chosen:
            into.chosen += 1
            yield ResolutionEntry(letter, resolution)
        is_kept = not is_chosen and letter.dead_letter_id not in done
        into.kept += is_kept
        if is_kept and into.cuts[letter.partition] == ends[letter.partition]:
            into.cuts[letter.partition] = letter.dead_letter_id.offset
        into.deletable += into.cuts[letter.partition] == ends[letter.partition]


def purge(
    cluster: Cluster,
    topic: TopicInfo,
    wanted: DeadLetterFilter | None,
    lock: ReplayLock,
    *,
    id: str,
    now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
) -> PurgeOutcome:
    """Raises ReplayFenced, Unavailable, Refused."""
    found = PurgePlan(spans=_in_partitions(reader.offset_ranges(cluster, topic), wanted))
    list_topic = ensure_replayed_topic(cluster, topic)
    with locked_producer(cluster, lock, topic.name) as producer:
        done = reader.read_resolutions(cluster, topic, found.spans, is_settled=True)
        writer = DeadLetterWriter(producer, topic, list_topic)
        resolution = Resolution(ResolutionState.PURGED, at_ms=now_ms(), replay=id)
        for chunk in transaction_chunks(
            _purge_entries(cluster, topic, wanted, done, found, resolution=resolution), ENTRIES_MAX
        ):
            writer.write_all(chunk)
    return PurgeOutcome(
        given_up=found.chosen,
        deleted=found.deletable,
        beginnings=delete_before(cluster, topic, found.spans, found.cuts),
    )


def purge_all(cluster: Cluster, topic: TopicInfo) -> PurgeOutcome:
    """Deletes all dead letters, resolved or not. Raises Unavailable, Refused."""
    there = reader.offset_ranges(cluster, topic)
    ends = {span.partition: span.end for span in there}
    count = sum(1 for _ in reader.read_dead_letters(cluster, topic, there))
    return PurgeOutcome(given_up=0, deleted=count, beginnings=delete_before(cluster, topic, there, ends))


def delete_before(
    cluster: Cluster, topic: TopicInfo, there: list[reader.OffsetRange], cuts: dict[int, int]
) -> dict[int, int]:
    """Deletes records, and returns the new log start offsets that have changed. Raises Unavailable, Refused."""
    beginnings = {}
    for span in there:
        cut = cuts[span.partition]
        if cut > span.start:
            beginnings[span.partition] = _delete_records(cluster, topic, span.partition, cut)
    return beginnings


def _delete_records(cluster: Cluster, topic: TopicInfo, partition: int, before: int) -> int:
    request = _delete_records_request(cluster, topic.name, partition, before)

    def delete(connection: Connection) -> int:
        (reply,) = connection.call(request).topics
        (each,) = reply.partitions
        raise_for_error(each.error_code, f"deleting from {topic.name}[{partition}]")
        return int(each.low_watermark)

    return cluster.call_leader(topic.name, partition, delete, topic_id=topic.id)


def _delete_records_request(cluster: Cluster, topic: str, partition: int, before: int) -> Any:
    module = "delete_records.v2.request"
    wanted = schema_class(f"{module}:DeleteRecordsPartition")(partition_index=partition, offset=before)
    return schema_class(f"{module}:DeleteRecordsRequest")(
        topics=(schema_class(f"{module}:DeleteRecordsTopic")(name=topic, partitions=(wanted,)),),
        timeout=timedelta(milliseconds=cluster.settings.request_timeout_ms),
    )
