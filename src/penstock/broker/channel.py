"""The way to the active controller, wherever it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.broker.node import Node

CALL_TIMEOUT_S: Final = 15.0


class ControllerChannel:
    def __init__(self, node: Node) -> None:
        self._node = node

    async def call(self, api_key: int, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """The active controller's response, of the newest class; this node has then seen what it decided.

        Raises ApiError(REQUEST_TIMED_OUT) when no controller has answered in time.
        """
        raise NotImplementedError
