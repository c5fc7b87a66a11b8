"""Finds the partitions that a query reads and where they begin and end, and detects data loss.

A topic that was deleted and created again is not the one that the query began with. Records that a query should have
read and that are gone are an error, or a warning with their count where failOnDataLoss is false.
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
_LOSSES_NAMED_MAX: Final = 10


class DataLoss(ClientError):
    """What the query goes on with would leave out records that it has not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRange:
    """The offsets start <= offset < end of a partition, or an end that nobody knows."""

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
    """What a task that reads up to `end` cannot have."""
    is_before = error.asked < error.log_start
    return LostRange(
        topic=error.topic,
        partition=error.partition,
        start=error.asked,
        end=min(error.log_start, end) if is_before else end,
        why=f"the log goes from {error.log_start} to {error.log_end}",
    )


def report_losses(losses: Sequence[LostRange], *, fails: bool) -> None:
    """Raises DataLoss where the query is to fail, else says what is left out."""
    if not losses:
        return
    named = "; ".join(str(each) for each in losses[:_LOSSES_NAMED_MAX])
    more = f"; and {len(losses) - _LOSSES_NAMED_MAX} more" if len(losses) > _LOSSES_NAMED_MAX else ""
    if fails:
        raise DataLoss(
            f"records are gone that were to be read: {named}{more}. "
            "Set failOnDataLoss=false to go on without them"
        )
    count = sum(each.end - each.start for each in losses if each.end is not None)
    _LOG.warning("left out %d offsets of records that are gone: %s%s", count, named, more)


#: So long is what is known of topics taken for true by a query that looks for new data all the time.
_TOPICS_AGE_MS_MAX: Final = 1_000

TopicsByName = Mapping[str, TopicInfo]


