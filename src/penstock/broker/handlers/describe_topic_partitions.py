"""DescribeTopicPartitions (key 75), v0. Topics in the order of their names, in pages of partitions.

An empty list selects all topics. A page ends at the limit of the request or of the node; the cursor in the response
is where the next page begins. Each partition is described and encoded in a step of its own.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from kio.schema.describe_topic_partitions.v0.response import (
    Cursor,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)

from penstock.broker.network.requests import RequestContext, in_slices
from penstock.broker.network.response_cache import EncodedTopics, TopicEncoding
from penstock.broker.partition.client_view import (
    OPERATIONS_NOT_REQUESTED,
    TOPIC_AUTHORIZED_OPERATIONS,
    PartitionViewer,
)
from penstock.cluster.image import PartitionState, TopicState
from penstock.cluster.topic_names import is_internal, topic_name_error
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import EncodedElements
from penstock.protocol.steps import Steps, map_in_steps


@in_slices
def handle(ctx: RequestContext, request: Any) -> Steps[Any]:
    return _Pages(ctx).page(request)


class _Pages:
    """Builds pages from one image, as the client's listener sees it."""

    def __init__(self, ctx: RequestContext) -> None:
        self._image = ctx.services.image
        self._viewer = PartitionViewer(self._image, ctx.listener)
        self._ctx = ctx
        self._answers = ctx.services.topic_responses
        self._form = TopicEncoding(ctx.api_key, ctx.version, ctx.listener, TOPIC_AUTHORIZED_OPERATIONS)
        self._partitions_max = ctx.services.settings.integer("max.request.partition.size.limit")

    def page(self, request: Any) -> Steps[Any]:
        cursor = request.cursor
        asked = {topic.name for topic in request.topics}
        if cursor is not None and (cursor.partition_index < 0 or (asked and cursor.topic_name not in asked)):
            return _invalid_cursor(asked)
        first_topic, first_partition = (cursor.topic_name, cursor.partition_index) if cursor else ("", 0)
        names = sorted(name for name in asked or self._image.topics if name >= first_topic)
        refused: list[bytes] = []
        if self._ctx.authorizer is not None:
            names, refused = yield from self._authorized(names, is_named=bool(asked))
        left = max(1, min(self._partitions_max, request.response_partition_limit))
        topics: list[bytes] = []
        encodings: dict[int, EncodedTopics] = {}
        for name in names:
            yield
            topic = self._image.topics.get(name)
            operations = self._ctx.authorized_operations(ResourceType.TOPIC, name)
            encoded = encodings.get(operations)
            if encoded is None:
                form = self._form._replace(operations=operations)
                encoded = encodings[operations] = self._answers.topics(form, self._image)
            if topic is None:
                topics.append(encoded.encode(_missing_topic(name, operations)))
                continue
            if left == 0:
                return _page(topics + refused, Cursor(topic_name=name, partition_index=0))
            begin = first_partition if name == first_topic else 0
            end = min(len(topic.partitions), begin + left)
            if begin == 0 and end == len(topic.partitions):
                describe = partial(self._whole_topic, operations=operations)
                topics.append((yield from encoded.encoded_in_steps(topic, describe)))
            else:
                part = yield from _topic(self._viewer, topic, range(begin, end), operations)
                topics.append((yield from encoded.encode_in_steps(part)))
            left -= max(0, end - begin)
            if end < len(topic.partitions):
                return _page(topics + refused, Cursor(topic_name=name, partition_index=end))
        return _page(topics + refused, None)

    def _authorized(self, names: list[str], *, is_named: bool) -> Steps[tuple[list[str], list[bytes]]]:
        """Return the topics that the client may describe, and the replies for the others if it has named them.

        These do not tell whether the topic exists.
        """
        refused: list[bytes] = []
        allowed: list[str] = []
        encode = self._answers.topics(self._form).encode
        for name in names:
            yield
            if not is_named:
                if self._ctx.may(Operation.DESCRIBE, ResourceType.TOPIC, name):
                    allowed.append(name)
            elif self._ctx.demand(Operation.DESCRIBE, ResourceType.TOPIC, name):
                allowed.append(name)
            else:
                error = ErrorCode.topic_authorization_failed
                refused.append(encode(_topic_with_error(name, error, OPERATIONS_NOT_REQUESTED)))
        return allowed, refused

    def _whole_topic(self, topic: TopicState, operations: int) -> Steps[Any]:
        return _topic(self._viewer, topic, range(len(topic.partitions)), operations)


def _page(topics: list[bytes], cursor: Any) -> Any:
    return _response(EncodedElements(topics), cursor)


def _response(topics: Any, cursor: Any) -> Any:
    return DescribeTopicPartitionsResponse(throttle_time=timedelta(0), topics=topics, next_cursor=cursor)


def _invalid_cursor(asked: set[str]) -> Any:
    """The reply to a cursor that points at none of the requested topics."""
    return _response(
        tuple(_topic_with_error(name, ErrorCode.invalid_request) for name in sorted(asked)), None
    )


def _missing_topic(name: str, operations: int) -> Any:
    flawed = topic_name_error(name) is not None
    return _topic_with_error(
        name,
        ErrorCode.invalid_topic_exception if flawed else ErrorCode.unknown_topic_or_partition,
        operations,
    )


def _topic_with_error(name: str, error: ErrorCode, operations: int = TOPIC_AUTHORIZED_OPERATIONS) -> Any:
    return DescribeTopicPartitionsResponseTopic(
        error_code=error,
        name=name,
        topic_id=None,
        is_internal=is_internal(name),
        partitions=(),
        topic_authorized_operations=operations,
    )


def _topic(viewer: PartitionViewer, topic: TopicState, indexes: range, operations: int) -> Steps[Any]:
    partitions = yield from map_in_steps(
        lambda index: _partition(viewer, index, topic.partitions[index]), indexes
    )
    return DescribeTopicPartitionsResponseTopic(
        error_code=ErrorCode.none,
        name=topic.name,
        topic_id=topic.id,
        is_internal=is_internal(topic.name),
        partitions=partitions,
        topic_authorized_operations=operations,
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
