"""Markers: the end of each prepared transaction is written into every one of its partitions, until all have it.

A shard hands out what it has prepared, again after every load; so nothing is remembered here that a fail-over could
lose. What was handed out belongs to one life of the shard: once that has ended nothing more is sent or reported of it,
as the next life may be about a later transaction of the same producer.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Final

from penstock.broker.transactions.ending import End, end_here
from penstock.broker.transactions.marker_outbox import MarkerOutbox
from penstock.broker.transactions.outbox import Outcomes
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.records import EndMarker
from penstock.transactions.messages import Markers, MarkersPosition, MarkersReply, TopicPartition

if TYPE_CHECKING:
    from penstock.broker.coordinator_runtime import ActiveShard
    from penstock.broker.node import Node
    from penstock.broker.transactions.coordinator import TransactionCoordinator
    from penstock.transactions.shard import TransactionShard

logger = logging.getLogger("penstock.transactions")

_REST_S: Final = 0.02
_REST_MAX_S: Final = 1.0
#: The marker is there, or the partition has gone on to a later transaction of the producer: this one has ended there.
_WRITTEN: Final = frozenset({ErrorCode.none, ErrorCode.invalid_producer_epoch})


class MarkerDelivery:
    """One task for each shard that is led here, and one for each transaction that is ending."""

    def __init__(self, node: Node, coordinator: TransactionCoordinator) -> None:
        self._node = node
        self._coordinator = coordinator
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._outboxes: dict[int, MarkerOutbox] = {}  # by broker
        self._ending: dict[str, asyncio.Task[None]] = {}  # by transactional id

    def serve(self, index: int) -> None:
        """Deliver for this shard for as long as it is led here."""
        task = self._serving.get(index)
        if task is None or task.done():
            self._serving[index] = self._node.spawn(self._serve(index))

    async def _serve(self, index: int) -> None:
        while self._node.partitions.led(self._coordinator.topic.name, index) is not None:
            try:
                await self._serve_now(index)
            except ApiError:
                await asyncio.sleep(_REST_MAX_S * random.random())
            except Exception:
                # Without this task none of the shard's transactions would ever end.
                logger.exception("markers of shard %d have to wait", index)
                await asyncio.sleep(_REST_MAX_S)

    async def _serve_now(self, index: int) -> None:
        """Raises ApiError when the shard is not there."""
        active = await self._coordinator.active_shard(index)
        if self._coordinator.image_shows(index, active.leader_epoch):
            await self._serve_life(active)
        else:
            await asyncio.sleep(_REST_S)

    async def _serve_life(self, active: ActiveShard[TransactionShard]) -> None:
        position: MarkersPosition | None = None
        while not active.is_closed:
            try:
                reply: MarkersReply = await active.submit(
                    lambda shard, token, after=position: shard.next_markers(after, token)  # type: ignore[misc]
                )
            except ApiError:
                # Its life is over, or nothing is committed at present.
                await asyncio.sleep(_REST_MAX_S * random.random())
                continue
            position = reply.position
            for markers in reply.markers:
                self._begin(active, markers)

    def _begin(self, active: ActiveShard[TransactionShard], markers: Markers) -> None:
        name = markers.transactional_id
        task = self._ending[name] = self._node.spawn(self._deliver(active, markers))
        task.add_done_callback(lambda done: self._ending.get(name) is done and self._ending.pop(name))

    async def ended(self, transactional_id: str, timeout_s: float) -> None:
        """Wait until the transaction that is ending has ended, or for a moment where none is known of."""
        task = self._ending.get(transactional_id)
        if task is None:
            await asyncio.sleep(min(_REST_S, timeout_s))
        else:
            await asyncio.wait((task,), timeout=timeout_s)

    async def _deliver(self, active: ActiveShard[TransactionShard], markers: Markers) -> None:
        left, rest_s = markers.partitions, _REST_S
        while not active.is_closed:
            outcomes = await self._write(active, markers, left)
            if ErrorCode.transaction_coordinator_fenced in outcomes.values():
                logger.warning("another coordinator ends the transaction of %s", markers.transactional_id)
                return
            written = tuple(partition for partition in left if outcomes[partition] in _WRITTEN)
            left = tuple(partition for partition in left if outcomes[partition] not in _WRITTEN)
            await self._report(active, markers, written)
            if not left:
                return
            await asyncio.sleep(rest_s * random.uniform(0.5, 1.5))
            rest_s = min(rest_s * 2, _REST_MAX_S)

    async def _write(
        self, active: ActiveShard[TransactionShard], markers: Markers, partitions: tuple[TopicPartition, ...]
    ) -> Outcomes:
        outcomes: Outcomes = {}
        by_leader: dict[int, list[TopicPartition]] = {}
        for partition in partitions:
            state = self._node.image.partition(partition.topic, partition.partition)
            if state is None:
                outcomes[partition] = ErrorCode.none  # deleted, with everything in it
            elif not state.has_leader:
                outcomes[partition] = ErrorCode.leader_not_available
            else:
                by_leader.setdefault(state.leader, []).append(partition)
        asking = [self._write_to(leader, active, markers, led) for leader, led in by_leader.items()]
        # Mostly it is one; each of several would be a task of its own.
        answers = [await asking[0]] if len(asking) == 1 else await asyncio.gather(*asking)
        for answer in answers:
            outcomes |= answer
        return outcomes

    async def _write_to(
        self,
        broker_id: int,
        active: ActiveShard[TransactionShard],
        markers: Markers,
        partitions: list[TopicPartition],
    ) -> Outcomes:
        if broker_id == self._node.node_id:
            return await self._write_here(active, markers, partitions)
        return await self._outbox(broker_id).write(
            markers, active.leader_epoch, tuple(partitions), lambda: active.is_closed
        )

    async def _write_here(
        self, active: ActiveShard[TransactionShard], markers: Markers, partitions: list[TopicPartition]
    ) -> Outcomes:
        marker = EndMarker(markers.producer_id, markers.epoch, active.leader_epoch, markers.committed)
        try:
            (outcomes,) = await end_here(self._node, (End(marker, markers.transaction_version, partitions),))
        except Exception:
            # It is tried again: the transaction would never end otherwise.
            logger.exception("markers of %s have to wait", markers.transactional_id)
            return dict.fromkeys(partitions, ErrorCode.unknown_server_error)
        return outcomes

    def _outbox(self, broker_id: int) -> MarkerOutbox:
        outbox = self._outboxes.get(broker_id)
        if outbox is None:
            outbox = self._outboxes[broker_id] = MarkerOutbox(self._node, broker_id)
        return outbox

    async def _report(
        self, active: ActiveShard[TransactionShard], markers: Markers, written: tuple[TopicPartition, ...]
    ) -> None:
        """Nobody waits for it, so it is said until it is heard."""
        while not active.is_closed and (written or not markers.partitions):
            now_ms = self._node.now_ms()
            try:
                await active.submit(
                    lambda shard, token, now_ms=now_ms: shard.markers_written(  # type: ignore[misc]
                        markers, written, token, now_ms=now_ms
                    )
                )
            except ApiError:
                await asyncio.sleep(_REST_MAX_S * random.random())
            else:
                return
