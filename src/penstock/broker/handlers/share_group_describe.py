"""ShareGroupDescribe (key 77), v1. Deleted topics are omitted; a group of another type is GROUP_ID_NOT_FOUND."""

from __future__ import annotations

from typing import Any

from kio.schema.share_group_describe.v1.response import (
    Assignment,
    DescribedGroup,
    Member,
    ShareGroupDescribeResponse,
    TopicPartitions,
)

from penstock.broker.coordinators.requests import NO_THROTTLE, assigned_topics, describe_subscribed_groups
from penstock.broker.network.requests import RequestContext
from penstock.groups.share.share_group import DescribedShareMember, describe_share_group
from penstock.groups.topics import Topics


async def handle(ctx: RequestContext, request: Any) -> Any:
    groups = await describe_subscribed_groups(ctx, request, DescribedGroup, describe_share_group, _member)
    return ShareGroupDescribeResponse(throttle_time=NO_THROTTLE, groups=groups)


def _member(member: DescribedShareMember, topics: Topics) -> Any:
    return Member(
        member_id=member.member_id,
        rack_id=member.rack_id,
        member_epoch=member.member_epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=member.topic_names,
        assignment=Assignment(topic_partitions=assigned_topics(member.assigned, topics, TopicPartitions)),
    )
