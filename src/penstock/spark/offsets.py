"""The offsets of a query: its position, what its next batch reads, and what its consumer group shows.

A position contains an offset for every partition, and the ids of the topics that these offsets belong to. Spark stores
positions as JSON in its checkpoint and compares them as text, so equal positions have equal text. The functions that
limit a batch and split it over tasks are pure and deterministic.

`GroupProgress` commits the end of each finished batch to a consumer group. The query itself continues from its
checkpoint; the group is for monitoring. So a failed commit is logged and never stops a query.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.client.errors import ClientError
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicPartition
from penstock.client.wire.offsets import commit_offsets
from penstock.client.wire.settings import ConnectionSettings

POSITION_VERSION: Final = 1
#: A partition that the query has never seen is read from here.
FIRST_OFFSET: Final = 0


@dataclass(frozen=True, slots=True)
class TopicPosition:
    id: UUID | None  # None if the brokers do not support topic ids
    offsets: Mapping[int, int]

    def is_same_topic(self, other: UUID | None) -> bool:
        return self.id is None or other is None or self.id == other


class OffsetRange(NamedTuple):
    """The offsets of one partition that one task reads: start <= offset < end."""

    topic: str
    topic_id: UUID | None
    partition: int
    start: int
    end: int

    @property
    def topic_partition(self) -> TopicPartition:
        return self.topic, self.partition

    @property
    def size(self) -> int:
        """The number of offsets. Because of compaction and transaction markers there may be fewer records."""
        return max(self.end - self.start, 0)


def ranges_to_json(ranges: Iterable[OffsetRange]) -> list[list[Any]]:
    return [
        [each.topic, str(each.topic_id) if each.topic_id else None, each.partition, each.start, each.end]
        for each in ranges
    ]


def ranges_from_json(content: Iterable[Sequence[Any]]) -> Iterator[OffsetRange]:
    for topic, topic_id, partition, start, end in content:
        yield OffsetRange(topic, UUID(topic_id) if topic_id else None, partition, start, end)


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a query between two batches.

    Spark stores the end of a query's first batch, but not its start. If the first batch runs again, Spark asks for the
    start again, and "latest" is a different offset by then. So the end of the first batch contains its start: `since`.
    """

    topics: Mapping[str, TopicPosition]
    since: Mapping[str, TopicPosition] | None = None

    @property
    def is_initial(self) -> bool:
        """Whether nothing has been read yet."""
        return self.since == self.topics

    def as_initial(self) -> Position:
        return Position(self.topics, self.topics)

    def next_position(self, topics: Mapping[str, TopicPosition]) -> Position:
        """Return the position after this one. If nothing has changed, it is this one, so its JSON is the same too."""
        if topics == self.topics:
            return self
        return Position(topics, self.topics if self.is_initial else None)

    @classmethod
    def of(cls, offsets: Mapping[TopicPartition, int], ids: Mapping[str, UUID | None]) -> Position:
        topics: dict[str, dict[int, int]] = {}
        for topic, partition in sorted(offsets):
            topics.setdefault(topic, {})[partition] = offsets[topic, partition]
        return cls({name: TopicPosition(ids[name], parts) for name, parts in topics.items()})

    @property
    def offsets(self) -> dict[TopicPartition, int]:
        return {
            (name, partition): offset
            for name, topic in self.topics.items()
            for partition, offset in topic.offsets.items()
        }

    @property
    def ids(self) -> dict[str, UUID | None]:
        return {name: topic.id for name, topic in self.topics.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the position as JSON with sorted topics and partitions, so that equal positions have equal text."""
        content: dict[str, Any] = {"version": POSITION_VERSION, "topics": _topics_to_json(self.topics)}
        return content if self.since is None else content | {"since": _topics_to_json(self.since)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Position:
        """Parse a position. Also accepts those of Spark's Kafka connector, so that a query can use its checkpoints."""
        try:
            if "topics" not in content:
                return cls(
                    {name: TopicPosition(None, _offsets_from_json(each)) for name, each in content.items()}
                )
            if content["version"] != POSITION_VERSION:
                raise ValueError(content["version"])
            since = _topics_from_json(content["since"]) if "since" in content else None
            return cls(_topics_from_json(content["topics"]), since)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ClientError(
                f"the checkpoint contains a position that this version cannot read: {content}"
            ) from None


def _topics_to_json(topics: Mapping[str, TopicPosition]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, topic in sorted(topics.items()):
        offsets = {str(partition): topic.offsets[partition] for partition in sorted(topic.offsets)}
        found[name] = (
            {"id": str(topic.id), "offsets": offsets} if topic.id is not None else {"offsets": offsets}
        )
    return found


def _topics_from_json(content: Mapping[str, Any]) -> dict[str, TopicPosition]:
    return {
        name: TopicPosition(
            UUID(topic["id"]) if "id" in topic else None, _offsets_from_json(topic["offsets"])
        )
        for name, topic in content.items()
    }


def _offsets_from_json(content: Mapping[str, Any]) -> dict[int, int]:
    return {int(partition): int(offset) for partition, offset in content.items()}


def start_offset(start: Position, topic: str, topic_id: UUID | None, partition: int) -> int:
    """Return where a query at position `start` continues in this partition, whose topic may be a recreated one."""
    known = start.topics.get(topic)
    if known is None or not known.is_same_topic(topic_id):
        return FIRST_OFFSET
    return known.offsets.get(partition, FIRST_OFFSET)


def ranges_between(start: Position, end: Position) -> list[OffsetRange]:
    """Return the ranges between two positions. New partitions and new topics are read from their first offset."""
    start = start if end.since is None else Position(end.since)
    found = [
        OffsetRange(name, topic.id, partition, start_offset(start, name, topic.id, partition), offset)
        for name, topic in sorted(end.topics.items())
        for partition, offset in sorted(topic.offsets.items())
    ]
    return [each for each in found if each.size]


def unread_offsets(
    begins: Mapping[TopicPartition, int], available: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """Return the number of unread offsets of each partition that has any."""
    sizes = {tp: end - begins[tp] for tp, end in available.items()}
    return {tp: size for tp, size in sizes.items() if size > 0}


def limit_offsets(
    begins: Mapping[TopicPartition, int], available: Mapping[TopicPartition, int], offsets_max: int
) -> dict[TopicPartition, int]:
    """Return the end offsets of a batch of at most `offsets_max` offsets, in proportion to what each partition has.

    The remainder of the rounding goes first to partitions that would get nothing, so that none starves.
    """
    sizes = unread_offsets(begins, available)
    total = sum(sizes.values())
    if total <= offsets_max:
        return dict(available)
    shares = {tp: size * offsets_max // total for tp, size in sizes.items()}
    rest = offsets_max - sum(shares.values())

    def urgency(tp: TopicPartition) -> tuple[bool, int, TopicPartition]:
        return shares[tp] > 0, -(sizes[tp] * offsets_max % total), tp

    for tp in sorted(sizes, key=urgency)[:rest]:
        shares[tp] += 1
    return {tp: begins[tp] + shares[tp] if tp in shares else end for tp, end in available.items()}


def is_batch_due(total: int, offsets_min: int | None, waited_ms: float, delay_ms_max: int) -> bool:
    """Return whether to start a batch of `total` offsets now, rather than wait for more."""
    return offsets_min is None or total >= offsets_min or waited_ms >= delay_ms_max


def split_ranges(
    ranges: Iterable[OffsetRange], *, partitions_min: int | None = None, records_max: int | None = None
) -> list[OffsetRange]:
    """Split ranges for tasks: none longer than `records_max`, and `partitions_min` of them if there are enough offsets.

    Large ranges are split into more pieces than small ones. The pieces of a range have nearly the same size.
    """
    whole = [each for each in ranges if each.size]
    pieces = [-(-each.size // records_max) if records_max else 1 for each in whole]
    if partitions_min is not None:
        pieces = _raise_piece_counts(whole, pieces, partitions_min)
    found = []
    for each, count in zip(whole, pieces, strict=True):
        bounds = [each.start + each.size * index // count for index in range(count + 1)]
        found += [each._replace(start=start, end=end) for start, end in pairwise(bounds)]
    return found


def _raise_piece_counts(ranges: list[OffsetRange], pieces: list[int], wanted: int) -> list[int]:
    """Raise the counts until there are `wanted` pieces, each time for the range with the longest pieces."""
    total = sum(each.size for each in ranges)
    wanted = min(wanted, total)
    # Start in proportion to the sizes, so that the loop only distributes the remainder of the rounding.
    grown = [max(count, each.size * wanted // total) for each, count in zip(ranges, pieces, strict=True)]
    while sum(grown) < wanted:
        longest = max(range(len(ranges)), key=lambda index: (ranges[index].size / grown[index], -index))
        grown[longest] += 1
    return grown


#: Metadata of every committed offset. It shows that a Spark query committed it, which itself uses its checkpoint.
GROUP_METADATA: Final = "penstock-spark"
_LOG: Final = logging.getLogger("penstock.spark")
#: A batch waits at most this long for the commit to its group.
_COMMIT_MS_MAX: Final = 5_000
#: Offsets are committed again after this time, because brokers expire them and a query may have no data for weeks.
COMMIT_REPEAT_MS: Final = 600_000
#: Pause after a failed commit. Without it, every trigger would wait for the same failure.
COMMIT_RETRY_MS: Final = 10_000


class GroupProgress:
    """Commits the progress of one query to its consumer group, on the driver."""

    def __init__(
        self,
        settings: ConnectionSettings,
        group: str | None,
        *,
        deadline: Callable[[float], Deadline] = Deadline,
    ) -> None:
        deadline_ms = min(settings.retry_deadline_ms, _COMMIT_MS_MAX)
        self._cluster = Cluster(replace(settings, retry_deadline_ms=deadline_ms))
        self._group = group
        self._deadline = deadline
        self._committed: Position | None = None
        self._next_commit = deadline(0)

    def commit(self, finished: Position) -> None:
        """Commit the end of the last finished batch, unless the same offsets were committed recently."""
        if self._group is None or not finished.topics:
            return
        if not self._next_commit.is_over and self._committed in (finished, None):
            return
        try:
            commit_offsets(self._cluster, self._group, finished.offsets, metadata=GROUP_METADATA)
        except ClientError as trouble:
            _LOG.warning(
                "group %s: the progress of the query could not be committed: %s", self._group, trouble
            )
            self._committed, self._next_commit = None, self._deadline(COMMIT_RETRY_MS)
        else:
            self._committed, self._next_commit = finished, self._deadline(COMMIT_REPEAT_MS)

    def close(self) -> None:
        self._cluster.close()
