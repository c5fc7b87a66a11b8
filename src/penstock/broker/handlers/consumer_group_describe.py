"""ConsumerGroupDescribe (key 69), v0-1. From v1 on it is said of a member whether it speaks the classic protocol.

Topics that are gone are left out of assignments. A group of another kind is GROUP_ID_NOT_FOUND.
"""

from __future__ import annotations

from typing import Any

from kio.schema.consumer_group_describe.v1.response import (
    Assignment,
    ConsumerGroupDescribeResponse,
    DescribedGroup,
    Member,
    TopicPartitions,
)

from penstock.broker.context import RequestContext
from penstock.broker.group_descriptions import by_topic_name, describe_groups
from penstock.broker.group_requests import NO_THROTTLE
from penstock.groups.consumer.group import described
from penstock.groups.consumer.messages import DescribedConsumer
from penstock.groups.topics import Topics


async def handle(ctx: RequestContext, request: Any) -> Any:
    groups = await describe_groups(ctx, request, DescribedGroup, described, _member)
    return ConsumerGroupDescribeResponse(throttle_time=NO_THROTTLE, groups=groups)


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
        assignment=Assignment(topic_partitions=by_topic_name(member.assigned, topics, TopicPartitions)),
        target_assignment=Assignment(topic_partitions=by_topic_name(member.target, topics, TopicPartitions)),
        member_type=0 if member.is_classic else 1,
    )
