"""Finds the partitions that a query reads, where they begin and end, and which records are lost.

A topic that was deleted and created again is not the topic with which the query began. If records are gone before the
query has read them, the query fails; with failOnDataLoss=false it logs how many were lost and continues.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final
from uuid import UUID

from penstock.client.errors import UNKNOWN_TOPIC_ERRORS, ClientError, OutOfRange, Refused
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import IsolationLevel, TopicInfo, TopicPartition
from penstock.client.wire.offsets import EARLIEST, LATEST, list_offsets
from penstock.spark.internal_topics import INTERNAL_TOPICS
from penstock.spark.offsets import OffsetRange, Position, start_offset
from penstock.spark.option_reader import OptionError
from penstock.spark.source.options import AtEdge, AtOffsets, AtTime, OffsetBound, SourceOptions

_LOG: Final = logging.getLogger("penstock.spark")
_RANGES_NAMED_MAX: Final = 10


class DataLoss(ClientError):
    """Records are gone before the query has read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRange:
    """The lost offsets of a partition: start <= offset < end. `end` is None if it is unknown."""

    topic: str
    partition: int
    start: int
    end: int | None
    why: str

    def __str__(self) -> str:
        if self.end is None:
            return f"{self.topic}[{self.partition}] from offset {self.start} on ({self.why})"
        return f"{self.topic}[{self.partition}] offsets {self.start} to {self.end - 1} ({self.why})"


def lost_outside_log(error: OutOfRange, end: int) -> LostRange:
    """Return what a task that reads up to `end` has lost."""
    is_before = error.asked < error.log_start
    return LostRange(
        topic=error.topic,
        partition=error.partition,
        start=error.asked,
        end=min(error.log_start, end) if is_before else end,
        why=f"the log goes from {error.log_start} to {error.log_end}",
    )


def report_lost_ranges(lost: Sequence[LostRange], *, fails: bool) -> None:
    """Raise DataLoss if the query is to fail, and log the lost ranges otherwise."""
    if not lost:
        return
    named = "; ".join(str(each) for each in lost[:_RANGES_NAMED_MAX])
    more = f"; and {len(lost) - _RANGES_NAMED_MAX} more" if len(lost) > _RANGES_NAMED_MAX else ""
    if fails:
        raise DataLoss(
            f"records were deleted before they were read: {named}{more}. "
            "Set failOnDataLoss=false to continue without them"
        )
    count = sum(each.end - each.start for each in lost if each.end is not None)
    _LOG.warning("skipped %d offsets of deleted records: %s%s", count, named, more)


#: A query that polls for new data reads the topic metadata again after this time.
_TOPICS_AGE_MS_MAX: Final = 1_000

TopicsByName = Mapping[str, TopicInfo]


