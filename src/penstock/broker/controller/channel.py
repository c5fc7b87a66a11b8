"""The way to the active controller, wherever it is.

While nobody is known to decide, while a message gets lost or its receiver turns out to decide no longer, the
question is asked again after a short rest, until its time is up. So it may be carried out more than once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.broker.apis import APIS
from penstock.broker.broker_calls import ask_here
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.node import Node

Answer = TypeVar("Answer")
#: Asks the node of this id, within so many seconds.
AskThere = Callable[[int, float], Coroutine[Any, Any, Answer]]

CALL_TIMEOUT_S: Final = 15.0
#: Heartbeats never wait behind decisions: a server answers each connection in order.
HEARTBEATS: Final = "heartbeats"
_DECISIONS: Final = "control"
_BACKOFF_S: Final = 0.02
_BACKOFF_MAX_S: Final = 0.25
#: How soon one who waits for an answer notices that somebody else has been elected.
_LOOK_S: Final = 0.1


class ControllerChannel:
    def __init__(self, node: Node) -> None:
        self._node = node
        #: The other node that was last known to decide.
        self.last_controller_id: int | None = None

    async def call(
        self,
        api_key: int,
        request: Any,
        timeout_s: float = CALL_TIMEOUT_S,
        *,
        purpose: str = _DECISIONS,
    ) -> Any:
        """The active controller's response. What this node is shown by it, its own image shows too, where the
        API is one that clients use.

        Raises ApiError: REQUEST_TIMED_OUT when no controller has answered in time.
        """
        if APIS[api_key].relay:
            from penstock.broker.relay import call_there

            there = call_there(self._node, api_key, request)
        else:
            there = self._call_there(api_key, request, purpose)
        return await self.ask(lambda: self._call_here(api_key, request), there, timeout_s)

    async def ask(
        self, here: Callable[[], Awaitable[Answer]], there: AskThere[Answer], timeout_s: float
    ) -> Answer:
        """`here` where this node decides, else `there`; again whenever that raises NOT_CONTROLLER."""
        from penstock.broker.peers import PeerUnreachable

        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        rest_s = _BACKOFF_S
        reason = "no controller is known"
        while (left_s := deadline - loop.time()) > 0:
            try:
                return await self._ask_once(here, there, left_s)
            except ApiError as error:
                if error.code is not ErrorCode.not_controller:
                    raise
                reason = error.message or reason
            except (PeerUnreachable, TimeoutError) as error:
                reason = str(error) or reason
            await asyncio.sleep(min(rest_s * random.uniform(0.5, 1.5), max(deadline - loop.time(), 0)))
            rest_s = min(rest_s * 2, _BACKOFF_MAX_S)
        raise ApiError(
            ErrorCode.request_timed_out, f"no controller has answered within {timeout_s:g} s: {reason}"
        )

    async def _ask_once(
        self, here: Callable[[], Awaitable[Answer]], there: AskThere[Answer], left_s: float
    ) -> Answer:
        node = self._node
        if node.metadata.is_active:
            async with asyncio.timeout(left_s):
                return await here()
        leader_id = node.quorum.leader_id
        if leader_id < 0 or leader_id == node.node_id:
            raise ApiError(ErrorCode.not_controller, "no controller is known")
        self.last_controller_id = leader_id
        return await self._while_it_leads(leader_id, there(leader_id, left_s))

    async def _while_it_leads(self, leader_id: int, asking: Coroutine[Any, Any, Answer]) -> Answer:
        """One that stands still answers nobody, and it is not waited for once another has been elected."""
        task = asyncio.get_running_loop().create_task(asking)
        try:
            while not (await asyncio.wait((task,), timeout=_LOOK_S))[0]:
                if self._node.quorum.leader_id != leader_id:
                    raise ApiError(ErrorCode.not_controller, f"node {leader_id} no longer leads")
            return task.result()
        finally:
            task.cancel()

    async def _call_here(self, api_key: int, request: Any) -> Any:
        return _unless_moved(await ask_here(self._node, api_key, request))

    def _call_there(self, api_key: int, request: Any, purpose: str) -> AskThere[Any]:
        async def there(leader_id: int, timeout_s: float) -> Any:
            peers = self._node.peers
            return _unless_moved(
                await peers.call(leader_id, api_key, request, timeout_s=timeout_s, purpose=purpose)
            )

        return there


def _unless_moved(response: Any) -> Any:
    if getattr(response, "error_code", None) is ErrorCode.not_controller:
        raise ApiError(ErrorCode.not_controller, getattr(response, "error_message", None))
    return response
