"""Asking a broker that may be this one: the same request and the same answer, without the wire where it is here."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from penstock.broker.apis import APIS
from penstock.broker.context import RequestContext
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.node import Node


async def ask_here(node: Node, api_key: int, request: Any) -> Any:
    """This node's own answer, as the newest version says it."""
    api = APIS[api_key]
    context = RequestContext(
        node,
        api_key,
        api.max_version,
        f"penstock-{node.node_id}",
        "",
        node.settings.inter_broker_listener or node.settings.listeners[0].name,
    )
    response = api.handler(context, request)
    return await response if inspect.isawaitable(response) else response


async def ask_broker(
    node: Node, broker_id: int, api_key: int, request: Any, *, timeout_s: float, purpose: str
) -> Any:
    """Raises ApiError: NETWORK_EXCEPTION when no answer came, so that it may or may not have been done."""
    if broker_id == node.node_id:
        try:
            async with asyncio.timeout(timeout_s):
                return await ask_here(node, api_key, request)
        except TimeoutError:
            raise ApiError(ErrorCode.network_exception, f"no answer in {timeout_s:g} s") from None
    from penstock.broker.peers import PeerUnreachable

    try:
        return await node.peers.call(broker_id, api_key, request, timeout_s=timeout_s, purpose=purpose)
    except (PeerUnreachable, TimeoutError) as error:
        raise ApiError(ErrorCode.network_exception, str(error)) from None