class Discovery:
    """The topics, partitions and offsets of one query, on its driver."""

    def __init__(self, cluster: Cluster, options: SourceOptions) -> None:
        self._cluster = cluster
        self._options = options
        self._topics: TopicsByName = {}
        self._topics_age = Deadline(0)

    def _stale_metadata_deadline(self) -> Deadline:
        """Return until when to ask again for a missing topic: a broker may have old metadata."""
        return Deadline(self._cluster.settings.unknown_topic_ms_max)

    # Topics

    def topics(self) -> TopicsByName:
        """Return the current topics. Raises OptionError if a topic or partition that the user named is missing."""
        missing: list[str] = []
        for _ in self._cluster.attempts(self._stale_metadata_deadline()):
            found = self._look()
            missing = _missing_names(self._options, found)
            if not missing:
                return found
        raise OptionError(f"topics or partitions do not exist: {', '.join(missing)}")

    def _look(self) -> TopicsByName:
        wanted = self._options.subscription
        if wanted.pattern is not None:
            found = self._cluster.topics(re.compile(wanted.pattern))
            self._topics = {name: topic for name, topic in found.items() if name not in INTERNAL_TOPICS}
        else:
            self._topics = self._cluster.topics(wanted.names or {topic for topic, _ in wanted.assigned})
        self._topics_age = Deadline(_TOPICS_AGE_MS_MAX)
        return self._topics

    def _partitions(self, topics: TopicsByName) -> list[TopicPartition]:
        assigned = self._options.subscription.assigned
        return sorted(
            (name, part.index)
            for name, topic in topics.items()
            for part in topic.partitions
            if not assigned or (name, part.index) in assigned
        )

    # Start and end of a query

    def position(self, bound: OffsetBound, topics: TopicsByName) -> Position:
        """Return the offsets that the bound stands for. Raises OptionError, DataLoss."""
        partitions = self._partitions(topics)
        match bound:
            case AtEdge(edge):
                offsets = self._offsets(dict.fromkeys(partitions, edge))
            case AtOffsets(asked):
                offsets = self._at_offsets(asked, partitions)
            case AtTime():
                offsets = self._at_time(bound, partitions)
        return Position.of(offsets, _topic_ids(topics))

    def _at_offsets(
        self, asked: Mapping[TopicPartition, int], partitions: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int]:
        _refuse_other_partitions(asked, partitions)
        first, last = (self._offsets(dict.fromkeys(partitions, edge)) for edge in (EARLIEST, LATEST))
        lost = []
        found: dict[TopicPartition, int] = {}
        for tp in partitions:
            offset = {EARLIEST: first[tp], LATEST: last[tp]}.get(asked[tp], asked[tp])
            if offset > last[tp]:
                raise OptionError(
                    f"{_partition_name(tp)}: offset {offset} does not exist yet, the log ends at {last[tp]}"
                )
            if offset < first[tp]:
                lost.append(_lost_before_log_start(tp, offset, first[tp], first[tp]))
            found[tp] = max(offset, first[tp])
        report_lost_ranges(lost, fails=self._options.fail_on_data_loss)
        return found

    def _at_time(self, bound: AtTime, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        if isinstance(bound.timestamps_ms, int):
            wanted = dict.fromkeys(partitions, bound.timestamps_ms)
        else:
            _refuse_other_partitions(bound.timestamps_ms, partitions)
            wanted = dict(bound.timestamps_ms)
        found = self.first_at(wanted)
        late = [tp for tp in partitions if found[tp] is None]
        if late and not bound.or_latest:
            raise OptionError(
                f"option {bound.option}: no record at or after that time in {', '.join(map(_partition_name, late))} "
                "(with startingOffsetsByTimestampStrategy=latest the query starts at the end there)"
            )
        ends = self._offsets(dict.fromkeys(late, LATEST))
        return {tp: ends[tp] if offset is None else offset for tp, offset in found.items()}

    def first_at(self, timestamps_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """Return the first offset at or after a timestamp, or None if there is none."""
        found = list_offsets(self._cluster, timestamps_ms, isolation=self._options.isolation)
        return {tp: None if at is None else at.offset for tp, at in found.items()}

    def due(self, start: Position, available: Position, now_ms: int) -> Position:
        """Limit topics that are read when due to the records before the first one that is not due yet."""
        waiting = set(self._options.due_topics)
        partitions = {tp: now_ms + 1 for tp in available.offsets if tp[0] in waiting}
        if not partitions:
            return available
        ids, ends = available.ids, available.offsets
        for tp, at in self.first_at(partitions).items():
            if at is not None:
                # Clocks may be set back, so never go back behind what was read.
                least = start_offset(start, tp[0], ids[tp[0]], tp[1])
                ends[tp] = min(max(at, least), ends[tp])
        return Position.of(ends, ids)

    def beginnings(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._offsets(dict.fromkeys(partitions, EARLIEST))

    def _offsets(self, edges: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return the first or last offsets of logs. They always exist."""
        found = list_offsets(self._cluster, edges, isolation=self._options.isolation)
        return {tp: at.offset for tp, at in found.items() if at is not None}

    def _ends(self, edges: Mapping[TopicPartition, int], start: Position) -> dict[TopicPartition, int]:
        """Return how far partitions can be read. This is never less than `start`, unless records are gone.

        The checkpoint of a query that read uncommitted records may be beyond the last stable offset.
        """
        ends = self._offsets(edges)
        beyond = {tp: LATEST for tp, at in start.offsets.items() if ends.get(tp, at) < at}
        if beyond and self._options.isolation is IsolationLevel.READ_COMMITTED:
            written = list_offsets(self._cluster, beyond)
            for tp in beyond:
                at, found = start.offsets[tp], written[tp]
                ends[tp] = at if found is not None and found.offset >= at else ends[tp]
        return ends

    # While a query runs

    def latest(self, start: Position) -> Position:
        """Return the end of the data for a query at position `start`. Raises DataLoss."""
        try:
            return self._latest(start, self._confirmed(start))
        except Refused as refused:
            if refused.code not in UNKNOWN_TOPIC_ERRORS:
                raise
            # A topic was deleted after its metadata was read. Read the metadata again to report it.
            self._topics_age = Deadline(0)
            return self._latest(start, self._confirmed(start))

    def _confirmed(self, start: Position) -> TopicsByName:
        """Return the topics. If one seems to be deleted, ask again in case a broker has old metadata."""
        topics = self._look() if self._topics_age.is_over else self._topics
        lost = _deleted_topics(start, topics)
        if lost:
            for _ in self._cluster.attempts(self._stale_metadata_deadline()):
                topics = self._look()
                lost = _deleted_topics(start, topics)
                if not lost:
                    break
        report_lost_ranges(lost, fails=self._options.fail_on_data_loss)
        return topics

    def _latest(self, start: Position, topics: TopicsByName) -> Position:
        edges = dict.fromkeys(self._partitions(topics), LATEST)
        offsets = self._ends(edges, start)
        lost = _truncated_logs(start, offsets, topics)
        if lost:
            for _ in self._cluster.attempts(self._stale_metadata_deadline()):
                for name in topics:
                    self._cluster.forget_topic(name)
                offsets = self._ends(edges, start)
                lost = _truncated_logs(start, offsets, topics)
                if not lost:
                    break
        report_lost_ranges(lost, fails=self._options.fail_on_data_loss)
        return Position.of(offsets, _topic_ids(topics))

    def readable(self, ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
        """Return the parts of the ranges that still exist. Raises DataLoss if the query is to fail on a loss."""
        wanted = list(ranges)
        there, lost = self._still_there(wanted)
        first = self.beginnings({each.topic_partition for each in there})
        for each in there:
            if each.start < first[each.topic_partition]:
                lost.append(
                    _lost_before_log_start(
                        each.topic_partition,
                        each.start,
                        min(first[each.topic_partition], each.end),
                        first[each.topic_partition],
                    )
                )
        report_lost_ranges(lost, fails=self._options.fail_on_data_loss)
        kept = [each._replace(start=max(each.start, first[each.topic_partition])) for each in there]
        return [each for each in kept if each.size]

    def _still_there(self, ranges: list[OffsetRange]) -> tuple[list[OffsetRange], list[LostRange]]:
        ids = {each.topic: each.topic_id for each in ranges}
        start = Position.of({each.topic_partition: each.start for each in ranges}, ids)
        gone: dict[TopicPartition, LostRange] = {}
        for _ in self._cluster.attempts(self._stale_metadata_deadline()):
            gone = {
                (each.topic, each.partition): each
                for each in _deleted_topics(start, self._cluster.topics(ids))
            }
            if not gone:
                break
        lost = [
            replace(gone[each.topic_partition], start=each.start, end=each.end)
            for each in ranges
            if each.topic_partition in gone
        ]
        return [each for each in ranges if each.topic_partition not in gone], lost


# Losses


def _deleted_topics(start: Position, topics: TopicsByName) -> list[LostRange]:
    """Return the partitions of topics that were deleted, or deleted and created again, after the query read them."""
    lost = []
    for name, known in start.topics.items():
        found = topics.get(name)
        if found is None:
            why = "the topic was deleted"
        elif not known.is_same_topic(found.id):
            why = f"the topic was deleted and created again: its id is {found.id}, not {known.id}"
        else:
            continue
        lost += [_lost_range((name, part), at, None, why) for part, at in sorted(known.offsets.items())]
    return lost


def _truncated_logs(
    start: Position, ends: Mapping[TopicPartition, int], topics: TopicsByName
) -> list[LostRange]:
    """Return the partitions whose log ends before the position of the query."""
    return [
        _lost_range(tp, end, at, f"the log ended at {at} or later, and now ends at {end}")
        for tp, at in sorted(start.offsets.items())
        if (end := ends.get(tp, at)) < at and start.topics[tp[0]].is_same_topic(topics[tp[0]].id)
    ]


def _lost_before_log_start(tp: TopicPartition, start: int, end: int, log_start: int) -> LostRange:
    return _lost_range(tp, start, end, f"the log begins at {log_start}")


def _lost_range(tp: TopicPartition, start: int, end: int | None, why: str) -> LostRange:
    return LostRange(topic=tp[0], partition=tp[1], start=start, end=end, why=why)


def _missing_names(options: SourceOptions, found: TopicsByName) -> list[str]:
    wanted = options.subscription
    names = [name for name in wanted.names if name not in found]
    return names + [
        _partition_name(tp)
        for tp in wanted.assigned
        if tp[0] not in found or found[tp[0]].partition(tp[1]) is None
    ]


def _refuse_other_partitions(
    asked: Mapping[TopicPartition, int], partitions: Sequence[TopicPartition]
) -> None:
    """Raise OptionError unless exactly the partitions that are read have an offset."""
    missing, unknown = sorted(set(partitions) - asked.keys()), sorted(asked.keys() - set(partitions))
    if missing:
        raise OptionError(
            f"every partition needs an offset or time; missing: {', '.join(map(_partition_name, missing))} "
            "(-2 is the earliest offset, -1 the latest)"
        )
    if unknown:
        raise OptionError(
            f"offsets are given for partitions that are not read: {', '.join(map(_partition_name, unknown))}"
        )


def _partition_name(tp: TopicPartition) -> str:
    return f"{tp[0]}[{tp[1]}]"


def _topic_ids(topics: TopicsByName) -> dict[str, UUID | None]:
    return {name: topic.id for name, topic in topics.items()}
