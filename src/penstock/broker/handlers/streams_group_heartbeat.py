"""StreamsGroupHeartbeat (key 88), v0. Joins (epoch 0), beats, and leaves (-1).

Internal topics that the group's topology needs are created in the background; until they exist the reply says
MISSING_INTERNAL_TOPICS, and why they could not be created. At level 0 of `streams.version` there is no such protocol:
UNSUPPORTED_VERSION.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Final

from kio.schema.streams_group_heartbeat.v0 import response as schema

from penstock.broker.context import RequestContext
from penstock.broker.group_requests import NO_THROTTLE, check_ids, client_host, milliseconds
from penstock.broker.group_settings import effective_group_settings
from penstock.broker.topic_creation import AutoCreation
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.names import is_internal, topic_name_flaw
from penstock.groups.consumer.values import JOINING
from penstock.groups.streams.heartbeat import heartbeat
from penstock.groups.streams.messages import EndpointPartitions, StreamsHeartbeat, StreamsHeartbeatReply
from penstock.groups.streams.records import pairs_of, task_ids, tasks_of, topology_of
from penstock.groups.streams.topology import Status, StatusCode
from penstock.groups.streams.values import Endpoint, InternalTopic, Tasks, TaskSets, Topology
from penstock.protocol.errors import ApiError, ErrorCode

FEATURE: Final = "streams.version"
#: As Kafka says while it assigns no warm-up tasks.
_ACCEPTABLE_RECOVERY_LAG: Final = 0


async def handle(ctx: RequestContext, request: Any) -> Any:
    groups = ctx.node.groups
    try:
        if not ctx.node.image.features.get(FEATURE):
            raise ApiError(ErrorCode.unsupported_version, "The streams protocol is not enabled.")
        beat = _beat(ctx, request)
        check_ids(ctx, beat.member_id, beat.instance_id, beat.rack_id)
        if beat.member_epoch == JOINING:
            if beat.topology is not None:
                _check_names(beat.topology)
            await groups.ensure_topic()
            groups.check_room(beat.group_id)
        reply: StreamsHeartbeatReply = await groups.write(
            beat.group_id, lambda shard, token: heartbeat(shard, beat, token, now_ms=groups.now_ms())
        )
    except ApiError as error:
        reply = StreamsHeartbeatReply(error=error.code, message=error.message)
    if reply.topics_to_create:
        creation = ctx.node.auto_creation
        creation.begin(map(_new_topic, reply.topics_to_create))
        reply = dataclasses.replace(reply, statuses=tuple(_explained(reply, creation)))
    return _response(reply)


def _check_names(topology: Topology) -> None:
    """Raises ApiError, with Kafka's words."""
    names = set(topology.required_topics)
    names.update(sink for each in topology.subtopologies for sink in each.repartition_sink_topics)
    if internal := sorted(filter(is_internal, names)):
        message = (
            f"Use of Kafka internal topics {', '.join(internal)} in a Kafka Streams topology is prohibited."
        )
        raise ApiError(ErrorCode.streams_invalid_topology, message)
    if invalid := sorted(filter(topic_name_flaw, names)):
        message = f"Topic names {', '.join(invalid)} are not valid topic names."
        raise ApiError(ErrorCode.streams_invalid_topology, message)


def _explained(reply: StreamsHeartbeatReply, creation: AutoCreation) -> Iterable[Status]:
    """A member cannot know otherwise why it waits for topics that are never there."""
    failures = creation.failures(topic.name for topic in reply.topics_to_create)
    listed = ", ".join(f"{name} ({reason})" for name, reason in failures.items())
    for status in reply.statuses:
        if status.code is StatusCode.MISSING_INTERNAL_TOPICS and listed:
            yield status._replace(detail=f"{status.detail}; Creation failed: {listed}.")
        else:
            yield status


def _beat(ctx: RequestContext, request: Any) -> StreamsHeartbeat:
    config = effective_group_settings(ctx.node, request.group_id)
    at = request.user_endpoint
    return StreamsHeartbeat(
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
    return schema.StreamsGroupHeartbeatResponse(
        throttle_time=NO_THROTTLE,
        error_code=reply.error,
        error_message=reply.message,
        member_id=reply.member_id,
        member_epoch=reply.member_epoch,
        heartbeat_interval=timedelta(milliseconds=reply.heartbeat_interval_ms),
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
