"""ConsumerGroupHeartbeat (key 68), v0-1. Join (epoch 0), heartbeat, leave (-1), temporary leave (-2, static members).

Before v1 a member may join without an id, and the broker assigns one. While the cluster is at level 0 of
`group.version` the protocol does not exist: UNSUPPORTED_VERSION.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final
from uuid import uuid4

from kio.schema.consumer_group_heartbeat.v1.response import (
    Assignment,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)

from penstock.broker.coordinators.requests import (
    check_id_lengths,
    check_protocol,
    client_host,
    heartbeat_response,
    milliseconds,
)
from penstock.broker.network.requests import RequestContext
from penstock.groups.consumer.consumer_heartbeat import consumer_group_heartbeat
from penstock.groups.consumer.membership import ConsumerHeartbeatReply, ConsumerHeartbeatRequest
from penstock.groups.modern_group import JOIN_GROUP_MEMBER_EPOCH
from penstock.groups.modern_group import Assignment as Partitions
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError

_OWN_MEMBER_ID_FROM: Final = 1


async def handle(ctx: RequestContext, request: Any) -> Any:
    groups = ctx.services.groups
    may_describe = partial(ctx.may, Operation.DESCRIBE, ResourceType.TOPIC)
    try:
        check_protocol(ctx, "group.version", "consumer")
        beat = _heartbeat_request(ctx, request)
        check_id_lengths(ctx, beat.member_id, beat.instance_id, beat.rack_id)
        if beat.member_epoch == JOIN_GROUP_MEMBER_EPOCH:
            await groups.ensure_topic()
            groups.check_group_limit(beat.group_id)
        reply = await groups.write(
            beat.group_id,
            lambda shard, token: shard.for_client(
                may_describe, lambda: consumer_group_heartbeat(shard, beat, token, now_ms=groups.now_ms())
            ),
        )
    except ApiError as error:
        reply = ConsumerHeartbeatReply(error=error.code, message=error.message)
    return _response(reply)


def _heartbeat_request(ctx: RequestContext, request: Any) -> ConsumerHeartbeatRequest:
    config = ctx.services.groups.config(request.group_id)
    member_id = request.member_id
    if (
        not member_id
        and request.member_epoch == JOIN_GROUP_MEMBER_EPOCH
        and ctx.version < _OWN_MEMBER_ID_FROM
    ):
        member_id = str(uuid4())
    return ConsumerHeartbeatRequest(
        group_id=request.group_id,
        member_id=member_id,
        member_epoch=request.member_epoch,
        instance_id=request.instance_id,
        rack_id=request.rack_id,
        client_id=ctx.client_id or "",
        client_host=client_host(ctx),
        rebalance_timeout_ms=milliseconds(request.rebalance_timeout),
        topic_names=request.subscribed_topic_names,
        topic_regex=request.subscribed_topic_regex,
        assignor=request.server_assignor,
        owned=None if request.topic_partitions is None else _owned(request.topic_partitions),
        session_timeout_ms=config.consumer_session_timeout_ms,
        heartbeat_interval_ms=config.consumer_heartbeat_interval_ms,
        assignment_interval_ms=config.consumer_assignment_interval_ms,
    )


def _owned(topics: Iterable[Any]) -> Partitions:
    return {
        topic.topic_id: frozenset(topic.partitions)
        for topic in topics
        if topic.topic_id is not None and topic.partitions
    }


def _response(reply: ConsumerHeartbeatReply) -> Any:
    return heartbeat_response(
        ConsumerGroupHeartbeatResponse,
        reply,
        assignment=None
        if reply.assigned is None
        else Assignment(topic_partitions=_partitions(reply.assigned)),
    )


def _partitions(assigned: Partitions) -> tuple[Any, ...]:
    return tuple(
        TopicPartitions(topic_id=topic_id, partitions=tuple(sorted(partitions)))
        for topic_id, partitions in assigned.items()
    )
