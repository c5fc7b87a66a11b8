"""DescribeTopicPartitions (key 75), v0. Topics in the order of their names, in pages of partitions.

No topics asks for all of them. A page ends at the request's limit or the node's; the cursor of the answer is
where the next one begins.
"""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import timedelta
from typing import Any

from kio.schema.describe_topic_partitions.v0.response import (
    Cursor,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)

from penstock.broker.context import RequestContext
from penstock.broker.topic_answers import TopicForm
from penstock.broker.topology import TOPIC_OPERATIONS, PartitionViewer
from penstock.cluster.names import is_internal, topic_name_flaw
from penstock.cluster.state import PartitionState, TopicState
from penstock.protocol.errors import ErrorCode
from penstock.protocol.writing import EncodedElements


def handle(ctx: RequestContext, request: Any) -> Any | Awaitable[Any]:
    pages = _Pages(ctx)
    if not request.topics and (under_way := pages.all_encoded()) is not None:
        return _later(under_way, ctx, request)
    return pages.page(request)


async def _later(under_way: Awaitable[None], ctx: RequestContext, request: Any) -> Any:
    await under_way
    return _Pages(ctx).page(request)


class _Pages:
    """The present image as a client sees it."""

    def __init__(self, ctx: RequestContext) -> None:
        self._image = ctx.node.image
        self._viewer = PartitionViewer(self._image, ctx.listener)
        self._answers = ctx.node.topic_answers
        self._form = TopicForm(ctx.api_key, ctx.version, ctx.listener, TOPIC_OPERATIONS)
        self._partitions_max = ctx.node.settings.integer("max.request.partition.size.limit")

    def all_encoded(self) -> Awaitable[None] | None:
        return self._answers.all_encoded(self._form, self._whole_topic)

    def page(self, request: Any) -> Any:
        cursor = request.cursor
        asked = {topic.name for topic in request.topics}
        if cursor is not None and (cursor.partition_index < 0 or (asked and cursor.topic_name not in asked)):
            return _invalid(asked)
        first_topic, first_partition = (cursor.topic_name, cursor.partition_index) if cursor else ("", 0)
        names = sorted(name for name in asked or self._image.topics if name >= first_topic)
        encoded = self._answers.topics(self._form)
        left = max(1, min(self._partitions_max, request.response_partition_limit))
        topics: list[bytes] = []
        for name in names:
            topic = self._image.topics.get(name)
            if topic is None:
                topics.append(encoded.encode(_missing(name)))
                continue
            if left == 0:
                return _page(topics, Cursor(topic_name=name, partition_index=0))
            begin = first_partition if name == first_topic else 0
            end = min(len(topic.partitions), begin + left)
            if begin == 0 and end == len(topic.partitions):
                topics.append(encoded.encoded(topic, self._whole_topic))
            else:
                topics.append(encoded.encode(_topic(self._viewer, topic, range(begin, end))))
            left -= max(0, end - begin)
            if end < len(topic.partitions):
                return _page(topics, Cursor(topic_name=name, partition_index=end))
        return _page(topics, None)

    def _whole_topic(self, topic: TopicState) -> Any:
        return _topic(self._viewer, topic, range(len(topic.partitions)))


def _page(topics: list[bytes], cursor: Any) -> Any:
    return _response(EncodedElements(topics), cursor)


def _response(topics: Any, cursor: Any) -> Any:
    return DescribeTopicPartitionsResponse(throttle_time=timedelta(0), topics=topics, next_cursor=cursor)


def _invalid(asked: set[str]) -> Any:
    """A cursor that points at nothing that was asked for."""
    return _response(tuple(_refused(name, ErrorCode.invalid_request) for name in sorted(asked)), None)


def _missing(name: str) -> Any:
    flawed = topic_name_flaw(name) is not None
    return _refused(
        name, ErrorCode.invalid_topic_exception if flawed else ErrorCode.unknown_topic_or_partition
    )


def _refused(name: str, error: ErrorCode) -> Any:
    return DescribeTopicPartitionsResponseTopic(
        error_code=error,
        name=name,
        topic_id=None,
        is_internal=is_internal(name),
        partitions=(),
        topic_authorized_operations=TOPIC_OPERATIONS,
    )


def _topic(viewer: PartitionViewer, topic: TopicState, indexes: range) -> Any:
    return DescribeTopicPartitionsResponseTopic(
        error_code=ErrorCode.none,
        name=topic.name,
        topic_id=topic.id,
        is_internal=is_internal(topic.name),
        partitions=tuple(_partition(viewer, index, topic.partitions[index]) for index in indexes),
        topic_authorized_operations=TOPIC_OPERATIONS,
    )


def _partition(viewer: PartitionViewer, index: int, partition: PartitionState) -> Any:
    _, leader, offline = viewer.view(partition)
    return DescribeTopicPartitionsResponsePartition(
        error_code=ErrorCode.none,
        partition_index=index,
        leader_id=leader,
        leader_epoch=partition.leader_epoch,
        replica_nodes=partition.replicas,
        isr_nodes=partition.isr,
        eligible_leader_replicas=partition.elr,
        last_known_elr=partition.last_known_elr,
        offline_replicas=offline,
    )
