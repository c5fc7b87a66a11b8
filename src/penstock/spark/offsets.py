"""How far a query has come: an offset for every partition, with the ids of the topics that these offsets belong to.

Spark keeps positions as JSON in its checkpoint and compares them as text, so equal positions have equal text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.client.errors import ClientError
from penstock.client.metadata import Place

VERSION: Final = 1
#: A partition that the query has never seen is read from here.
FIRST_OFFSET: Final = 0


@dataclass(frozen=True, slots=True)
class TopicPosition:
    id: UUID | None  # None where brokers know no ids
    offsets: Mapping[int, int]

    def is_same_topic(self, other: UUID | None) -> bool:
        return self.id is None or other is None or self.id == other


class OffsetRange(NamedTuple):
    """What one task reads of one partition: start <= offset < end."""

    topic: str
    topic_id: UUID | None
    partition: int
    start: int
    end: int

    @property
    def place(self) -> Place:
        return self.topic, self.partition

    @property
    def size(self) -> int:
        """In offsets; compaction and transactions leave fewer records."""
        return max(self.end - self.start, 0)


@dataclass(frozen=True, slots=True)
class Position:
    """Of a query, between two batches.

    Spark keeps where the first batch of a query ends, and asks anew where it began when it has to be done again, while
    "latest" means another place by then. So the end of the first batch carries its beginning: `since`.
    """

    topics: Mapping[str, TopicPosition]
    since: Mapping[str, TopicPosition] | None = None

    @property
    def is_initial(self) -> bool:
        """Whether nothing has been read yet."""
        return self.since == self.topics

    def as_initial(self) -> Position:
        return Position(self.topics, self.topics)

    def following(self, topics: Mapping[str, TopicPosition]) -> Position:
        """The next position of a query that stands here; this very one, to the letter, if nothing has changed."""
        if topics == self.topics:
            return self
        return Position(topics, self.topics if self.is_initial else None)

    @classmethod
    def of(cls, offsets: Mapping[Place, int], ids: Mapping[str, UUID | None]) -> Position:
        topics: dict[str, dict[int, int]] = {}
        for topic, partition in sorted(offsets):
            topics.setdefault(topic, {})[partition] = offsets[topic, partition]
        return cls({name: TopicPosition(ids[name], parts) for name, parts in topics.items()})

    @property
    def offsets(self) -> dict[Place, int]:
        return {
            (name, partition): offset
            for name, topic in self.topics.items()
            for partition, offset in topic.offsets.items()
        }

    @property
    def ids(self) -> dict[str, UUID | None]:
        return {name: topic.id for name, topic in self.topics.items()}

    def to_json(self) -> dict[str, Any]:
        """In one order, whatever order it was made in."""
        told: dict[str, Any] = {"version": VERSION, "topics": _topics_json(self.topics)}
        return told if self.since is None else told | {"since": _topics_json(self.since)}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Position:
        """Takes the positions of Spark's Kafka connector too, so that its checkpoints can be gone on with."""
        try:
            return cls._from_ours(told) if "topics" in told else cls._from_connector(told)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ClientError(
                f"the checkpoint holds a position that this version cannot read: {told}"
            ) from None

    @classmethod
    def _from_ours(cls, told: Mapping[str, Any]) -> Position:
        if told["version"] != VERSION:
            raise ValueError(told["version"])
        return cls(_topics(told["topics"]), _topics(told["since"]) if "since" in told else None)

    @classmethod
    def _from_connector(cls, told: Mapping[str, Any]) -> Position:
        return cls({name: TopicPosition(None, _offsets(parts)) for name, parts in told.items()})


def _topics_json(topics: Mapping[str, TopicPosition]) -> dict[str, Any]:
    return {name: _topic_json(topic) for name, topic in sorted(topics.items())}


def _topics(told: Mapping[str, Any]) -> dict[str, TopicPosition]:
    return {
        name: TopicPosition(UUID(topic["id"]) if "id" in topic else None, _offsets(topic["offsets"]))
        for name, topic in told.items()
    }


def _topic_json(topic: TopicPosition) -> dict[str, Any]:
    offsets = {str(partition): topic.offsets[partition] for partition in sorted(topic.offsets)}
    return {"id": str(topic.id), "offsets": offsets} if topic.id is not None else {"offsets": offsets}


def _offsets(told: Mapping[str, Any]) -> dict[int, int]:
    return {int(partition): int(offset) for partition, offset in told.items()}


def begin_of(start: Position, topic: str, topic_id: UUID | None, partition: int) -> int:
    """Where a query that stands at `start` goes on in this partition of this topic, which may be a new one."""
    known = start.topics.get(topic)
    if known is None or not known.is_same_topic(topic_id):
        return FIRST_OFFSET
    return known.offsets.get(partition, FIRST_OFFSET)


def ranges(start: Position, end: Position) -> list[OffsetRange]:
    """What lies between two positions of a query; new partitions and new topics from their first offset on."""
    start = start if end.since is None else Position(end.since)
    found = [
        OffsetRange(name, topic.id, partition, begin_of(start, name, topic.id, partition), offset)
        for name, topic in sorted(end.topics.items())
        for partition, offset in sorted(topic.offsets.items())
    ]
    return [each for each in found if each.size]
