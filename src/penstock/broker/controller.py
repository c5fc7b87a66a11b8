"""What the active controller does besides deciding on request: it watches brokers and keeps leaders in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.broker.node import Node


class Controller:
    """Built on every node; at work only between `became_active` and `became_inactive`."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def became_active(self) -> None:
        """This node's decisions count from now on: `node.metadata` says so, in the loop."""
        raise NotImplementedError

    def became_inactive(self) -> None:
        """Another node decides, or nobody does; also called when the node stops."""
        raise NotImplementedError
