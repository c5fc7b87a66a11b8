"""StreamsGroupDescribe (key 89), v0. A group of another type is GROUP_ID_NOT_FOUND."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from kio.schema.streams_group_describe.v0 import response as schema

from penstock.broker.coordinators.requests import (
    GROUP_AUTHORIZED_OPERATIONS,
    NO_THROTTLE,
    OPERATIONS_NOT_REQUESTED,
)
from penstock.broker.network.requests import RequestContext
from penstock.groups.streams.streams_group import DescribedStreamsGroup, describe_streams_group
from penstock.groups.streams.streams_group_records import task_ids
from penstock.groups.streams.topology import NO_TASK_SETS, InternalTopic, StreamsGroupMember, TaskSets
from penstock.protocol.errors import ApiError, ErrorCode


async def handle(ctx: RequestContext, request: Any) -> Any:
    operations = (
        GROUP_AUTHORIZED_OPERATIONS if request.include_authorized_operations else OPERATIONS_NOT_REQUESTED
    )
    groups = await asyncio.gather(
        *(_describe(ctx, group_id, operations) for group_id in dict.fromkeys(request.group_ids))
    )
    return schema.StreamsGroupDescribeResponse(throttle_time=NO_THROTTLE, groups=tuple(groups))


async def _describe(ctx: RequestContext, group_id: str, operations: int) -> Any:
    try:
        if not group_id:
            raise ApiError(ErrorCode.invalid_group_id)
        found = await ctx.services.groups.read(
            group_id, lambda shard: describe_streams_group(shard, group_id)
        )
    except ApiError as error:
        return schema.DescribedGroup(
            error_code=error.code,
            error_message=error.message,
            group_id=group_id,
            group_state="",
            group_epoch=0,
            assignment_epoch=0,
            topology=None,
            members=(),
        )
    return schema.DescribedGroup(
        error_code=ErrorCode.none,
        error_message=None,
        group_id=group_id,
        group_state=found.state,
        group_epoch=found.epoch,
        assignment_epoch=found.target_epoch,
        topology=_topology(found),
        members=tuple(_member(member, found) for member in found.members),
        authorized_operations=operations,
    )


def _topology(group: DescribedStreamsGroup) -> Any:
    if group.topology is None:
        return None
    info = partial(_topic_info, group)
    return schema.Topology(
        epoch=group.topology.epoch,
        subtopologies=tuple(
            schema.Subtopology(
                subtopology_id=each.subtopology_id,
                source_topics=each.source_topics,
                repartition_sink_topics=each.repartition_sink_topics,
                state_changelog_topics=tuple(map(info, each.changelog_topics)),
                repartition_source_topics=tuple(map(info, each.repartition_source_topics)),
            )
            for each in group.topology.subtopologies
        ),
    )


def _topic_info(group: DescribedStreamsGroup, topic: InternalTopic) -> Any:
    topic = group.internal_topics.get(topic.name, topic)
    return schema.TopicInfo(
        name=topic.name,
        partitions=topic.partitions,
        replication_factor=topic.replication_factor,
        topic_configs=tuple(schema.KeyValue(key=key, value=value) for key, value in topic.configs),
    )


def _member(member: StreamsGroupMember, group: DescribedStreamsGroup) -> Any:
    metadata, at = member.metadata, member.metadata.endpoint
    return schema.Member(
        member_id=member.member_id,
        member_epoch=member.current.epoch,
        instance_id=None,
        rack_id=metadata.rack_id,
        client_id=metadata.client_id,
        client_host=metadata.client_host,
        topology_epoch=metadata.topology_epoch,
        process_id=metadata.process_id,
        user_endpoint=None if at is None else schema.Endpoint(host=at.host, port=at.port),
        client_tags=tuple(schema.KeyValue(key=key, value=value) for key, value in metadata.tags),
        task_offsets=(),
        task_end_offsets=(),
        assignment=_assignment(member.current.assigned),
        target_assignment=_assignment(group.targets.get(member.member_id, NO_TASK_SETS)),
        is_classic=False,
    )


def _assignment(tasks: TaskSets) -> Any:
    return schema.Assignment(
        active_tasks=task_ids(tasks.active, schema.TaskIds),
        standby_tasks=task_ids(tasks.standby, schema.TaskIds),
        warmup_tasks=task_ids(tasks.warmup, schema.TaskIds),
    )
