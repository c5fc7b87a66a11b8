"""Requests of this node to the active controller, which may be this node.

The channel retries with a short backoff, until the timeout, while no controller is known, when a message is lost, and
when the receiver turns out not to be the controller any more. So the controller may carry out a request more than
once.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.broker.network.apis import APIS
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.environment import PeerCalls
    from penstock.broker.quorum.metadata_log import MetadataLog
    from penstock.broker.quorum.quorum import Quorum

Answer = TypeVar("Answer")
#: Sends the request to the node with this id; the second argument is the timeout in seconds.
RemoteCall = Callable[[int, float], Coroutine[Any, Any, Answer]]

CALL_TIMEOUT_S: Final = 15.0
#: Heartbeats have their own connection, so that they never wait behind decisions: a server replies in order.
HEARTBEATS: Final = "heartbeats"
_DECISIONS: Final = "control"
_FORWARDED: Final = "relay"
ENVELOPE: Final = 58
#: The reply in an envelope starts with the metadata offset that the controller had applied.
ENVELOPE_OFFSET: Final = struct.Struct(">q")
_BACKOFF: Final = ExponentialBackoff(base_ms=20, cap_ms=250)
#: How soon a caller that waits for a reply notices that another controller has been elected.
_LEADER_CHECK_INTERVAL_S: Final = 0.1


class ControllerChannel:
    def __init__(
        self,
        node_id: int,
        quorum: Quorum,
        metadata: MetadataLog,
        *,
        peers: Callable[[], PeerCalls],
        call_local: Callable[[int, Any], Awaitable[Any]],
    ) -> None:
        """`call_local` calls this node's own handler: it gets the API key and the request."""
        self._node_id = node_id
        self._quorum = quorum
        self._metadata = metadata
        self._peers = peers
        self._call_local = call_local
        #: The last other node that was known to be the active controller.
        self.last_controller_id: int | None = None

    async def call(
        self,
        api_key: int,
        request: Any,
        timeout_s: float = CALL_TIMEOUT_S,
        *,
        purpose: str = _DECISIONS,
        here: Callable[[], Awaitable[Any]] | None = None,
    ) -> Any:
        """Return the active controller's response. For an API that clients use too, this node's image already includes
        the controller's decision. `here` makes the response if this node is the active controller; by default its own
        handler does so, in one piece.

        Raises ApiError: REQUEST_TIMED_OUT if no controller has replied in time.
        """
        if APIS[api_key].relay:
            from penstock.broker.controller.forwarding import forwarded_call

            there = forwarded_call(self, self._node_id, api_key, request)
        else:
            there = self._call_there(api_key, request, purpose)
        respond = here or (lambda: self._call_local(api_key, request))
        return await self.ask(lambda: _checked(respond()), there, timeout_s)

    async def ask(
        self, here: Callable[[], Awaitable[Answer]], there: RemoteCall[Answer], timeout_s: float
    ) -> Answer:
        """Call `here` if this node is the active controller, else `there`.

        Retry with a backoff if that raises NOT_CONTROLLER, or if the other node does not reply.
        """
        from penstock.broker.network.peers import PeerUnreachable

        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        attempt, reason = 0, "no controller is known"
        while (left_s := deadline - loop.time()) > 0:
            try:
                return await self._ask_once(here, there, left_s)
            except ApiError as error:
                if error.code is not ErrorCode.not_controller:
                    raise
                reason = error.message or reason
            except (PeerUnreachable, TimeoutError) as error:
                reason = str(error) or reason
            delay_s = _BACKOFF.spread_ms(attempt, random) / 1000
            await asyncio.sleep(min(delay_s, max(deadline - loop.time(), 0)))
            attempt += 1
        raise ApiError(
            ErrorCode.request_timed_out, f"no controller has answered within {timeout_s:g} s: {reason}"
        )

    async def _ask_once(
        self, here: Callable[[], Awaitable[Answer]], there: RemoteCall[Answer], left_s: float
    ) -> Answer:
        if self._metadata.is_active:
            async with asyncio.timeout(left_s):
                return await here()
        leader_id = self._quorum.leader_id
        if leader_id < 0 or leader_id == self._node_id:
            raise ApiError(ErrorCode.not_controller, "no controller is known")
        self.last_controller_id = leader_id
        return await self._while_leader(leader_id, there(leader_id, left_s))

    async def _while_leader(self, leader_id: int, asking: Coroutine[Any, Any, Answer]) -> Answer:
        """Stop waiting once another controller is elected, because a leader that is suspended never replies."""
        task = asyncio.get_running_loop().create_task(asking)
        try:
            while not (await asyncio.wait((task,), timeout=_LEADER_CHECK_INTERVAL_S))[0]:
                if self._quorum.leader_id != leader_id:
                    raise ApiError(ErrorCode.not_controller, f"node {leader_id} no longer leads")
            return task.result()
        finally:
            task.cancel()

    def _call_there(self, api_key: int, request: Any, purpose: str) -> RemoteCall[Any]:
        async def there(leader_id: int, timeout_s: float) -> Any:
            return _raise_if_not_controller(
                await self._peers().call(leader_id, api_key, request, timeout_s=timeout_s, purpose=purpose)
            )

        return there

    async def send_envelope(
        self, leader_id: int, frame: bytes, client_host: bytes, principal: bytes | None, timeout_s: float
    ) -> bytes:
        """Send a client's frame to the controller; return the frame of the reply once this node has applied its effect.

        Raises ApiError, PeerUnreachable, TimeoutError.
        """
        from kio.schema.envelope.v0.request import EnvelopeRequest

        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        request = EnvelopeRequest(
            request_data=frame, request_principal=principal, client_host_address=client_host
        )
        response = await self._peers().call(
            leader_id, ENVELOPE, request, timeout_s=timeout_s, purpose=_FORWARDED
        )
        if response.error_code is not ErrorCode.none:
            raise ApiError(response.error_code, f"node {leader_id} answered {response.error_code.name}")
        data: bytes = response.response_data
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._metadata.reached(ENVELOPE_OFFSET.unpack_from(data)[0])
        return data[ENVELOPE_OFFSET.size :]


async def _checked(response: Awaitable[Any]) -> Any:
    return _raise_if_not_controller(await response)


def _raise_if_not_controller(response: Any) -> Any:
    if getattr(response, "error_code", None) is ErrorCode.not_controller:
        raise ApiError(ErrorCode.not_controller, getattr(response, "error_message", None))
    return response
