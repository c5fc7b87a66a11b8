"""ShareFetch (key 78), v1-2. Processes acknowledgements, then returns records to a share group member.

Encoded by hand. The reply waits until the acknowledgements are stored and there are records, or max_wait is over.
Epoch 0 opens a session and carries no acknowledgements; epoch -1 closes it and releases the member's records.
Renewals (v2) come without a fetch. The group coordinator checks membership; as in Apache Kafka this handler does not.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.broker.coordinators.share.fetch import AcquiredRecords, DelayedShareFetch, ReadWouldBlock
from penstock.broker.coordinators.share.partitions import (
    Acknowledgements,
    AcknowledgeResult,
    wait_until_stored,
)
from penstock.broker.coordinators.share.sessions import (
    FINAL_EPOCH,
    INITIAL_EPOCH,
    RawTopicIdPartition,
    ShareSession,
    check_group_and_member,
)
from penstock.broker.network.connection import Connection, PendingReply, Reply
from penstock.broker.network.requests import RequestContext, send_later
from penstock.broker.network.topic_access import check_group_access, may_use_topic
from penstock.broker.partition.client_view import LeaderHints
from penstock.protocol.acls import Operation
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.share import (
    ShareFetchRequest,
    SharePartitionData,
    encode_share_fetch_response,
    parse_share_fetch_request,
    parse_share_fetch_request_in_steps,
)
from penstock.protocol.steps import Steps, finish
from penstock.security.quotas import CONSUMER_BYTE_RATE

if TYPE_CHECKING:
    from penstock.broker.network.quotas import ClientQuotaManager


#: A larger request is read in slices.
_READ_AT_ONCE_BYTES: Final = 8 * 1024
#: A session of more partitions is served in slices.
_PARTITIONS_AT_ONCE: Final = 250


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | PendingReply:
    if len(frame) > _READ_AT_ONCE_BYTES:
        # A copy, because the buffer is used again before the last step.
        frame = memoryview(bytes(frame))
        return send_later(ctx, connection, _serve_large(ctx, frame, position, correlation_id))
    request = parse_share_fetch_request(frame, position, ctx.version)
    try:
        session = _open_session(ctx, request)
    except ApiError as error:
        refusal = _refusal(ctx, correlation_id, error)
        if error.code is ErrorCode.share_session_limit_reached:
            return send_later(ctx, connection, _delayed(request, refusal))
        return refusal
    reply = _ShareFetchReply(ctx, request, correlation_id, session)
    finish(reply.acknowledge())
    reply.begin()
    return reply.reply() if reply.is_ready else send_later(ctx, connection, reply.reply_later())


async def _serve_large(ctx: RequestContext, frame: memoryview, position: int, correlation_id: int) -> Reply:
    services = ctx.services
    buffers, size = services.server.buffers, len(frame)
    elements_max = services.settings.integer("penstock.request.elements.max")
    parsing = parse_share_fetch_request_in_steps(frame, position, ctx.version, elements_max)
    buffers.hold(size)
    try:
        request = await ctx.finish_in_slices(parsing)
    finally:
        buffers.release(size)
    try:
        session = _open_session(ctx, request)
    except ApiError as error:
        refusal = _refusal(ctx, correlation_id, error)
        if error.code is ErrorCode.share_session_limit_reached:
            return await _delayed(request, refusal)
        return refusal
    reply = _ShareFetchReply(ctx, request, correlation_id, session)
    await ctx.finish_in_slices(reply.acknowledge())
    reply.begin()
    return await reply.reply_later()


def _open_session(ctx: RequestContext, request: ShareFetchRequest) -> ShareSession:
    """Return the session of the request. Raises ApiError."""
    check_group_access(ctx, request.group)
    group, member = check_group_and_member(
        request.group,
        request.member,
        group_bytes_max=ctx.services.settings.integer("penstock.id.max.bytes"),
    )
    _check_renewal(request)
    return ctx.services.share.sessions.fetch(request, group, member, ctx.connection)


def _refusal(ctx: RequestContext, correlation_id: int, error: ApiError) -> Reply:
    ctx.services.metrics.count_error("share_fetch", error.code.name)
    return finish(encode_share_fetch_response(correlation_id, error=error.code.value, message=error.message))


async def _delayed(request: ShareFetchRequest, refusal: Reply) -> Reply:
    """Delay a reply, because the client would retry at once."""
    return await asyncio.sleep(request.max_wait_ms / 1000, refusal)


def _check_renewal(request: ShareFetchRequest) -> None:
    asks = request.max_bytes or request.min_bytes or request.max_records or request.max_wait_ms
    if request.is_renewal and asks:
        raise ApiError(ErrorCode.invalid_request, "renewals come without a fetch")


class _Quota:
    """Counts what one request fetches towards consumer_byte_rate and the limit of the tenant."""

    def __init__(self, quotas: ClientQuotaManager, connection: Connection, client_id: str | None) -> None:
        self._quotas = quotas
        self._connection = connection
        self._client_id = client_id
        self.throttle_ms = 0

    def must_wait(self) -> bool:
        """Whether this is the connection's first fetch, and it has to wait for its turn."""
        self.throttle_ms = self._quotas.fetch_turn_ms(self._connection, self._client_id)
        return self.throttle_ms > 0

    def bytes_max(self) -> int:
        return self._quotas.fetch_bytes_max(self._connection, self._client_id)

    def used(self, size: int) -> None:
        self.throttle_ms = self._quotas.throttle(CONSUMER_BYTE_RATE, self._connection, self._client_id, size)


