"""The coordinator runtime: runs a pure shard on the log of its partition.

An operation decides records and replies. The runtime appends the records as one batch and replays them into the
shard at once, so that the next operation sees them. It releases the replies when the high watermark has passed the
records, so that no client sees a result before it is safe. If anything breaks this order, the runtime discards the
shard and loads it again from the log. A shard lives as long as the leader epoch in which it was loaded: appends
that it decides later are refused, and the next leader has loaded everything that was committed.

While nothing is committed, because too few replicas are in sync or because the leader is isolated, the runtime
fails waiting requests after a timeout and new requests at once; the operation may or may not have been done.
Members do not time out meanwhile, because the coordinator cannot accept their heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic

from penstock.broker.coordinators.runtime.active_shard import (
    ActiveShard,
    Clock,
    CoordinatorPartition,
    CoordinatorResult,
    Result,
    ShardT,
    Token,
    replay_log,
)
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.log.producer_state import VerificationGuard
    from penstock.protocol.record_batch import EndMarker

__all__ = ("ActiveShard", "CoordinatorResult", "CoordinatorRuntime", "ShardT", "Token")

logger = logging.getLogger("penstock.coordinator")

#: A request whose shard is loading waits this long before it fails with COORDINATOR_LOAD_IN_PROGRESS.
_LOAD_WAIT_S: Final = 0.25


class CoordinatorRuntime(Generic[ShardT]):
    """The shards of one internal topic that this node leads."""

    def __init__(
        self,
        *,
        new_shard: Callable[[], ShardT],
        find_partition: Callable[[int], CoordinatorPartition | None],
        now_ms: Clock,
        in_thread: Callable[..., Awaitable[Any]],
        commit_timeout_s: float = 5.0,
        on_unreadable: Callable[[Any, ApiError], object] = lambda partition, error: None,
    ) -> None:
        """A request that waits longer than `commit_timeout_s` for a commit fails with COORDINATOR_NOT_AVAILABLE.

        `on_unreadable` is called with a partition whose log cannot be loaded, so that another replica may lead it.
        """
        self._new_shard = new_shard
        self._find_partition = find_partition
        self._now_ms = now_ms
        self._in_thread = in_thread
        self._commit_timeout_s = commit_timeout_s
        self._on_unreadable = on_unreadable
        self._active: dict[int, ActiveShard[ShardT]] = {}
        self._loads: dict[int, asyncio.Task[None]] = {}
        self._is_closed = False

    async def write(
        self,
        index: int,
        operation: Callable[[ShardT, Token], CoordinatorResult],
        guard: VerificationGuard | None = None,
    ) -> Any:
        """Return the reply once it is committed. Raises ApiError if this node cannot give it."""
        return await (await self._ready(index)).submit(operation, guard)

    async def read(self, index: int, question: Callable[[ShardT], Result]) -> Result:
        return await (await self._ready(index)).read(question)

    async def write_marker(self, index: int, marker: EndMarker, transaction_version: int = 0) -> None:
        """Return once the end of the transaction is committed. Raises ApiError if this node cannot confirm that."""
        await (await self._ready(index)).write_marker(marker, transaction_version)

    async def active(self, index: int) -> ActiveShard[ShardT]:
        """Return the active shard. It lives as long as its leader epoch, then `is_closed` is set. Raises ApiError."""
        return await self._ready(index)

    def loaded_shards(self) -> list[ShardT]:
        return [active.shard for active in self._active.values()]

    def loaded_shard(self, index: int) -> ShardT | None:
        active = self._active.get(index)
        return None if active is None else active.shard

    def load(self, index: int) -> asyncio.Task[None]:
        """Begin to load a shard unless it is already loading. Its timeouts start when it is loaded."""
        self._unload_outdated(index)
        task = self._loads.get(index)
        if task is None:
            task = self._loads[index] = asyncio.get_running_loop().create_task(self._load(index))
            task.add_done_callback(lambda _: self._loads.pop(index, None))
        return task

    def unload(self, index: int) -> None:
        """Drop a shard whose partition this node no longer leads. Clients that wait must find the new coordinator."""
        if (task := self._loads.get(index)) is not None:
            task.cancel()
        if (active := self._active.pop(index, None)) is not None:
            active.close(ErrorCode.not_coordinator)

    def _unload_outdated(self, index: int) -> None:
        active = self._active.get(index)
        if active is not None and not self._is_current(active.partition, index, active.leader_epoch):
            self.unload(index)

    def _is_current(self, partition: CoordinatorPartition, index: int, leader_epoch: int) -> bool:
        """Whether this node has led the same partition without interruption in this epoch."""
        return self._find_partition(index) is partition and partition.leader_epoch == leader_epoch

    def close(self) -> None:
        self._is_closed = True
        for index in {*self._loads, *self._active}:
            self.unload(index)

    async def _ready(self, index: int) -> ActiveShard[ShardT]:
        self._unload_outdated(index)
        active = self._active.get(index)
        if active is not None:
            return active
        if self._is_closed or self._find_partition(index) is None:
            raise ApiError(ErrorCode.not_coordinator)
        await asyncio.wait((self.load(index),), timeout=_LOAD_WAIT_S)
        active = self._active.get(index)
        if active is None:
            is_loading = index in self._loads
            code = (
                ErrorCode.coordinator_load_in_progress if is_loading else ErrorCode.coordinator_not_available
            )
            raise ApiError(code)
        return active

    async def _load(self, index: int) -> None:
        while index not in self._active and not self._is_closed:
            partition = self._find_partition(index)
            if partition is None:
                return
            # Uncommitted records count too: either they will be committed, or this node loses the leadership.
            shard, end, epoch = self._new_shard(), partition.log.end, partition.leader_epoch
            try:
                await replay_log(shard, partition.log, end, self._in_thread)
            except ApiError as error:
                logger.error("cannot load shard %d: %r", index, error)
                # The error does not matter if the log was closed or the leader epoch ended in the meantime.
                if self._is_current(partition, index, epoch):
                    self._on_unreadable(partition, error)
                return
            except Exception:
                logger.exception("cannot load shard %d", index)
                return
            if self._is_current(partition, index, epoch):
                self._activate(index, shard, partition, end.offset - 1)
                return

    def _activate(self, index: int, shard: ShardT, partition: CoordinatorPartition, last_offset: int) -> None:
        active = ActiveShard(
            shard,
            partition,
            leader_epoch=partition.leader_epoch,
            last_offset=last_offset,
            now_ms=self._now_ms,
            on_failure=partial(self._on_failure, index),
            commit_timeout_s=self._commit_timeout_s,
        )
        if not active.is_closed:
            self._active[index] = active

    def _on_failure(self, index: int, failed: ActiveShard[ShardT]) -> None:
        if self._active.get(index) is failed:
            del self._active[index]
        if not self._is_closed and self._find_partition(index) is not None:
            self.load(index)
