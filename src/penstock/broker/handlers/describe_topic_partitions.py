"""DescribeTopicPartitions (key 75), v0. Topics in the order of their names, in pages of partitions.

An empty list selects all topics. A page ends at the limit of the request or of the node; the cursor in the response
is where the next page begins.
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

from penstock.broker.network.requests import RequestContext
from penstock.broker.network.response_cache import TopicEncoding
from penstock.broker.partition.client_view import TOPIC_AUTHORIZED_OPERATIONS, PartitionViewer
from penstock.cluster.image import PartitionState, TopicState
from penstock.cluster.topic_names import is_internal, topic_name_error
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import EncodedElements


def handle(ctx: RequestContext, request: Any) -> Any | Awaitable[Any]:
    pages = _Pages(ctx)
    if not request.topics and (under_way := pages.encode_all_topics()) is not None:
        return _page_when_encoded(under_way, ctx, request)
    return pages.page(request)


async def _page_when_encoded(under_way: Awaitable[None], ctx: RequestContext, request: Any) -> Any:
    await under_way
    return _Pages(ctx).page(request)


class _Pages:
    """Builds pages from the present image, as the client's listener sees it."""

    def __init__(self, ctx: RequestContext) -> None:
        self._image = ctx.services.image
        self._viewer = PartitionViewer(self._image, ctx.listener)
        self._answers = ctx.services.topic_responses
        self._form = TopicEncoding(ctx.api_key, ctx.version, ctx.listener, TOPIC_AUTHORIZED_OPERATIONS)
        self._partitions_max = ctx.services.settings.integer("max.request.partition.size.limit")

    def encode_all_topics(self) -> Awaitable[None] | None:
        return self._answers.encode_all_topics(self._form, self._whole_topic)

    def page(self, request: Any) -> Any:
        cursor = request.cursor
        asked = {topic.name for topic in request.topics}
        if cursor is not None and (cursor.partition_index < 0 or (asked and cursor.topic_name not in asked)):
            return _invalid_cursor(asked)
        first_topic, first_partition = (cursor.topic_name, cursor.partition_index) if cursor else ("", 0)
        names = sorted(name for name in asked or self._image.topics if name >= first_topic)
        encoded = self._answers.topics(self._form)
        left = max(1, min(self._partitions_max, request.response_partition_limit))
        topics: list[bytes] = []
        for name in names:
            topic = self._image.topics.get(name)
            if topic is None:
                topics.append(encoded.encode(_missing_topic(name)))
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


def _invalid_cursor(asked: set[str]) -> Any:
    """The reply to a cursor that points at none of the requested topics."""
    return _response(
        tuple(_topic_with_error(name, ErrorCode.invalid_request) for name in sorted(asked)), None
    )


def _missing_topic(name: str) -> Any:
    flawed = topic_name_error(name) is not None
    return _topic_with_error(
        name, ErrorCode.invalid_topic_exception if flawed else ErrorCode.unknown_topic_or_partition
    )


def _topic_with_error(name: str, error: ErrorCode) -> Any:
    return DescribeTopicPartitionsResponseTopic(
        error_code=error,
        name=name,
        topic_id=None,
        is_internal=is_internal(name),
        partitions=(),
        topic_authorized_operations=TOPIC_AUTHORIZED_OPERATIONS,
    )


def _topic(viewer: PartitionViewer, topic: TopicState, indexes: range) -> Any:
    return DescribeTopicPartitionsResponseTopic(
        error_code=ErrorCode.none,
        name=topic.name,
        topic_id=topic.id,
        is_internal=is_internal(topic.name),
        partitions=tuple(_partition(viewer, index, topic.partitions[index]) for index in indexes),
        topic_authorized_operations=TOPIC_AUTHORIZED_OPERATIONS,
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
