"""A broker's place in the cluster: it registers, reports to the controller, and leaves in good order.

A broker that cannot reach a controller keeps serving what it can: reads, and writes that its in-sync replicas
confirm. It fails open, because the cluster elects others only where they are known to have everything.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.log.checkpoints import PartitionKey


class BrokerLifecycle:
    def __init__(self, node: Node) -> None:
        self._node = node
        self.broker_epoch = -1
        self.is_fenced = True

    async def register(self) -> None:
        """Returns when the controller has let this broker in, fenced. Raises StartFailed.

        A lone node is in, unfenced and leading at once.
        """
        raise NotImplementedError

    def ready(self) -> None:
        """The logs are open and losses are reported: ask to be unfenced from now on."""
        raise NotImplementedError

    async def unfenced(self) -> None:
        """Returns when clients may be sent here."""
        raise NotImplementedError

    async def report_lost(self, keys: Collection[PartitionKey]) -> set[PartitionKey]:
        """Tell the controller that these copies are gone or damaged; returns those it has taken note of.

        Raises ApiError when no controller answers in time.
        """
        raise NotImplementedError

    async def hand_over(self) -> None:
        """Controlled shutdown: returns when others lead all that they can, or it has taken too long."""
        raise NotImplementedError

    def close(self) -> None:
        """Send no more heartbeats."""
        raise NotImplementedError
