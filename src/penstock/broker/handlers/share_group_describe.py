"""ShareGroupDescribe (key 77), v1. Topics that are gone are left out; a group of another kind is not found."""

from __future__ import annotations

from typing import Any

from kio.schema.share_group_describe.v1.response import (
    Assignment,
    DescribedGroup,
    Member,
    ShareGroupDescribeResponse,
    TopicPartitions,
)

from penstock.broker.context import RequestContext
from penstock.broker.group_descriptions import by_topic_name, describe_groups
from penstock.broker.group_requests import NO_THROTTLE
from penstock.groups.share.group import described
from penstock.groups.share.messages import DescribedShareMember
from penstock.groups.topics import Topics


async def handle(ctx: RequestContext, request: Any) -> Any:
    groups = await describe_groups(ctx, request, DescribedGroup, described, _member)
    return ShareGroupDescribeResponse(throttle_time=NO_THROTTLE, groups=groups)


def _member(member: DescribedShareMember, topics: Topics) -> Any:
    return Member(
        member_id=member.member_id,
        rack_id=member.rack_id,
        member_epoch=member.member_epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=member.topic_names,
        assignment=Assignment(topic_partitions=by_topic_name(member.assigned, topics, TopicPartitions)),
    )
