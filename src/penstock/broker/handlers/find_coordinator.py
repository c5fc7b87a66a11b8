"""FindCoordinator (key 10), v0-6. One key before v4, many from then on, each with its own answer.

The coordinator of a group is the leader of its partition of `__consumer_offsets`, at the listener that was asked.
The topic is made when the first group is looked for. Transactions and share groups have no coordinator here:
they are refused with errors that clients take as final.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final, NamedTuple

from kio.schema.find_coordinator.v3.response import FindCoordinatorResponse as SingleResponse
from kio.schema.find_coordinator.v6.response import Coordinator, FindCoordinatorResponse

from penstock.broker.context import RequestContext
from penstock.broker.coordinator import OFFSETS_TOPIC
from penstock.broker.group_requests import NO_THROTTLE
from penstock.protocol.errors import ApiError, ErrorCode

_GROUP: Final = 0
_TRANSACTION: Final = 1
_MANY_KEYS_FROM: Final = 4


class _Found(NamedTuple):
    error: ErrorCode
    message: str | None = None
    node_id: int = -1
    host: str = ""
    port: int = -1


def handle(ctx: RequestContext, request: Any) -> Any | Awaitable[Any]:
    # Version 0 knows of groups only.
    key_type = getattr(request, "key_type", _GROUP)
    if key_type == _GROUP and not ctx.node.groups.has_topic:
        return _handle_first(ctx, request)
    return _respond(ctx, request, key_type)


async def _handle_first(ctx: RequestContext, request: Any) -> Any:
    try:
        await ctx.node.groups.ensure_topic()
    except ApiError as error:
        failed = _Found(ErrorCode.coordinator_not_available, error.message)
        return _response(ctx, [(key, failed) for key in _keys(ctx, request)])
    return _respond(ctx, request, _GROUP)


def _keys(ctx: RequestContext, request: Any) -> tuple[str, ...]:
    return request.coordinator_keys if ctx.version >= _MANY_KEYS_FROM else (request.key,)


def _respond(ctx: RequestContext, request: Any, key_type: int) -> Any:
    return _response(ctx, [(key, _find(ctx, key_type, key)) for key in _keys(ctx, request)])


def _find(ctx: RequestContext, key_type: int, key: str) -> _Found:
    if key_type == _TRANSACTION:
        # Of the errors there are, the clients take only this one as final; the message says what it means.
        message = "transactions are not supported by this broker"
        return _Found(ErrorCode.transactional_id_authorization_failed, message)
    if key_type != _GROUP:
        return _Found(ErrorCode.invalid_request, f"there are no coordinators of type {key_type} here")
    image = ctx.node.image
    try:
        partition = image.partition(OFFSETS_TOPIC, ctx.node.groups.shard_of(key))
    except ApiError as error:
        return _Found(error.code, error.message)
    broker = None if partition is None else image.brokers.get(partition.leader)
    endpoint = None if broker is None else broker.endpoints.get(ctx.listener)
    if broker is None or endpoint is None:
        return _Found(ErrorCode.coordinator_not_available)
    return _Found(ErrorCode.none, None, broker.id, endpoint.host, endpoint.port)


def _response(ctx: RequestContext, found: list[tuple[str, _Found]]) -> Any:
    if ctx.version < _MANY_KEYS_FROM:
        ((_, only),) = found
        return SingleResponse(
            throttle_time=NO_THROTTLE,
            error_code=only.error,
            error_message=only.message,
            node_id=only.node_id,
            host=only.host,
            port=only.port,
        )
    return FindCoordinatorResponse(
        throttle_time=NO_THROTTLE,
        coordinators=tuple(
            Coordinator(
                key=key,
                node_id=each.node_id,
                host=each.host,
                port=each.port,
                error_code=each.error,
                error_message=each.message,
            )
            for key, each in found
        ),
    )
