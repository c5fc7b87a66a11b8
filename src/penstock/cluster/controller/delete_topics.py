"""Deleting topics, named or by id."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from penstock.cluster.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.names import is_internal
from penstock.cluster.records import RemoveTopicRecord
from penstock.cluster.state import TopicState
from penstock.protocol.errors import ApiError, ErrorCode


class TopicRef(NamedTuple):
    """Exactly one of the two, or the request is wrong."""

    name: str | None = None
    id: UUID | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedTopic:
    name: str | None
    id: UUID | None
    error: ErrorCode = ErrorCode.none
    message: str | None = None


def delete_topics(image: ClusterImage, topics: Sequence[TopicRef]) -> Decision[tuple[DeletedTopic, ...]]:
    """One result per distinct reference, in the order asked."""
    asked = Counter(topics)
    found: dict[TopicRef, TopicState | ApiError] = {ref: _find(image, ref, asked[ref]) for ref in asked}
    by_id = Counter(topic.id for topic in found.values() if isinstance(topic, TopicState))
    results: list[DeletedTopic] = []
    records: list[RemoveTopicRecord] = []
    for ref, topic in found.items():
        if isinstance(topic, ApiError):
            results.append(DeletedTopic(name=ref.name, id=ref.id, error=topic.code, message=topic.message))
        elif by_id[topic.id] > 1:
            results.append(_named_twice(topic))
        else:
            records.append(RemoveTopicRecord(topic_id=topic.id))
            results.append(DeletedTopic(name=topic.name, id=topic.id))
    return Decision(tuple(records), tuple(results))


def _find(image: ClusterImage, ref: TopicRef, times: int) -> TopicState | ApiError:
    """The error is returned, not raised: the other topics go on."""
    if ref.name is None and ref.id is None:
        return ApiError(ErrorCode.invalid_request, "Neither topic name nor id were specified.")
    if ref.name is not None and ref.id is not None:
        return ApiError(ErrorCode.invalid_request, "You may not specify both topic name and topic id.")
    if times > 1:
        return ApiError(ErrorCode.invalid_request, f"Duplicate topic {'id' if ref.name is None else 'name'}.")
    if ref.id is not None:
        topic = image.topics_by_id.get(ref.id)
        missing = ErrorCode.unknown_topic_id
    else:
        assert ref.name is not None
        topic = image.topics.get(ref.name)
        missing = ErrorCode.unknown_topic_or_partition
    if topic is None:
        return ApiError(missing, "This server does not host this topic.")
    if is_internal(topic.name):
        # Apache Kafka leaves this to its tools; every group's position would be gone.
        return ApiError(ErrorCode.invalid_request, f"Topic {topic.name} is internal and cannot be deleted.")
    return topic


def _named_twice(topic: TopicState) -> DeletedTopic:
    return DeletedTopic(
        name=topic.name,
        id=topic.id,
        error=ErrorCode.invalid_request,
        message="The provided topic name maps to an ID that was already supplied.",
    )
