"""FindCoordinator (key 10), v0-6. One key before v4; from v4 on many, each with its own result.

The coordinator of a group (key type 0), a transactional id (1) or a share group's partition (2, from v6 on, as
"group:topic id:partition") is the leader of its partition of the internal topic, at the listener of the request. The
first lookup of a kind creates the topic.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kio.schema.find_coordinator.v3.response import FindCoordinatorResponse as SingleResponse
from kio.schema.find_coordinator.v6.response import Coordinator, FindCoordinatorResponse

from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.network.requests import RequestContext, in_slices
from penstock.protocol.acls import CLUSTER_NAME, Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps, map_in_steps

if TYPE_CHECKING:
    from penstock.broker.coordinators.runtime.sharded_coordinator import ShardedCoordinator

#: 16 bytes in URL-safe base64.
_TOPIC_ID: Final = re.compile(r"[A-Za-z0-9_-]{22}")
_GROUP: Final = 0
_TRANSACTION: Final = 1
_SHARE: Final = 2
#: What a client needs to be told where the coordinator of a key is, and what it gets otherwise.
_NEEDS: Final[dict[int, Callable[[str], tuple[Operation, ResourceType, str]]]] = {
    _GROUP: lambda key: (Operation.DESCRIBE, ResourceType.GROUP, key),
    _TRANSACTION: lambda key: (Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, key),
    _SHARE: lambda _: (Operation.CLUSTER_ACTION, ResourceType.CLUSTER, CLUSTER_NAME),
}
_REFUSED: Final = {
    _GROUP: ErrorCode.group_authorization_failed,
    _TRANSACTION: ErrorCode.transactional_id_authorization_failed,
    _SHARE: ErrorCode.cluster_authorization_failed,
}
_MANY_KEYS_FROM: Final = 4
_SHARE_FROM: Final = 6
#: Later requests of the connection wait for this reply, so it does not wait for the quorum to become available.
_CREATION_WAIT_S: Final = 2.0


class _CoordinatorLocation(NamedTuple):
    error: ErrorCode
    message: str | None = None
    node_id: int = -1
    host: str = ""
    port: int = -1


@in_slices
def handle(ctx: RequestContext, request: Any) -> Steps[Any]:
    """Each coordinator is looked up as it is in its own step."""
    # Version 0 supports groups only.
    key_type = getattr(request, "key_type", _GROUP)
    coordinator = _coordinator(ctx, key_type)
    if coordinator is None:
        flaw = _CoordinatorLocation(
            ErrorCode.invalid_request, f"there are no coordinators of type {key_type} here"
        )
        return (yield from _response(ctx, [(key, flaw) for key in _keys(ctx, request)]))
    refused: dict[str, _CoordinatorLocation] = {}
    if ctx.authorizer is not None:
        refused = yield from _refused_keys(ctx, request, key_type)
        keys = _keys(ctx, request)
        if all(key in refused for key in keys):
            return (yield from _response(ctx, [(key, refused[key]) for key in keys]))
    if not coordinator.has_topic:
        return _create_topic_and_respond(ctx, request, coordinator, key_type, refused)
    return (yield from _respond(ctx, request, coordinator, key_type, refused))


def _coordinator(ctx: RequestContext, key_type: int) -> ShardedCoordinator[Any] | None:
    if key_type == _GROUP:
        return ctx.services.groups
    if key_type == _TRANSACTION:
        return ctx.services.transactions
    if key_type == _SHARE and ctx.version >= _SHARE_FROM:
        return ctx.services.share_state
    return None


async def _create_topic_and_respond(
    ctx: RequestContext,
    request: Any,
    coordinator: ShardedCoordinator[Any],
    key_type: int,
    refused: dict[str, _CoordinatorLocation],
) -> Any:
    try:
        await asyncio.wait_for(coordinator.ensure_topic(), _CREATION_WAIT_S)
    except (ApiError, TimeoutError) as error:
        why = error.message if isinstance(error, ApiError) else f"{coordinator.topic.name} is being made"
        failed = _CoordinatorLocation(ErrorCode.coordinator_not_available, why)
        response = _response(ctx, [(key, failed) for key in _keys(ctx, request)])
        return await ctx.finish_in_slices(response)
    return await ctx.finish_in_slices(_respond(ctx, request, coordinator, key_type, refused))


def _refused_keys(ctx: RequestContext, request: Any, key_type: int) -> Steps[dict[str, _CoordinatorLocation]]:
    """Return the keys whose coordinator the client may not know, with their errors."""
    found: dict[str, _CoordinatorLocation] = {}
    for key in _keys(ctx, request):
        operation, resource_type, name = _NEEDS[key_type](key)
        if not ctx.demand(operation, resource_type, name):
            found[key] = _CoordinatorLocation(_REFUSED[key_type])
        yield
    return found


def _keys(ctx: RequestContext, request: Any) -> tuple[str, ...]:
    return request.coordinator_keys if ctx.version >= _MANY_KEYS_FROM else (request.key,)


def _respond(
    ctx: RequestContext,
    request: Any,
    coordinator: ShardedCoordinator[Any],
    key_type: int,
    refused: dict[str, _CoordinatorLocation],
) -> Steps[Any]:
    found = []
    for key in _keys(ctx, request):
        found.append((key, refused.get(key) or _find(ctx, coordinator, key_type, key)))
        yield
    return (yield from _response(ctx, found))


def _find(
    ctx: RequestContext, coordinator: ShardedCoordinator[Any], key_type: int, key: str
) -> _CoordinatorLocation:
    if key_type == _SHARE and not _is_share_key(key):
        return _CoordinatorLocation(ErrorCode.invalid_request, f"not a group, topic id and partition: {key}")
    try:
        leader = coordinator.leader_of(key)
    except ApiError as error:
        return _CoordinatorLocation(error.code, error.message)
    broker = None if leader is None else ctx.services.image.brokers.get(leader)
    endpoint = None if broker is None else broker.endpoints.get(ctx.listener)
    if broker is None or endpoint is None:
        return _CoordinatorLocation(ErrorCode.coordinator_not_available)
    return _CoordinatorLocation(ErrorCode.none, None, broker.id, endpoint.host, endpoint.port)


def _is_share_key(key: str) -> bool:
    """The group id may itself contain colons."""
    group_id, _, rest = key.rpartition(":")
    group_id, _, topic_id = group_id.rpartition(":")
    return bool(group_id) and _TOPIC_ID.fullmatch(topic_id) is not None and rest.isdecimal()


def _response(ctx: RequestContext, found: list[tuple[str, _CoordinatorLocation]]) -> Steps[Any]:
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
    coordinators = yield from map_in_steps(_coordinator_response, found)
    return FindCoordinatorResponse(throttle_time=NO_THROTTLE, coordinators=coordinators)


def _coordinator_response(found: tuple[str, _CoordinatorLocation]) -> Coordinator:
    key, each = found
    return Coordinator(
        key=key,
        node_id=each.node_id,
        host=each.host,
        port=each.port,
        error_code=each.error,
        error_message=each.message,
    )
