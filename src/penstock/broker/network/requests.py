"""The context of a request, and requests that a node sends to a broker that may be itself.

A request to this node's own broker calls the handler directly: the same request and response, without the wire.
"""

from __future__ import annotations

import asyncio
import inspect
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.broker.network.apis import APIS
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from penstock.broker.environment import PeerCalls
    from penstock.broker.network.connection import Connection, PendingReply
    from penstock.broker.services import BrokerServices

_HEAD: Final = struct.Struct(">ii")  # size, correlation id


class RequestContext(NamedTuple):
    services: BrokerServices
    api_key: int
    version: int
    client_id: str | None
    client_host: str
    listener: str
    #: None if the node calls its own handler, for itself or on behalf of a client.
    connection: Connection | None = None


def reply_later(
    ctx: RequestContext, connection: Connection, correlation_id: int, response: Coroutine[Any, Any, bytes]
) -> PendingReply:
    """For our own APIs: frame the encoded response once it is there. Close the connection if there is none."""
    slot = connection.defer(ctx.api_key)

    async def reply() -> None:
        try:
            encoded = await response
        except Exception:
            ctx.services.server.failed(connection)
        else:
            connection.fulfil(slot, _HEAD.pack(len(encoded) + 4, correlation_id) + encoded)

    ctx.services.spawn(reply())
    return slot


class BrokerCalls:
    """Sends requests to brokers, one of which may be this node."""

    def __init__(self, services: Callable[[], BrokerServices], peers: Callable[[], PeerCalls]) -> None:
        self._services = services
        self._peers = peers

    async def call_local(self, api_key: int, request: Any) -> Any:
        """Call this node's own handler with a request of the newest version; return its response."""
        api, services = APIS[api_key], self._services()
        context = RequestContext(
            services,
            api_key,
            api.max_version,
            f"penstock-{services.node_id}",
            "",
            services.settings.inter_broker_listener or services.settings.listeners[0].name,
        )
        response = api.handler(context, request)
        return await response if inspect.isawaitable(response) else response

    async def call(
        self, broker_id: int, api_key: int, request: Any, *, timeout_s: float, purpose: str
    ) -> Any:
        """Send a request to a broker, which may be this node; return the response.

        Raises ApiError: NETWORK_EXCEPTION if no response came. The broker may or may not have carried out the request.
        """
        if broker_id == self._services().node_id:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self.call_local(api_key, request)
            except TimeoutError:
                raise ApiError(ErrorCode.network_exception, f"no answer in {timeout_s:g} s") from None
        # Imported here, because a standalone node never needs it.
        from penstock.broker.network.peers import PeerUnreachable

        try:
            return await self._peers().call(broker_id, api_key, request, timeout_s=timeout_s, purpose=purpose)
        except (PeerUnreachable, TimeoutError) as error:
            raise ApiError(ErrorCode.network_exception, str(error)) from None
