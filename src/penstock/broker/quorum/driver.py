"""The quorum loop: events go into the raft core one at a time, and its actions are carried out in order."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from penstock.protocol.compression import BytesLike

if TYPE_CHECKING:
    from penstock.broker.connection import Reply
    from penstock.broker.context import RequestContext
    from penstock.broker.node import Node
    from penstock.log.log import Log


class Quorum:
    """`open` the log, then `start`; `leader_id` is -1 while nobody is known to lead."""

    log: Log
    leader_id: int
    epoch: int
    #: Everything below this offset is committed; 0 while that is unknown.
    high_watermark: int
    #: This node belongs to a cluster; before that it is still founding or looking for one.
    has_cluster: bool

    def __init__(self, node: Node) -> None: ...

    def open(self) -> None:
        """Blocking: open the metadata log and read who votes. Raises CorruptLog, OSError."""

    async def start(self) -> None:
        """Found, find or resume the cluster; returns once this node takes part. The listeners are bound before."""

    async def stop(self) -> None:
        """Resign if leading, and end. The metadata log is closed with the store."""

    @property
    def is_leader(self) -> bool: ...

    @property
    def is_alone(self) -> bool:
        """This node is the only voter."""

    def address_of(self, node_id: int) -> tuple[str, int] | None:
        """Where the leader, or a voter, listens."""

    def append(self, batch: bytearray) -> int:
        """Append to the metadata log and begin to sync. Returns the last offset. Raises NOT_CONTROLLER."""

    def when_committed(self, offset: int) -> Awaitable[None]:
        """Raises NOT_CONTROLLER if leadership is lost first: it may be committed or not."""

    def answer_fetch(
        self, ctx: RequestContext, frame: BytesLike, position: int, correlation_id: int
    ) -> Awaitable[Reply]:
        """Fetch of the metadata log: the body of the request at `position`; the whole encoded answer."""

    async def handle(self, request: Any) -> Any:
        """A quorum request in the raft core's words, and its reply."""

    def describe(self) -> Any:
        """raft's QuorumView."""
