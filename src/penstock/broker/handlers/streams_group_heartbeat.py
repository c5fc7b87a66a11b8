"""StreamsGroupHeartbeat (key 88), v0. Join (epoch 0), heartbeat, and leave (-1).

The broker creates the internal topics of the topology in the background; until they exist the reply has the status
MISSING_INTERNAL_TOPICS, with the reason if a creation failed. While the cluster is at level 0 of `streams.version`
the protocol does not exist: UNSUPPORTED_VERSION.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kio.schema.streams_group_heartbeat.v0 import response as schema

from penstock.broker.controller.topic_creation import AutoTopicCreationManager
from penstock.broker.coordinators.requests import (
    NO_THROTTLE,
    check_id_lengths,
    check_protocol,
    client_host,
    heartbeat_response,
    milliseconds,
)
from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.topic_names import is_internal, topic_name_error
from penstock.groups.modern_group import JOIN_GROUP_MEMBER_EPOCH
from penstock.groups.streams.streams_group import (
    EndpointPartitions,
    StreamsHeartbeatReply,
    StreamsHeartbeatRequest,
)
from penstock.groups.streams.streams_group_records import pairs_of, task_ids, tasks_of, topology_of
from penstock.groups.streams.streams_heartbeat import streams_group_heartbeat
from penstock.groups.streams.topology import (
    Endpoint,
    InternalTopic,
    StreamsStatus,
    StreamsStatusCode,
    Tasks,
    TaskSets,
    Topology,
)
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode

#: The value that Apache Kafka sends while it assigns no warm-up tasks.
_ACCEPTABLE_RECOVERY_LAG: Final = 0
#: Subtopologies, their topics, and the settings of these. The group decides about all of them at once.
_TOPOLOGY_ELEMENTS_MAX: Final = 5_000


async def handle(ctx: RequestContext, request: Any) -> Any:
    groups = ctx.services.groups
    try:
        check_protocol(ctx, "streams.version", "streams")
        if request.topology is not None:
            _check_size(request.topology)
        beat = _heartbeat_request(ctx, request)
        check_id_lengths(ctx, beat.member_id, beat.instance_id, beat.rack_id)
        if beat.member_epoch == JOIN_GROUP_MEMBER_EPOCH:
            if beat.topology is not None:
                _check_names(beat.topology)
            await groups.ensure_topic()
            groups.check_group_limit(beat.group_id)
        reply: StreamsHeartbeatReply = await groups.write(
            beat.group_id,
            lambda shard, token: streams_group_heartbeat(shard, beat, token, now_ms=groups.now_ms()),
        )
    except ApiError as error:
        reply = StreamsHeartbeatReply(error=error.code, message=error.message)
    if reply.topics_to_create:
        reply = dataclasses.replace(reply, statuses=tuple(_create_topics(ctx, reply)))
    return _response(reply)


def _check_size(topology: Any) -> None:
    """Raises ApiError."""
    elements = 0
    for part in topology.subtopologies:
        internal = (*part.state_changelog_topics, *part.repartition_source_topics)
        elements += 1 + len(part.source_topics) + len(part.repartition_sink_topics) + len(internal)
        elements += len(part.copartition_groups) + sum(len(topic.topic_configs) for topic in internal)
        if elements > _TOPOLOGY_ELEMENTS_MAX:
            message = (
                f"The topology has more than {_TOPOLOGY_ELEMENTS_MAX} subtopologies, topics and settings."
            )
            raise ApiError(ErrorCode.streams_invalid_topology, message)


def _check_names(topology: Topology) -> None:
    """Raises ApiError, with the messages of Apache Kafka."""
    names = set(topology.required_topics)
    names.update(sink for each in topology.subtopologies for sink in each.repartition_sink_topics)
    if internal := sorted(filter(is_internal, names)):
        message = (
            f"Use of Kafka internal topics {', '.join(internal)} in a Kafka Streams topology is prohibited."
        )
        raise ApiError(ErrorCode.streams_invalid_topology, message)
    if invalid := sorted(filter(topic_name_error, names)):
        message = f"Topic names {', '.join(invalid)} are not valid topic names."
        raise ApiError(ErrorCode.streams_invalid_topology, message)


def _create_topics(ctx: RequestContext, reply: StreamsHeartbeatReply) -> Iterable[StreamsStatus]:
    """Begin to create the internal topics, if the client may create them all."""
    refused: list[str] = []
    if not ctx.may(Operation.CREATE, ResourceType.CLUSTER):
        names = (topic.name for topic in reply.topics_to_create)
        refused = [name for name in names if not ctx.demand(Operation.CREATE, ResourceType.TOPIC, name)]
    if refused:
        return _statuses_with_refusal(reply, f"Unauthorized to CREATE on topics {', '.join(refused)}.")
    creation = ctx.services.auto_creation
    creation.begin_for(ctx, map(_new_topic, reply.topics_to_create))
    return _statuses_with_failures(reply, creation)


def _statuses_with_refusal(reply: StreamsHeartbeatReply, reason: str) -> Iterable[StreamsStatus]:
    for status in reply.statuses:
        if status.code is StreamsStatusCode.MISSING_INTERNAL_TOPICS:
            yield status._replace(detail=f"{status.detail}; {reason}")
        else:
            yield status


def _statuses_with_failures(
    reply: StreamsHeartbeatReply, creation: AutoTopicCreationManager
) -> Iterable[StreamsStatus]:
    """Adds why the creation of topics failed, because a member that waits for them cannot learn it otherwise."""
    failures = creation.failures(topic.name for topic in reply.topics_to_create)
    listed = ", ".join(f"{name} ({reason})" for name, reason in failures.items())
    for status in reply.statuses:
        if status.code is StreamsStatusCode.MISSING_INTERNAL_TOPICS and listed:
            yield status._replace(detail=f"{status.detail}; Creation failed: {listed}.")
        else:
            yield status


def _heartbeat_request(ctx: RequestContext, request: Any) -> StreamsHeartbeatRequest:
    config = ctx.services.groups.config(request.group_id)
    at = request.user_endpoint
    return StreamsHeartbeatRequest(
        group_id=request.group_id,
        member_id=request.member_id,
        member_epoch=request.member_epoch,
        endpoint_epoch=request.endpoint_information_epoch,
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        client_id=ctx.client_id or "",
        client_host=client_host(ctx),
        rebalance_timeout_ms=milliseconds(request.rebalance_timeout),
        topology=None if request.topology is None else topology_of(request.topology),
        owned=_owned(request),
        process_id=request.process_id,
        endpoint=None if at is None else Endpoint(at.host, at.port),
        tags=None if request.client_tags is None else pairs_of(request.client_tags),
        has_task_offsets=request.task_offsets is not None or request.task_end_offsets is not None,
        shutdown_application=request.shutdown_application,
        session_timeout_ms=config.streams_session_timeout_ms,
        heartbeat_interval_ms=config.streams_heartbeat_interval_ms,
        assignment_interval_ms=config.streams_assignment_interval_ms,
        initial_rebalance_delay_ms=config.streams_initial_rebalance_delay_ms,
        standby_replicas=config.streams_num_standby_replicas,
    )


def _owned(request: Any) -> TaskSets | None:
    """Raises ApiError."""
    parts = (request.active_tasks, request.standby_tasks, request.warmup_tasks)
    given = [part for part in parts if part is not None]
    if not given:
        return None
    if len(given) < len(parts):
        raise ApiError(ErrorCode.invalid_request, "If one task-type is non-null, all must be non-null.")
    return TaskSets(*map(tasks_of, parts))


def _new_topic(topic: InternalTopic) -> NewTopic:
    return NewTopic(
        name=topic.name,
        partitions=topic.partitions,
        replication_factor=topic.replication_factor or -1,
        configs=topic.configs,
    )


def _response(reply: StreamsHeartbeatReply) -> Any:
    assigned = reply.assigned
    return heartbeat_response(
        schema.StreamsGroupHeartbeatResponse,
        reply,
        acceptable_recovery_lag=_ACCEPTABLE_RECOVERY_LAG,
        task_offset_interval=NO_THROTTLE,
        status=tuple(
            schema.Status(status_code=status.code, status_detail=status.detail) for status in reply.statuses
        ),
        active_tasks=_tasks(None if assigned is None else assigned.active),
        standby_tasks=_tasks(None if assigned is None else assigned.standby),
        warmup_tasks=_tasks(None if assigned is None else assigned.warmup),
        endpoint_information_epoch=reply.endpoint_epoch,
        partitions_by_user_endpoint=None
        if reply.endpoints is None
        else tuple(_endpoint(each) for each in reply.endpoints),
    )


def _tasks(tasks: Tasks | None) -> tuple[Any, ...] | None:
    return None if tasks is None else task_ids(tasks, schema.TaskIds)


def _endpoint(each: EndpointPartitions) -> Any:
    return schema.EndpointToPartitions(
        user_endpoint=schema.Endpoint(host=each.endpoint.host, port=each.endpoint.port),
        active_partitions=_partitions(each.active),
        standby_partitions=_partitions(each.standby),
    )


def _partitions(by_topic: Mapping[str, tuple[int, ...]]) -> tuple[Any, ...]:
    return tuple(
        schema.TopicPartition(topic=name, partitions=partitions) for name, partitions in by_topic.items()
    )