class _ShareFetchReply:
    """`acknowledge` comes first, then `begin`, which does everything that can be done at once."""

    def __init__(
        self, ctx: RequestContext, request: ShareFetchRequest, correlation_id: int, session: ShareSession
    ) -> None:
        self._ctx = ctx
        self._request = request
        self._correlation_id = correlation_id
        self._session = session
        self._acknowledgements = Acknowledgements(
            ctx.services.share,
            session.group,
            session.member,
            may_renew=request.is_renewal,
            may_read=partial(may_use_topic, ctx, Operation.READ),
        )
        self._fetching: DelayedShareFetch | None = None
        self._quota: _Quota | None = None
        self._released: list[asyncio.Future[None]] = []
        self._is_fetched = True

    def acknowledge(self) -> Steps[None]:
        return self._acknowledgements.apply(self._request.topics)

    def begin(self) -> None:
        ctx, session, shares = self._ctx, self._session, self._ctx.services.share
        if self._request.session_epoch == FINAL_EPOCH:
            self._released = shares.close_session(session)
        elif not self._request.is_renewal and session.partitions:
            may_read = None if ctx.authorizer is None else partial(may_use_topic, ctx, Operation.READ)
            quota = None
            if ctx.services.quotas.limits_fetch and ctx.connection is not None:
                quota = self._quota = _Quota(ctx.services.quotas, ctx.connection, ctx.client_id)
                if quota.must_wait():
                    return
            self._fetching = DelayedShareFetch(
                shares, session, self._request, may_read, ctx.finish_in_slices, quota
            )
            self._is_fetched = not self._has_many and self._try(self._fetching)

    @staticmethod
    def _try(fetching: DelayedShareFetch) -> bool:
        try:
            return finish(fetching.collect())
        except ReadWouldBlock:
            return False

    @property
    def _has_many(self) -> bool:
        return len(self._session.partitions) > _PARTITIONS_AT_ONCE

    @property
    def is_ready(self) -> bool:
        is_waiting = self._released or self._acknowledgements.is_waiting
        return self._is_fetched and not is_waiting and not self._has_many

    async def reply_later(self) -> Reply:
        if self._fetching is not None and not self._is_fetched:
            await self._fetching.run()
        await self._acknowledgements.stored()
        await wait_until_stored(self._released)
        return await self._ctx.finish_in_slices(self._reply())

    def reply(self) -> Reply:
        return finish(self._reply())

    def _reply(self) -> Steps[Reply]:
        services, session = self._ctx.services, self._session
        portions = {} if self._fetching is None else self._fetching.checked()
        partitions: dict[RawTopicIdPartition, None] = dict.fromkeys(
            (*self._acknowledgements.outcomes, *portions)
        )
        if self._request.session_epoch == INITIAL_EPOCH:
            partitions |= session.partitions
        hints = LeaderHints(services.metadata, services.partitions, self._ctx.listener, by_id=True)
        topics: dict[bytes, list[SharePartitionData]] = {}
        for partition in partitions:
            row = _fetched_partition(
                partition, self._acknowledgements.outcomes.get(partition), portions.get(partition), hints
            )
            topics.setdefault(partition[0], []).append(row)
            yield
        return (
            yield from encode_share_fetch_response(
                self._correlation_id,
                lock_ms=services.groups.config(session.group).share_record_lock_duration_ms,
                topics=topics.items(),
                endpoints=tuple(hints.endpoints.values()),
                throttle_ms=0 if self._quota is None else self._quota.throttle_ms,
            )
        )


def _fetched_partition(
    partition: RawTopicIdPartition,
    outcome: AcknowledgeResult | None,
    portion: AcquiredRecords | None,
    hints: LeaderHints,
) -> SharePartitionData:
    acknowledged = outcome or AcknowledgeResult()
    error = None if portion is None else portion.error
    code = ErrorCode.none if error is None else error.code
    leader = hints.leader(*partition, code) or hints.leader(*partition, acknowledged.error)
    return SharePartitionData(
        partition[1],
        code.value,
        None if error is None else error.message,
        acknowledged.error.value,
        acknowledged.message,
        leader,
        () if portion is None else portion.records,
        () if portion is None else portion.acquired,
    )
