"""ConsumerGroupDescribe (key 69), v0-1. From v1 on each member says whether it uses the classic protocol.

Assignments omit deleted topics. A group of another type is GROUP_ID_NOT_FOUND.
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

from penstock.broker.coordinators.requests import NO_THROTTLE, assigned_topics, describe_subscribed_groups
from penstock.broker.network.requests import RequestContext
from penstock.groups.consumer.consumer_group import describe_consumer_group
from penstock.groups.consumer.membership import DescribedConsumerMember
from penstock.groups.topics import Topics


async def handle(ctx: RequestContext, request: Any) -> Any:
    groups = await describe_subscribed_groups(ctx, request, DescribedGroup, describe_consumer_group, _member)
    return ConsumerGroupDescribeResponse(throttle_time=NO_THROTTLE, groups=groups)


def _member(member: DescribedConsumerMember, topics: Topics) -> Any:
    return Member(
        member_id=member.member_id,
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        member_epoch=member.member_epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=member.topic_names,
        subscribed_topic_regex=member.topic_regex,
        assignment=Assignment(topic_partitions=assigned_topics(member.assigned, topics, TopicPartitions)),
        target_assignment=Assignment(
            topic_partitions=assigned_topics(member.target, topics, TopicPartitions)
        ),
        member_type=0 if member.is_classic else 1,
    )
