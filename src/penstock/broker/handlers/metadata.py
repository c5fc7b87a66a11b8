"""Metadata (key 3), v0-13. Brokers, topics and leaders, as seen from the client's listener.

Null topics (in v0 an empty list) select all. A topic that does not exist is UNKNOWN_TOPIC_OR_PARTITION; if node and
request allow it, its creation starts at the same time, and a later request finds it, as in Apache Kafka. From v12 on a
request may contain topic ids instead of names; in earlier versions a topic id fails the whole request.
"""

from __future__ import annotations

from collections.abc import Iterable
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

from penstock.broker.network.requests import RequestContext, cluster_operations, in_slices
from penstock.broker.network.response_cache import EncodedTopics, TopicEncoding
from penstock.broker.partition.client_view import (
    OPERATIONS_NOT_REQUESTED,
    TOPIC_AUTHORIZED_OPERATIONS,
    PartitionViewer,
    reachable_brokers,
)
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.image import ClusterImage, PartitionState, TopicState
from penstock.cluster.topic_names import is_internal, topic_name_error
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import EncodedElements
from penstock.protocol.steps import Steps

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


@in_slices
def handle(ctx: RequestContext, request: Any) -> Steps[Any]:
    """One image will do for all topics: a client takes any response for one that may be outdated."""
    if request.topics is None or (ctx.version == 0 and not request.topics):
        view = _View(ctx, request)
        if ctx.authorizer is not None:
            return (yield from _describable_topics(ctx, view))
        return ctx.services.topic_responses.all_topics_response(
            view.form, view.cluster_operations, view.topic, view.response
        )
    if ctx.version < _TOPIC_IDS_FROM and any(t.name is None or t.topic_id for t in request.topics):
        return _error_response(ctx, request)
    view = _View(ctx, request)
    asked = yield from _requested_topics(ctx, request, view.image)
    if request.allow_auto_topic_creation and ctx.services.settings.boolean("auto.create.topics.enable"):
        absent = [
            t.name for t in asked if isinstance(t, _MissingTopic) and t.name is not None and t.is_unknown
        ]
        refused = set()
        for name in absent:
            if not _may_create(ctx, name):
                refused.add(name)
            yield
        if refused:
            asked = [
                topic._replace(error=ErrorCode.topic_authorization_failed)
                if isinstance(topic, _MissingTopic) and topic.name in refused
                else topic
                for topic in asked
            ]
        if len(absent) > len(refused):
            topics = [NewTopic(name=name) for name in absent if name not in refused]
            ctx.services.auto_creation.begin_for(ctx, topics)
    return (yield from _response(view, asked))


def _may_create(ctx: RequestContext, name: str) -> bool:
    return ctx.may(Operation.CREATE, ResourceType.CLUSTER) or ctx.demand(
        Operation.CREATE, ResourceType.TOPIC, name
    )


def _describable_topics(ctx: RequestContext, view: _View) -> Steps[Any]:
    """The reply to a request for all topics: those that the client may not describe are left out."""

    def response() -> Steps[Any]:
        topics = []
        for topic in view.image.topics.values():
            if ctx.may(Operation.DESCRIBE, ResourceType.TOPIC, topic.name):
                topics.append(topic)
            yield
        return (yield from _response(view, topics))

    under_way = ctx.services.topic_responses.encode_all_topics(view.form, view.topic)
    if under_way is None:
        return (yield from response())

    async def response_later() -> Any:
        await under_way
        return await ctx.finish_in_slices(response())

    return response_later()


def _requested_topics(
    ctx: RequestContext, request: Any, image: ClusterImage
) -> Steps[list[TopicState | _MissingTopic]]:
    found = []
    for name, topic_id in dict.fromkeys((topic.name, topic.topic_id) for topic in request.topics):
        found.append(_find(ctx, image, name, topic_id))
        yield
    return found


def _find(
    ctx: RequestContext, image: ClusterImage, name: str | None, topic_id: UUID | None
) -> TopicState | _MissingTopic:
    found = _look_up(image, name, topic_id)
    known = found.name
    if known is None or ctx.demand(Operation.DESCRIBE, ResourceType.TOPIC, known):
        return found
    # Whether the topic exists is not told. An id is no secret, but the name that it belongs to is.
    return _MissingTopic(
        ErrorCode.topic_authorization_failed, None if topic_id is not None else name, topic_id
    )


def _look_up(image: ClusterImage, name: str | None, topic_id: UUID | None) -> TopicState | _MissingTopic:
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
        self.image = ctx.services.image
        self._viewer = PartitionViewer(self.image, ctx.listener)
        self._with_operations = request.include_topic_authorized_operations
        self._operations = TOPIC_AUTHORIZED_OPERATIONS if self._with_operations else OPERATIONS_NOT_REQUESTED
        self.form = TopicEncoding(ctx.api_key, ctx.version, ctx.listener, self._operations)
        self.cluster_operations: int | None = None
        if ctx.version in _CLUSTER_OPERATIONS_IN:
            self.cluster_operations = cluster_operations(ctx, request)

    def topic(self, topic: TopicState | _MissingTopic) -> Any:
        return _topic(self._ctx, self._viewer, topic, self._operations)

    def encoded(self, topics: Iterable[TopicState | _MissingTopic]) -> Steps[EncodedElements]:
        responses = self._ctx.services.topic_responses
        encodings: dict[TopicEncoding, EncodedTopics] = {}
        elements: list[bytes] = []
        for topic in topics:
            if self._with_operations and self._ctx.authorizer is not None and topic.name is not None:
                operations = self._ctx.authorized_operations(ResourceType.TOPIC, topic.name)
                self._operations, self.form = operations, self.form._replace(operations=operations)
            encoding = encodings.get(self.form)
            if encoding is None:
                encoding = encodings[self.form] = responses.topics(self.form, self.image)
            if isinstance(topic, _MissingTopic):
                elements.append(encoding.encode(self.topic(topic)))
            else:
                elements.append(encoding.encoded(topic, self.topic))
            yield
        return EncodedElements(elements)

    def response(self, topics: Any) -> Any:
        services = self._ctx.services
        brokers = tuple(
            MetadataResponseBroker(node_id=broker.id, host=at.host, port=at.port, rack=broker.rack)
            for broker, at in reachable_brokers(self.image, self._ctx.listener)
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


def _response(view: _View, topics: list[TopicState] | list[TopicState | _MissingTopic]) -> Steps[Any]:
    return view.response((yield from view.encoded(topics)))


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
