"""Metadata (key 3), v0-13. Brokers, topics and leaders, seen from the listener the client came in by.

No topics (null; in v0 an empty list) asks for all of them. A topic that does not exist is UNKNOWN_TOPIC_OR_PARTITION;
where node and request allow it, its creation begins at the same time, and a later request finds it, as in Apache Kafka.
Ids may be asked for instead of names from v12 on; before, a request that does is refused as a whole.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from kio.schema.metadata.v10.response import MetadataResponse as MetadataResponseV10
from kio.schema.metadata.v13.response import (
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)

from penstock.broker.context import RequestContext
from penstock.broker.topic_answers import TopicForm
from penstock.broker.topology import (
    CLUSTER_OPERATIONS,
    OPERATIONS_NOT_ASKED,
    TOPIC_OPERATIONS,
    PartitionViewer,
    reachable_brokers,
)
from penstock.cluster.names import is_internal, topic_name_flaw
from penstock.cluster.state import PartitionState, TopicState
from penstock.protocol.errors import ErrorCode
from penstock.protocol.writing import EncodedElements

_NOBODY: Final = -1
_TOPIC_IDS_FROM: Final = 12
_LISTENER_NOT_FOUND_FROM: Final = 6
_CLUSTER_OPERATIONS_IN: Final = range(8, 11)


class _Missing(NamedTuple):
    """A topic that was asked for and cannot be shown."""

    error: ErrorCode
    name: str | None
    id: UUID | None = None

    @property
    def is_unknown(self) -> bool:
        return self.error is ErrorCode.unknown_topic_or_partition


def handle(ctx: RequestContext, request: Any) -> Any:
    if request.topics is None or (ctx.version == 0 and not request.topics):
        view = _View(ctx, request)
        return ctx.node.topic_answers.about_all(view.form, view.cluster_operations, view.topic, view.response)
    if ctx.version < _TOPIC_IDS_FROM and any(t.name is None or t.topic_id for t in request.topics):
        return _refused(ctx, request)
    asked = _asked(ctx, request)
    if request.allow_auto_topic_creation and ctx.node.settings.boolean("auto.create.topics.enable"):
        absent = [t.name for t in asked if isinstance(t, _Missing) and t.name is not None and t.is_unknown]
        if absent:
            ctx.node.auto_creation.begin_by_name(absent)
    return _response(ctx, request, asked)


def _asked(ctx: RequestContext, request: Any) -> list[TopicState | _Missing]:
    once = {(topic.name, topic.topic_id): topic for topic in request.topics}
    return [_find(ctx, topic.name, topic.topic_id) for topic in once.values()]


def _find(ctx: RequestContext, name: str | None, topic_id: UUID | None) -> TopicState | _Missing:
    image = ctx.node.image
    if topic_id is not None:
        return image.topics_by_id.get(topic_id) or _Missing(ErrorCode.unknown_topic_id, None, topic_id)
    if name is None:
        return _Missing(ErrorCode.unknown_topic_id, None)
    if (topic := image.topics.get(name)) is not None:
        return topic
    if topic_name_flaw(name) is not None:
        return _Missing(ErrorCode.invalid_topic_exception, name)
    return _Missing(ErrorCode.unknown_topic_or_partition, name)


class _View:
    """The present image as one request is to see it."""

    def __init__(self, ctx: RequestContext, request: Any) -> None:
        self._ctx = ctx
        self._image = ctx.node.image
        self._viewer = PartitionViewer(self._image, ctx.listener)
        asked = request.include_topic_authorized_operations
        self._operations = TOPIC_OPERATIONS if asked else OPERATIONS_NOT_ASKED
        self.form = TopicForm(ctx.api_key, ctx.version, ctx.listener, self._operations)
        self.cluster_operations: int | None = None
        if ctx.version in _CLUSTER_OPERATIONS_IN:
            asked = request.include_cluster_authorized_operations
            self.cluster_operations = CLUSTER_OPERATIONS if asked else OPERATIONS_NOT_ASKED

    def topic(self, topic: TopicState | _Missing) -> Any:
        return _topic(self._ctx, self._viewer, topic, self._operations)

    def response(self, topics: Any) -> Any:
        node = self._ctx.node
        brokers = tuple(
            MetadataResponseBroker(node_id=broker.id, host=at.host, port=at.port, rack=broker.rack)
            for broker, at in reachable_brokers(self._image, self._ctx.listener)
        )
        fields: dict[str, Any] = {
            "throttle_time": timedelta(0),
            "brokers": brokers,
            "cluster_id": node.cluster_id,
            "controller_id": _controller(node.node_id, [broker.node_id for broker in brokers]),
            "topics": topics,
        }
        if self.cluster_operations is not None:
            return MetadataResponseV10(**fields, cluster_authorized_operations=self.cluster_operations)
        return MetadataResponse(**fields, error_code=ErrorCode.none)


def _response(ctx: RequestContext, request: Any, topics: list[TopicState | _Missing]) -> Any:
    view = _View(ctx, request)
    encoded = ctx.node.topic_answers.topics(view.form)
    return view.response(
        EncodedElements(
            [
                encoded.encode(view.topic(topic))
                if isinstance(topic, _Missing)
                else encoded.encoded(topic, view.topic)
                for topic in topics
            ]
        )
    )


def _controller(node_id: int, reachable: list[int]) -> int:
    """Every broker passes on what is the controller's to decide, so this one will do, if clients may come here."""
    return node_id if node_id in reachable else next(iter(reachable), _NOBODY)


def _refused(ctx: RequestContext, request: Any) -> Any:
    viewer = PartitionViewer(ctx.node.image, ctx.listener)
    topics = [_Missing(ErrorCode.invalid_request, t.name or "", t.topic_id) for t in request.topics]
    return MetadataResponseV10(
        throttle_time=timedelta(0),
        brokers=(),
        topics=tuple(_topic(ctx, viewer, topic, OPERATIONS_NOT_ASKED) for topic in topics),
    )


def _topic(
    ctx: RequestContext, viewer: PartitionViewer, topic: TopicState | _Missing, operations: int
) -> Any:
    if isinstance(topic, _Missing):
        return MetadataResponseTopic(
            error_code=topic.error,
            name=topic.name,
            topic_id=topic.id,
            is_internal=topic.name is not None and is_internal(topic.name),
            partitions=(),
            topic_authorized_operations=operations,
        )
    return MetadataResponseTopic(
        error_code=ErrorCode.none,
        name=topic.name,
        topic_id=topic.id,
        is_internal=is_internal(topic.name),
        partitions=tuple(
            _partition(ctx, viewer, index, partition) for index, partition in sorted(topic.partitions.items())
        ),
        topic_authorized_operations=operations,
    )


def _partition(ctx: RequestContext, viewer: PartitionViewer, index: int, partition: PartitionState) -> Any:
    error, leader, offline = viewer.view(partition)
    replicas, isr = partition.replicas, partition.isr
    if error is ErrorCode.listener_not_found and ctx.version < _LISTENER_NOT_FOUND_FROM:
        error = ErrorCode.leader_not_available
    if ctx.version == 0 and offline:
        # Version 0 lists only replicas that can be reached, and says so.
        replicas = tuple(broker for broker in replicas if broker not in offline)
        isr = tuple(broker for broker in isr if broker not in offline)
        error = error or ErrorCode.replica_not_available
    return MetadataResponsePartition(
        error_code=error,
        partition_index=index,
        leader_id=leader,
        leader_epoch=partition.leader_epoch,
        replica_nodes=replicas,
        isr_nodes=isr,
        offline_replicas=offline,
    )
