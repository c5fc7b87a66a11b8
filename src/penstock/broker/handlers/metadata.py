"""Metadata (key 3), v0-13. Brokers, topics and leaders, as seen from the client's listener.

Null topics (in v0 an empty list) select all. A topic that does not exist is UNKNOWN_TOPIC_OR_PARTITION; if node and
request allow it, its creation starts at the same time, and a later request finds it, as in Apache Kafka. From v12 on a
request may contain topic ids instead of names; in earlier versions a topic id fails the whole request.
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

from penstock.broker.network.requests import RequestContext
from penstock.broker.network.response_cache import TopicEncoding
from penstock.broker.partition.client_view import (
    CLUSTER_AUTHORIZED_OPERATIONS,
    OPERATIONS_NOT_REQUESTED,
    TOPIC_AUTHORIZED_OPERATIONS,
    PartitionViewer,
    reachable_brokers,
)
from penstock.cluster.image import PartitionState, TopicState
from penstock.cluster.topic_names import is_internal, topic_name_error
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import EncodedElements

_NO_CONTROLLER: Final = -1
_TOPIC_IDS_FROM: Final = 12
_LISTENER_NOT_FOUND_FROM: Final = 6
_CLUSTER_OPERATIONS_IN: Final = range(8, 11)


class _MissingTopic(NamedTuple):
    """A requested topic that cannot be returned."""

    error: ErrorCode
    name: str | None
    id: UUID | None = None

    @property
    def is_unknown(self) -> bool:
        return self.error is ErrorCode.unknown_topic_or_partition


def handle(ctx: RequestContext, request: Any) -> Any:
    if request.topics is None or (ctx.version == 0 and not request.topics):
        view = _View(ctx, request)
        return ctx.services.topic_responses.all_topics_response(
            view.form, view.cluster_operations, view.topic, view.response
        )
    if ctx.version < _TOPIC_IDS_FROM and any(t.name is None or t.topic_id for t in request.topics):
        return _error_response(ctx, request)
    asked = _requested_topics(ctx, request)
    if request.allow_auto_topic_creation and ctx.services.settings.boolean("auto.create.topics.enable"):
        absent = [
            t.name for t in asked if isinstance(t, _MissingTopic) and t.name is not None and t.is_unknown
        ]
        if absent:
            ctx.services.auto_creation.begin_by_name(absent)
    return _response(ctx, request, asked)


def _requested_topics(ctx: RequestContext, request: Any) -> list[TopicState | _MissingTopic]:
    once = {(topic.name, topic.topic_id): topic for topic in request.topics}
    return [_find(ctx, topic.name, topic.topic_id) for topic in once.values()]


def _find(ctx: RequestContext, name: str | None, topic_id: UUID | None) -> TopicState | _MissingTopic:
    image = ctx.services.image
    if topic_id is not None:
        return image.topics_by_id.get(topic_id) or _MissingTopic(ErrorCode.unknown_topic_id, None, topic_id)
    if name is None:
        return _MissingTopic(ErrorCode.unknown_topic_id, None)
    if (topic := image.topics.get(name)) is not None:
        return topic
    if topic_name_error(name) is not None:
        return _MissingTopic(ErrorCode.invalid_topic_exception, name)
    return _MissingTopic(ErrorCode.unknown_topic_or_partition, name)


class _View:
    """The present image as seen by one request."""

    def __init__(self, ctx: RequestContext, request: Any) -> None:
        self._ctx = ctx
        self._image = ctx.services.image
        self._viewer = PartitionViewer(self._image, ctx.listener)
        asked = request.include_topic_authorized_operations
        self._operations = TOPIC_AUTHORIZED_OPERATIONS if asked else OPERATIONS_NOT_REQUESTED
        self.form = TopicEncoding(ctx.api_key, ctx.version, ctx.listener, self._operations)
        self.cluster_operations: int | None = None
        if ctx.version in _CLUSTER_OPERATIONS_IN:
            asked = request.include_cluster_authorized_operations
            self.cluster_operations = CLUSTER_AUTHORIZED_OPERATIONS if asked else OPERATIONS_NOT_REQUESTED

    def topic(self, topic: TopicState | _MissingTopic) -> Any:
        return _topic(self._ctx, self._viewer, topic, self._operations)

    def response(self, topics: Any) -> Any:
        services = self._ctx.services
        brokers = tuple(
            MetadataResponseBroker(node_id=broker.id, host=at.host, port=at.port, rack=broker.rack)
            for broker, at in reachable_brokers(self._image, self._ctx.listener)
        )
        fields: dict[str, Any] = {
            "throttle_time": timedelta(0),
            "brokers": brokers,
            "cluster_id": services.cluster_id,
            "controller_id": _controller(services.node_id, [broker.node_id for broker in brokers]),
            "topics": topics,
        }
        if self.cluster_operations is not None:
            return MetadataResponseV10(**fields, cluster_authorized_operations=self.cluster_operations)
        return MetadataResponse(**fields, error_code=ErrorCode.none)


def _response(ctx: RequestContext, request: Any, topics: list[TopicState | _MissingTopic]) -> Any:
    view = _View(ctx, request)
    encoded = ctx.services.topic_responses.topics(view.form)
    return view.response(
        EncodedElements(
            [
                encoded.encode(view.topic(topic))
                if isinstance(topic, _MissingTopic)
                else encoded.encoded(topic, view.topic)
                for topic in topics
            ]
        )
    )


def _controller(node_id: int, reachable: list[int]) -> int:
    """Every broker forwards to the controller, so this broker will do if it is reachable from the listener."""
    return node_id if node_id in reachable else next(iter(reachable), _NO_CONTROLLER)


def _error_response(ctx: RequestContext, request: Any) -> Any:
    viewer = PartitionViewer(ctx.services.image, ctx.listener)
    topics = [_MissingTopic(ErrorCode.invalid_request, t.name or "", t.topic_id) for t in request.topics]
    return MetadataResponseV10(
        throttle_time=timedelta(0),
        brokers=(),
        topics=tuple(_topic(ctx, viewer, topic, OPERATIONS_NOT_REQUESTED) for topic in topics),
    )


def _topic(
    ctx: RequestContext, viewer: PartitionViewer, topic: TopicState | _MissingTopic, operations: int
) -> Any:
    if isinstance(topic, _MissingTopic):
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
        # Version 0 lists only replicas that are reachable, and reports the others with an error.
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
