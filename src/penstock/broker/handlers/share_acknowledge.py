"""ShareAcknowledge (key 79), v1-2. Acknowledgements of a share group member, without a fetch.

Encoded by hand. The reply waits until the acknowledgements are stored. The request never opens a session (epoch 0 is
refused); epoch -1 closes it.
"""

from __future__ import annotations

import asyncio

from penstock.broker.coordinators.share.partitions import Acknowledgements, wait_until_stored
from penstock.broker.coordinators.share.sessions import FINAL_EPOCH, check_group_and_member
from penstock.broker.network.connection import Connection, PendingReply, Reply
from penstock.broker.network.requests import RequestContext
from penstock.broker.partition.client_view import LeaderHints
from penstock.protocol.errors import ApiError
from penstock.protocol.share import (
    AcknowledgedPartition,
    ShareAcknowledgeRequest,
    encode_share_acknowledge_response,
    parse_share_acknowledge_request,
)


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | PendingReply:
    request = parse_share_acknowledge_request(frame, position, ctx.version)
    shares = ctx.services.share
    try:
        group, member = check_group_and_member(
            request.group,
            request.member,
            group_bytes_max=ctx.services.settings.integer("penstock.id.max.bytes"),
        )
        session = shares.sessions.acknowledge(group, member, request.session_epoch)
    except ApiError as error:
        ctx.services.metrics.count_error("share_acknowledge", error.code.name)
        return encode_share_acknowledge_response(
            ctx.version, correlation_id, error=error.code.value, message=error.message
        )
    said = Acknowledgements(shares, group, member, request.topics, may_renew=request.is_renewal)
    released = shares.close_session(session) if request.session_epoch == FINAL_EPOCH else []
    if not said.is_waiting and not released:
        return _reply(ctx, request, correlation_id, said)
    slot = connection.defer(ctx.api_key)
    ctx.services.spawn(_reply_later(ctx, connection, slot, request, correlation_id, said, released))
    return slot


async def _reply_later(
    ctx: RequestContext,
    connection: Connection,
    slot: PendingReply,
    request: ShareAcknowledgeRequest,
    correlation_id: int,
    said: Acknowledgements,
    released: list[asyncio.Future[None]],
) -> None:
    try:
        await said.stored()
        await wait_until_stored(released)
        connection.fulfil(slot, _reply(ctx, request, correlation_id, said))
    except Exception:
        ctx.services.server.failed(connection)


def _reply(
    ctx: RequestContext, request: ShareAcknowledgeRequest, correlation_id: int, said: Acknowledgements
) -> bytes:
    assert request.group is not None
    hints = LeaderHints(ctx.services.metadata, ctx.services.partitions, ctx.listener, by_id=True)
    topics: dict[bytes, list[AcknowledgedPartition]] = {}
    for (topic_id, index), (error, message) in said.outcomes.items():
        leader = hints.leader(topic_id, index, error)
        row = AcknowledgedPartition(index, error.value, message, leader)
        topics.setdefault(topic_id, []).append(row)
    return encode_share_acknowledge_response(
        ctx.version,
        correlation_id,
        lock_ms=ctx.services.groups.config(request.group).share_record_lock_duration_ms,
        topics=topics.items(),
        endpoints=tuple(hints.endpoints.values()),
    )
