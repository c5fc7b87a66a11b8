"""StreamsGroupDescribe (key 89), v0. A group of another type is GROUP_ID_NOT_FOUND."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from kio.schema.streams_group_describe.v0 import response as schema

from penstock.broker.coordinators.requests import NO_THROTTLE, describe_groups
from penstock.broker.network.requests import RequestContext
from penstock.groups.streams.streams_group import DescribedStreamsGroup, describe_streams_group
from penstock.groups.streams.streams_group_records import task_ids
from penstock.groups.streams.topology import NO_TASK_SETS, InternalTopic, StreamsGroupMember, TaskSets


async def handle(ctx: RequestContext, request: Any) -> Any:
    asked = dataclasses.replace(request, group_ids=tuple(dict.fromkeys(request.group_ids)))
    groups = await describe_groups(ctx, asked, schema.DescribedGroup, describe_streams_group, _details)
    return schema.StreamsGroupDescribeResponse(throttle_time=NO_THROTTLE, groups=groups)


def _details(found: DescribedStreamsGroup | None) -> dict[str, Any]:
    if found is None:
        return {"topology": None, "members": ()}
    return {
        "topology": _topology(found),
        "members": tuple(_member(member, found) for member in found.members),
    }


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
