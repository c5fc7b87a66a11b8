"""What the driver of a streaming query decides: where to begin, how far the next batch goes, what its tasks read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.client.cluster import Cluster
from penstock.client.topic_contracts import check_topic_contracts
from penstock.spark.claims import Claims
from penstock.spark.discovery import Discovery
from penstock.spark.offsets import OffsetRange, Position, TopicPosition, begin_of, ranges
from penstock.spark.options import SourceOptions
from penstock.spark.planning import is_enough, limit, split, waiting
from penstock.spark.progress import Progress
from penstock.spark.sink_options import Contract
from penstock.spark.tickets import Ticket


class Task(NamedTuple):
    """What one task reads; with a ticket only if it is the first to redeem that."""

    wanted: OffsetRange
    ticket: Ticket | None = None


class StreamPlan:
    """Of one query, in the one process that plans it."""

    def __init__(
        self,
        options: SourceOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._options = options
        self._cluster = Cluster(options.connection)
        self._discovery = Discovery(self._cluster, options)
        is_claiming = options.contract is Contract.AT_MOST_ONCE
        # Who claims tells the group by that, and nothing else may move its positions.
        self._progress = Progress(options.connection, None if is_claiming else options.group_id)
        self._claims = Claims(self._cluster, options.group_id) if is_claiming and options.group_id else None
        #: Topics that are known to ask for no more than is promised.
        self._allowed: set[str] = set()
        self._clock = clock
        self._wall = wall
        self._last_batch_s: float | None = None
        #: How far a query goes that reads what is there now and then ends.
        self._target: Position | None = None
        #: What there was to read when somebody last looked.
        self.seen: Position | None = None

    def close(self) -> None:
        if self._claims is not None:
            self._claims.close()
        self._cluster.close()
        self._progress.close()

    def starting(self) -> Position:
        """Raises OptionError, DataLoss, ClaimError, LesserContract, Unavailable, Refused."""
        found = self._discovery.position(self._options.starting, self._discovery.topics())
        self._check_contracts(found.topics)
        return (found if self._claims is None else self._claims.starting(found)).as_initial()

    def aim(self) -> None:
        """From now on, go as far as there is something to read at this moment, and no further."""
        nowhere = Position({})
        self._target = self._due(nowhere, self._discovery.latest(nowhere))

    def next_end(self, start: Position, offsets_max: int | None, offsets_min: int | None) -> Position:
        """The end of the batch after `start`, which is the end of the last finished one; `start` to wait for more.

        Raises DataLoss, ClaimError, Unavailable, Refused.
        """
        self._progress.tell(start)
        if self._claims is not None:
            self._claims.repeat()
        self.seen = self._discovery.latest(start)
        return start.following(self._next_topics(start, self.seen, offsets_max, offsets_min))

    def _next_topics(
        self, start: Position, available: Position, offsets_max: int | None, offsets_min: int | None
    ) -> Mapping[str, TopicPosition]:
        if self._target is not None:
            available, offsets_min = _bounded(start, available, self._target), None
        else:
            available = self._due(start, available)
        ids, ends = available.ids, available.offsets
        begins = {place: begin_of(start, place[0], ids[place[0]], place[1]) for place in ends}
        total = sum(waiting(begins, ends).values())
        if total == 0:
            return available.topics
        if not self._is_due(total, offsets_min):
            return start.topics
        self._last_batch_s = self._clock()
        if offsets_max is None or total <= offsets_max:
            return available.topics
        return self._limited(available, begins, offsets_max).topics

    def _due(self, start: Position, available: Position) -> Position:
        return self._discovery.due(start, available, int(self._wall() * 1000))

    def _is_due(self, total: int, offsets_min: int | None) -> bool:
        if self._last_batch_s is None:
            return True
        waited_ms = (self._clock() - self._last_batch_s) * 1000
        return is_enough(total, offsets_min, waited_ms, self._options.trigger_delay_ms_max)

    def _limited(self, available: Position, begins: dict[tuple[str, int], int], offsets_max: int) -> Position:
        """Counted from where the logs begin: what is gone takes no place in a batch."""
        first, ends = self._discovery.beginnings(begins), available.offsets
        there = {place: max(begin, min(first[place], ends[place])) for place, begin in begins.items()}
        return Position.of(limit(there, ends, offsets_max), available.ids)

    def tasks(self, start: Position, end: Position) -> list[Task]:
        """Raises DataLoss, ClaimError, LesserContract, Unavailable, Refused."""
        wanted = ranges(start, end)
        self._check_contracts(each.topic for each in wanted)
        if self._claims is None:
            return [Task(each) for each in self._split(wanted)]
        pieces = self._split(self._claims.cut(wanted))
        return [Task(*each) for each in zip(pieces, self._claims.claim(pieces), strict=True)]

    def _check_contracts(self, topics: Iterable[str]) -> None:
        """At most once: a topic may ask for more. What another source promises is for its sink to keep, or not."""
        new = set(topics) - self._allowed
        if self._claims is None or not new:
            return
        who = f"the stream of group {self._options.group_id}"
        check_topic_contracts(self._cluster, sorted(new), self._options.contract.value, who=who)
        self._allowed |= new

    def _split(self, wanted: Sequence[OffsetRange]) -> list[OffsetRange]:
        return split(
            self._discovery.readable(wanted),
            partitions_min=self._options.partitions_min,
            records_max=self._options.partition_records_max,
        )


def _bounded(start: Position, available: Position, target: Position) -> Position:
    """What is available up to the target, and never less than what is behind us."""
    found = {}
    for (topic, partition), end in available.offsets.items():
        known = target.topics.get(topic)
        is_aimed_at = known is not None and known.is_same_topic(available.topics[topic].id)
        aim = known.offsets.get(partition) if known is not None and is_aimed_at else None
        behind = start.topics[topic].offsets.get(partition) if topic in start.topics else None
        if aim is not None:
            found[topic, partition] = min(end, max(aim, behind or 0))
        elif behind is not None:
            found[topic, partition] = min(end, behind)
    return Position.of(found, available.ids)
