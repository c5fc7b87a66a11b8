"""ShareGroupDescribe (key 77), v1. Topics that are gone are left out; a group of another kind is not found."""

from __future__ import annotations

import asyncio
from typing import Any

from kio.schema.share_group_describe.v1.response import (
    Assignment,
    DescribedGroup,
    Member,
    ShareGroupDescribeResponse,
    TopicPartitions,
)

from penstock.broker.context import RequestContext
from penstock.broker.group_requests import GROUP_OPERATIONS, NO_THROTTLE, OPERATIONS_NOT_ASKED
from penstock.groups.share.group import described
from penstock.groups.share.messages import DescribedShareMember
from penstock.groups.topics import Topics
from penstock.protocol.errors import ApiError, ErrorCode


async def handle(ctx: RequestContext, request: Any) -> Any:
    operations = GROUP_OPERATIONS if request.include_authorized_operations else OPERATIONS_NOT_ASKED
    groups = await asyncio.gather(*(_describe(ctx, group_id, operations) for group_id in request.group_ids))
    return ShareGroupDescribeResponse(throttle_time=NO_THROTTLE, groups=tuple(groups))


async def _describe(ctx: RequestContext, group_id: str, operations: int) -> Any:
    groups = ctx.node.groups
    try:
        if not group_id:
            raise ApiError(ErrorCode.invalid_group_id)
        found = await groups.read(group_id, lambda shard: described(shard, group_id))
    except ApiError as error:
        return _nothing(group_id, error)
    return DescribedGroup(
        error_code=ErrorCode.none,
        error_message=None,
        group_id=group_id,
        group_state=found.state,
        group_epoch=found.epoch,
        assignment_epoch=found.target_epoch,
        assignor_name=found.assignor,
        members=tuple(_member(member, groups.topics) for member in found.members),
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


def _member(member: DescribedShareMember, topics: Topics) -> Any:
    return Member(
        member_id=member.member_id,
        rack_id=member.rack_id,
        member_epoch=member.member_epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=member.topic_names,
        assignment=Assignment(
            topic_partitions=tuple(
                TopicPartitions(
                    topic_id=topic.id, topic_name=topic.name, partitions=tuple(sorted(partitions))
                )
                for topic_id, partitions in member.assigned.items()
                if (topic := topics.by_id(topic_id)) is not None
            )
        ),
    )
