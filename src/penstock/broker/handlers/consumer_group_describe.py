"""ConsumerGroupDescribe (key 69), v0-1. From v1 on it is said of a member whether it speaks the classic protocol.

Topics that are gone are left out of assignments. A group of another kind is GROUP_ID_NOT_FOUND.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kio.schema.consumer_group_describe.v1.response import (
    Assignment,
    ConsumerGroupDescribeResponse,
    DescribedGroup,
    Member,
    TopicPartitions,
)

from penstock.broker.context import RequestContext
from penstock.broker.group_requests import GROUP_OPERATIONS, NO_THROTTLE, OPERATIONS_NOT_ASKED
from penstock.groups.consumer.group import described
from penstock.groups.consumer.messages import DescribedConsumer
from penstock.groups.consumer.values import Assignment as Partitions
from penstock.groups.topics import Topics
from penstock.protocol.errors import ApiError, ErrorCode


async def handle(ctx: RequestContext, request: Any) -> Any:
    operations = GROUP_OPERATIONS if request.include_authorized_operations else OPERATIONS_NOT_ASKED
    groups = await asyncio.gather(*(_describe(ctx, group_id, operations) for group_id in request.group_ids))
    return ConsumerGroupDescribeResponse(throttle_time=NO_THROTTLE, groups=tuple(groups))


async def _describe(ctx: RequestContext, group_id: str, operations: int) -> Any:
    try:
        if not group_id:
            raise ApiError(ErrorCode.invalid_group_id)
        found = await ctx.node.groups.read(group_id, lambda shard: described(shard, group_id))
        if found is None:
            raise ApiError(ErrorCode.group_id_not_found, f"Group {group_id} is not a consumer group.")
    except ApiError as error:
        return _nothing(group_id, error)
    return DescribedGroup(
        error_code=ErrorCode.none,
        group_id=group_id,
        group_state=found.state,
        group_epoch=found.epoch,
        assignment_epoch=found.target_epoch,
        assignor_name=found.assignor,
        members=tuple(_member(member, ctx.node.groups.topics) for member in found.members),
        authorized_operations=operations,
    )


def _nothing(group_id: str, error: ApiError) -> Any:
    return DescribedGroup(
        error_code=error.code,
        error_message=error.message,
        group_id=group_id,
        group_state="",
        group_epoch=0,
        assignment_epoch=0,
        assignor_name="",
        members=(),
    )


def _member(member: DescribedConsumer, topics: Topics) -> Any:
    return Member(
        member_id=member.member_id,
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        member_epoch=member.member_epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=member.topic_names,
        subscribed_topic_regex=member.topic_regex,
        assignment=_assignment(member.assigned, topics),
        target_assignment=_assignment(member.target, topics),
        member_type=0 if member.is_classic else 1,
    )


def _assignment(assigned: Partitions, topics: Topics) -> Any:
    return Assignment(
        topic_partitions=tuple(
            TopicPartitions(topic_id=topic.id, topic_name=topic.name, partitions=tuple(sorted(partitions)))
            for topic_id, partitions in assigned.items()
            if (topic := topics.by_id(topic_id)) is not None
        )
    )