class Discovery:
    """For one query, on its driver."""

    def __init__(self, cluster: Cluster, options: SourceOptions) -> None:
        self._cluster = cluster
        self._options = options
        self._topics: TopicsByName = {}
        self._topics_age = Deadline(0)

    def _patience(self) -> Deadline:
        """A broker that has not heard of the latest yet may say that something is gone; so long we ask others."""
        return Deadline(self._cluster.settings.unknown_topic_ms_max)

    # Topics

    def topics(self) -> TopicsByName:
        """As they are now. Raises OptionError where what is asked for by name does not exist."""
        missing: list[str] = []
        for _ in self._cluster.attempts(self._patience()):
            found = self._look()
            missing = _missing_names(self._options, found)
            if not missing:
                return found
        raise OptionError(f"{', '.join(missing)}: there is no such topic or partition")

    def _look(self) -> TopicsByName:
        wanted = self._options.subscription
        if wanted.pattern is not None:
            found = self._cluster.topics(re.compile(wanted.pattern))
            self._topics = {name: topic for name, topic in found.items() if name not in INTERNAL_TOPICS}
        else:
            self._topics = self._cluster.topics(wanted.names or {topic for topic, _ in wanted.assigned})
        self._topics_age = Deadline(_TOPICS_AGE_MS_MAX)
        return self._topics

    def _recent(self) -> TopicsByName:
        return self._look() if self._topics_age.is_over else self._topics

    def _places(self, topics: TopicsByName) -> list[TopicPartition]:
        assigned = self._options.subscription.assigned
        return sorted(
            (name, part.index)
            for name, topic in topics.items()
            for part in topic.partitions
            if not assigned or (name, part.index) in assigned
        )

    # Where to begin and to end

    def position(self, bound: OffsetBound, topics: TopicsByName) -> Position:
        """Raises OptionError, DataLoss."""
        places = self._places(topics)
        match bound:
            case AtEdge(edge):
                offsets = self._offsets(dict.fromkeys(places, edge))
            case AtOffsets(asked):
                offsets = self._at_offsets(asked, places)
            case AtTime():
                offsets = self._at_time(bound, places)
        return Position.of(offsets, _topic_ids(topics))

    def _at_offsets(
        self, asked: Mapping[TopicPartition, int], places: Sequence[TopicPartition]
    ) -> dict[TopicPartition, int]:
        _refuse_other_partitions(asked, places)
        first, last = (self._offsets(dict.fromkeys(places, edge)) for edge in (EARLIEST, LATEST))
        losses = []
        found: dict[TopicPartition, int] = {}
        for place in places:
            offset = {EARLIEST: first[place], LATEST: last[place]}.get(asked[place], asked[place])
            if offset > last[place]:
                raise OptionError(
                    f"offset {offset} of {_partition_name(place)} does not exist yet: its log ends at {last[place]}"
                )
            if offset < first[place]:
                losses.append(_lost_before_log_start(place, offset, first[place], first[place]))
            found[place] = max(offset, first[place])
        report_losses(losses, fails=self._options.fail_on_data_loss)
        return found

    def _at_time(self, bound: AtTime, places: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        if isinstance(bound.timestamps_ms, int):
            wanted = dict.fromkeys(places, bound.timestamps_ms)
        else:
            _refuse_other_partitions(bound.timestamps_ms, places)
            wanted = dict(bound.timestamps_ms)
        found = self.first_at(wanted)
        late = [place for place in places if found[place] is None]
        if late and not bound.or_latest:
            raise OptionError(
                f"option {bound.option}: {', '.join(map(_partition_name, late))} has no record at or after that time "
                "(startingOffsetsByTimestampStrategy=latest starts at the end then)"
            )
        ends = self._offsets(dict.fromkeys(late, LATEST))
        return {place: ends[place] if offset is None else offset for place, offset in found.items()}

    def first_at(self, timestamps_ms: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """The first offset at or after a time, None where there is none."""
        found = list_offsets(self._cluster, timestamps_ms, isolation=self._options.isolation)
        return {place: None if at is None else at.offset for place, at in found.items()}

    def due(self, start: Position, available: Position, now_ms: int) -> Position:
        """What is available, of topics that are read when due only up to the first record that is not yet."""
        waiting = set(self._options.due_topics)
        places = {place: now_ms + 1 for place in available.offsets if place[0] in waiting}
        if not places:
            return available
        ids, ends = available.ids, available.offsets
        for place, at in self.first_at(places).items():
            if at is not None:
                # Never behind what was read: clocks may be set back.
                least = start_offset(start, place[0], ids[place[0]], place[1])
                ends[place] = min(max(at, least), ends[place])
        return Position.of(ends, ids)

    def beginnings(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return self._offsets(dict.fromkeys(places, EARLIEST))

    def _offsets(self, edges: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Of the ends of logs, which always exist."""
        found = list_offsets(self._cluster, edges, isolation=self._options.isolation)
        return {place: at.offset for place, at in found.items() if at is not None}

    def _ends(self, edges: Mapping[TopicPartition, int], start: Position) -> dict[TopicPartition, int]:
        """How far partitions can be read, which is never behind where the query stands unless records are gone.

        A checkpoint of a query that read what was not committed may lie beyond the last stable offset.
        """
        ends = self._offsets(edges)
        beyond = {place: LATEST for place, at in start.offsets.items() if ends.get(place, at) < at}
        if beyond and self._options.isolation is IsolationLevel.READ_COMMITTED:
            written = list_offsets(self._cluster, beyond)
            for place in beyond:
                at, found = start.offsets[place], written[place]
                ends[place] = at if found is not None and found.offset >= at else ends[place]
        return ends

    # While a query runs

    def latest(self, start: Position) -> Position:
        """How far a query that stands at `start` could go. Raises DataLoss for what it should have read and is gone."""
        try:
            return self._latest(start, self._confirmed(start))
        except Refused as refused:
            if refused.code not in UNKNOWN_TOPIC_ERRORS:
                raise
            # Deleted between the two questions: the first one says so now.
            self._topics_age = Deadline(0)
            return self._latest(start, self._confirmed(start))

    def _confirmed(self, start: Position) -> TopicsByName:
        """The topics, once those that seem to be gone have had the time to show up on every broker."""
        topics, losses = self._recent(), _deleted_topics(start, self._topics)
        if losses:
            for _ in self._cluster.attempts(self._patience()):
                topics = self._look()
                losses = _deleted_topics(start, topics)
                if not losses:
                    break
        report_losses(losses, fails=self._options.fail_on_data_loss)
        return topics

    def _latest(self, start: Position, topics: TopicsByName) -> Position:
        edges = dict.fromkeys(self._places(topics), LATEST)
        offsets = self._ends(edges, start)
        losses = _truncated_logs(start, offsets, topics)
        if losses:
            for _ in self._cluster.attempts(self._patience()):
                for name in topics:
                    self._cluster.forget_topic(name)
                offsets = self._ends(edges, start)
                losses = _truncated_logs(start, offsets, topics)
                if not losses:
                    break
        report_losses(losses, fails=self._options.fail_on_data_loss)
        return Position.of(offsets, _topic_ids(topics))

    def readable(self, ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
        """These ranges less what is gone. Raises DataLoss where the query is to fail then."""
        wanted = list(ranges)
        there, losses = self._still_there(wanted)
        first = self.beginnings({each.place for each in there})
        for each in there:
            if each.start < first[each.place]:
                losses.append(
                    _lost_before_log_start(
                        each.place, each.start, min(first[each.place], each.end), first[each.place]
                    )
                )
        report_losses(losses, fails=self._options.fail_on_data_loss)
        kept = [each._replace(start=max(each.start, first[each.place])) for each in there]
        return [each for each in kept if each.size]

    def _still_there(self, ranges: list[OffsetRange]) -> tuple[list[OffsetRange], list[LostRange]]:
        ids = {each.topic: each.topic_id for each in ranges}
        start = Position.of({each.place: each.start for each in ranges}, ids)
        gone: dict[TopicPartition, LostRange] = {}
        for _ in self._cluster.attempts(self._patience()):
            gone = {
                (each.topic, each.partition): each
                for each in _deleted_topics(start, self._cluster.topics(ids))
            }
            if not gone:
                break
        losses = [
            replace(gone[each.place], start=each.start, end=each.end) for each in ranges if each.place in gone
        ]
        return [each for each in ranges if each.place not in gone], losses


# What is gone


def _deleted_topics(start: Position, topics: TopicsByName) -> list[LostRange]:
    """Partitions of topics that were deleted, or deleted and created anew, since the query stood at `start`."""
    losses = []
    for name, known in start.topics.items():
        found = topics.get(name)
        if found is None:
            why = "the topic was deleted"
        elif not known.is_same_topic(found.id):
            why = f"the topic was deleted and created anew: its id is {found.id}, not {known.id}"
        else:
            continue
        losses += [_lost_range((name, part), at, None, why) for part, at in sorted(known.offsets.items())]
    return losses


def _truncated_logs(
    start: Position, ends: Mapping[TopicPartition, int], topics: TopicsByName
) -> list[LostRange]:
    """Partitions that end before the place where the query stands."""
    return [
        _lost_range(place, end, at, f"the log ended at {at} or later and ends at {end} now")
        for place, at in sorted(start.offsets.items())
        if (end := ends.get(place, at)) < at and start.topics[place[0]].is_same_topic(topics[place[0]].id)
    ]


def _lost_before_log_start(place: TopicPartition, start: int, end: int, log_start: int) -> LostRange:
    return _lost_range(place, start, end, f"the log begins at {log_start}")


def _lost_range(place: TopicPartition, start: int, end: int | None, why: str) -> LostRange:
    return LostRange(topic=place[0], partition=place[1], start=start, end=end, why=why)


def _missing_names(options: SourceOptions, found: TopicsByName) -> list[str]:
    wanted = options.subscription
    names = [name for name in wanted.names if name not in found]
    return names + [
        _partition_name(place)
        for place in wanted.assigned
        if place[0] not in found or found[place[0]].partition(place[1]) is None
    ]


def _refuse_other_partitions(asked: Mapping[TopicPartition, int], places: Sequence[TopicPartition]) -> None:
    """Raises OptionError unless all partitions are named, and no others."""
    missing, unknown = sorted(set(places) - asked.keys()), sorted(asked.keys() - set(places))
    if missing:
        raise OptionError(
            f"offsets or times by partition must name every one; {', '.join(map(_partition_name, missing))} is missing "
            "(-2 stands for the earliest offset, -1 for the latest)"
        )
    if unknown:
        raise OptionError(
            f"offsets are given for what is not read: {', '.join(map(_partition_name, unknown))}"
        )


def _partition_name(place: TopicPartition) -> str:
    return f"{place[0]}[{place[1]}]"


def _topic_ids(topics: TopicsByName) -> dict[str, UUID | None]:
    return {name: topic.id for name, topic in topics.items()}
