"""Transaction markers: the coordinator sends them, and partition leaders append them.

`MarkerSender` writes the marker of each prepared transaction to every one of its partitions until all have it. A
shard hands out its prepared transactions again after every load, so a failover loses nothing. What a shard hands
out belongs to its leader epoch: when that ends, the sender neither sends nor reports any more of it, because the
next epoch may work on a later transaction of the same producer. `MarkerAppender` appends markers to partitions that
this broker leads, for WriteTxnMarkers requests and for the coordinator on this broker.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.broker.coordinators.requests import group_by_topic
from penstock.broker.coordinators.transactions.request_queue import (
    BrokerRequestQueue,
    ErrorsByKey,
    PartitionErrors,
)
from penstock.cluster.topic_names import CONSUMER_OFFSETS, TRANSACTION_STATE, is_internal
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import EndMarker
from penstock.transactions.messages import MarkersPosition, MarkersReply, TopicPartition, TransactionMarkers

if TYPE_CHECKING:
    from penstock.broker.coordinators.groups.coordinator import GroupCoordinator
    from penstock.broker.coordinators.runtime.runtime import ActiveShard
    from penstock.broker.coordinators.runtime.sharded_coordinator import CoordinatorContext
    from penstock.broker.coordinators.transactions.coordinator import TransactionCoordinator
    from penstock.broker.environment import Clock, ImageView, Partitions
    from penstock.broker.metrics.counters import Metrics
    from penstock.broker.network.requests import BrokerCalls
    from penstock.transactions.transaction_shard import TransactionCoordinatorShard


#: Markers in one request; the response waits for the slowest of them.
_MARKERS_MAX: Final = 500


class _QueuedMarkers(NamedTuple):
    markers: TransactionMarkers
    coordinator_epoch: int
    partitions: tuple[TopicPartition, ...]
    is_over: Callable[[], bool]
    outcomes: asyncio.Future[PartitionErrors]

    @property
    def key(self) -> int:
        return self.markers.producer_id


class MarkerQueue(BrokerRequestQueue[_QueuedMarkers]):
    _API_KEY = 27
    _PURPOSE = "markers"  # a response waits until the markers are committed
    _TIMEOUT_S = 10.0

    async def write(
        self,
        markers: TransactionMarkers,
        coordinator_epoch: int,
        partitions: tuple[TopicPartition, ...],
        is_over: Callable[[], bool],
    ) -> PartitionErrors:
        """Returns an error code for each partition. Markers are not sent any more once `is_over` returns True."""
        outcomes: asyncio.Future[PartitionErrors] = asyncio.get_running_loop().create_future()
        return await self.ask(_QueuedMarkers(markers, coordinator_epoch, partitions, is_over, outcomes))

    def _take(self) -> list[_QueuedMarkers]:
        entries, self._waiting = self._waiting[:_MARKERS_MAX], self._waiting[_MARKERS_MAX:]
        self._answer([entry for entry in entries if entry.is_over()], {}, ErrorCode.network_exception)
        return [entry for entry in entries if not entry.outcomes.done()]

    def _request(self, entries: list[_QueuedMarkers]) -> Any:
        from kio.schema.write_txn_markers.v2 import request as schema

        return schema.WriteTxnMarkersRequest(
            markers=tuple(
                schema.WritableTxnMarker(
                    producer_id=entry.markers.producer_id,
                    producer_epoch=entry.markers.epoch,
                    transaction_result=entry.markers.committed,
                    topics=tuple(
                        schema.WritableTxnMarkerTopic(name=topic, partition_indexes=tuple(indexes))
                        for topic, indexes in group_by_topic(sorted(entry.partitions))
                    ),
                    coordinator_epoch=entry.coordinator_epoch,
                    transaction_version=entry.markers.transaction_version,
                )
                for entry in entries
            )
        )

    def _errors_in(self, response: Any) -> ErrorsByKey:
        return {
            (marker.producer_id, TopicPartition(topic.name, partition.partition_index)): partition.error_code
            for marker in response.markers
            for topic in marker.topics
            for partition in topic.partitions
        }


#: Less than a coordinator waits for the response.
_COMMIT_S_MAX: Final = 8.0
#: How many leader elections of a coordinator this node may not have received yet.
_EPOCHS_AHEAD_MAX: Final = 100


class TxnMarkerEntry(NamedTuple):
    """A marker, and the partitions that it is to be written to."""

    marker: EndMarker
    #: The protocol version of the transaction.
    transaction_version: int
    partitions: Sequence[TopicPartition]


class _AppendedMarker(NamedTuple):
    """A marker that is in the log, but does not count before it is committed."""

    outcomes: PartitionErrors
    partition: TopicPartition
    committed: Awaitable[None]


class MarkerAppender:
    def __init__(
        self,
        *,
        metadata: ImageView,
        partitions: Partitions,
        groups: GroupCoordinator,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._metadata = metadata
        self._partitions = partitions
        self._groups = groups
        self._clock = clock
        self._metrics = metrics

    async def append(self, entries: Sequence[TxnMarkerEntry]) -> list[PartitionErrors]:
        """Append all markers in order, then wait until they are committed. Returns an error code for each partition."""
        errors: list[PartitionErrors] = []
        waiting: list[_AppendedMarker] = []
        coordinator_epoch_max = self._coordinator_epoch_max()
        for entry in entries:
            outcomes: PartitionErrors = {}
            errors.append(outcomes)
            if entry.marker.coordinator_epoch > coordinator_epoch_max:
                # It would fence every real coordinator of this producer.
                outcomes.update(dict.fromkeys(entry.partitions, ErrorCode.invalid_request))
                continue
            for partition in entry.partitions:
                try:
                    committed = self._append(partition, entry)
                except ApiError as error:
                    outcomes[partition] = error.code
                else:
                    outcomes[partition] = ErrorCode.none
                    if committed is not None:
                        waiting.append(_AppendedMarker(outcomes, partition, committed))
        if waiting:
            await _await_commits(waiting)
        for outcomes in errors:
            for code in outcomes.values():
                if code is not ErrorCode.none:
                    self._metrics.count_error("write_txn_markers", code.name)
        return errors

    def _coordinator_epoch_max(self) -> int:
        """The epoch of a coordinator is the leader epoch of its `__transaction_state` partition."""
        topic = self._metadata.image.topics.get(TRANSACTION_STATE)
        known = () if topic is None else topic.partitions.values()
        return max((partition.leader_epoch for partition in known), default=0) + _EPOCHS_AHEAD_MAX

    def _append(self, where: TopicPartition, entry: TxnMarkerEntry) -> Awaitable[None] | None:
        """Returns what to wait for, if anything. Raises ApiError."""
        if where.topic == CONSUMER_OFFSETS:
            return self._groups.write_marker(where.partition, entry.marker, entry.transaction_version)
        partition = self._partitions.find(where.topic, where.partition)
        if is_internal(where.topic):
            raise ApiError(
                ErrorCode.invalid_topic_exception, f"{where.topic} cannot be part of a transaction"
            )
        if not partition.has_enough_replicas:
            raise ApiError(ErrorCode.not_enough_replicas)
        offset = partition.append_marker(
            entry.marker, self._clock.now_ms(), transaction_version=entry.transaction_version
        )
        return None if offset < partition.high_watermark else partition.committed(offset)


async def _await_commits(waiting: list[_AppendedMarker]) -> None:
    codes = await asyncio.gather(*(_commit_error(each.committed) for each in waiting))
    for each, code in zip(waiting, codes, strict=True):
        each.outcomes[each.partition] = code


async def _commit_error(committed: Awaitable[None]) -> ErrorCode:
    try:
        async with asyncio.timeout(_COMMIT_S_MAX):
            await committed
    except ApiError as error:
        return error.code
    except TimeoutError:
        return ErrorCode.request_timed_out
    return ErrorCode.none


logger = logging.getLogger("penstock.transactions")

_BACKOFF: Final = ExponentialBackoff(base_ms=20, cap_ms=1_000)
#: How long to wait for a shard that is not available; most waits are a random part of it.
_SHARD_RETRY_S: Final = 1.0
#: How soon to look again for what is about to change.
_POLL_S: Final = 0.02
#: The marker is written, or the partition has a later transaction of the producer: this one has ended there.
_WRITTEN_CODES: Final = frozenset({ErrorCode.none, ErrorCode.invalid_producer_epoch})


class MarkerSender:
    """Has one task for each shard that this node leads, and one for each transaction that is ending."""

    def __init__(
        self,
        coordinator: TransactionCoordinator,
        context: CoordinatorContext,
        *,
        appender: MarkerAppender,
        brokers: BrokerCalls,
    ) -> None:
        self._coordinator = coordinator
        self._context = context
        self._environment = context.environment
        self._appender = appender
        self._brokers = brokers
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._queues: dict[int, MarkerQueue] = {}  # by broker
        self._ending: dict[str, asyncio.Task[None]] = {}  # by transactional id

    def serve(self, index: int) -> None:
        """Send the markers of a shard for as long as this node leads it."""
        task = self._serving.get(index)
        if task is None or task.done():
            self._serving[index] = self._environment.spawn(self._serve(index))

    async def _serve(self, index: int) -> None:
        while self._context.partitions.led(self._coordinator.topic.name, index) is not None:
            try:
                await self._serve_now(index)
            except ApiError:
                await asyncio.sleep(_SHARD_RETRY_S * random.random())
            except Exception:
                # If this task ended, no more transactions of the shard would end.
                logger.exception("markers of shard %d have to wait", index)
                await asyncio.sleep(_SHARD_RETRY_S)

    async def _serve_now(self, index: int) -> None:
        """Raises ApiError if the shard is not available."""
        active = await self._coordinator.active_shard(index)
        if self._coordinator.image_includes_epoch(index, active.leader_epoch):
            await self._serve_while_active(active)
        else:
            await asyncio.sleep(_POLL_S)

    async def _serve_while_active(self, active: ActiveShard[TransactionCoordinatorShard]) -> None:
        position: MarkersPosition | None = None
        while not active.is_closed:
            try:
                reply: MarkersReply = await active.submit(
                    lambda shard, token, after=position: shard.next_markers(after, token)  # type: ignore[misc]
                )
            except ApiError:
                # The shard is closed, or commits are stalled.
                await asyncio.sleep(_SHARD_RETRY_S * random.random())
                continue
            position = reply.position
            for markers in reply.markers:
                self._begin(active, markers)

    def _begin(self, active: ActiveShard[TransactionCoordinatorShard], markers: TransactionMarkers) -> None:
        name = markers.transactional_id
        task = self._ending[name] = self._environment.spawn(self._deliver(active, markers))
        task.add_done_callback(lambda done: self._ending.get(name) is done and self._ending.pop(name))

    async def ended(self, transactional_id: str, timeout_s: float) -> None:
        """Wait until the ending transaction has ended; if none is known, wait for a moment."""
        task = self._ending.get(transactional_id)
        if task is None:
            await asyncio.sleep(min(_POLL_S, timeout_s))
        else:
            await asyncio.wait((task,), timeout=timeout_s)

    async def _deliver(
        self, active: ActiveShard[TransactionCoordinatorShard], markers: TransactionMarkers
    ) -> None:
        left, attempt = markers.partitions, 0
        while not active.is_closed:
            outcomes = await self._write(active, markers, left)
            if ErrorCode.transaction_coordinator_fenced in outcomes.values():
                logger.warning("another coordinator ends the transaction of %s", markers.transactional_id)
                return
            written = tuple(partition for partition in left if outcomes[partition] in _WRITTEN_CODES)
            left = tuple(partition for partition in left if outcomes[partition] not in _WRITTEN_CODES)
            await self._report(active, markers, written)
            if not left:
                return
            await asyncio.sleep(_BACKOFF.spread_ms(attempt, random) / 1000)
            attempt += 1

    async def _write(
        self,
        active: ActiveShard[TransactionCoordinatorShard],
        markers: TransactionMarkers,
        partitions: tuple[TopicPartition, ...],
    ) -> PartitionErrors:
        outcomes: PartitionErrors = {}
        by_leader: dict[int, list[TopicPartition]] = {}
        for partition in partitions:
            state = self._context.metadata.image.partition(partition.topic, partition.partition)
            if state is None:
                outcomes[partition] = ErrorCode.none  # the partition is deleted
            elif not state.has_leader:
                outcomes[partition] = ErrorCode.leader_not_available
            else:
                by_leader.setdefault(state.leader, []).append(partition)
        writes = [self._write_to(leader, active, markers, led) for leader, led in by_leader.items()]
        # Usually there is one leader, and this saves a task.
        answers = [await writes[0]] if len(writes) == 1 else await asyncio.gather(*writes)
        for answer in answers:
            outcomes |= answer
        return outcomes

    async def _write_to(
        self,
        broker_id: int,
        active: ActiveShard[TransactionCoordinatorShard],
        markers: TransactionMarkers,
        partitions: list[TopicPartition],
    ) -> PartitionErrors:
        if broker_id == self._context.node_id:
            return await self._write_local(active, markers, partitions)
        return await self._queue_for(broker_id).write(
            markers, active.leader_epoch, tuple(partitions), lambda: active.is_closed
        )

    async def _write_local(
        self,
        active: ActiveShard[TransactionCoordinatorShard],
        markers: TransactionMarkers,
        partitions: list[TopicPartition],
    ) -> PartitionErrors:
        marker = EndMarker(markers.producer_id, markers.epoch, active.leader_epoch, markers.committed)
        try:
            (outcomes,) = await self._appender.append(
                (TxnMarkerEntry(marker, markers.transaction_version, partitions),)
            )
        except Exception:
            # The caller retries; otherwise the transaction would never end.
            logger.exception("markers of %s have to wait", markers.transactional_id)
            return dict.fromkeys(partitions, ErrorCode.unknown_server_error)
        return outcomes

    def _queue_for(self, broker_id: int) -> MarkerQueue:
        queue = self._queues.get(broker_id)
        if queue is None:
            queue = self._queues[broker_id] = MarkerQueue(broker_id, self._brokers, self._environment)
        return queue

    async def _report(
        self,
        active: ActiveShard[TransactionCoordinatorShard],
        markers: TransactionMarkers,
        written: tuple[TopicPartition, ...],
    ) -> None:
        """Report written markers to the shard. Retries until that succeeds, because no caller would retry it."""
        while not active.is_closed and (written or not markers.partitions):
            now_ms = self._environment.now_ms()
            try:
                await active.submit(
                    lambda shard, token, now_ms=now_ms: shard.markers_written(  # type: ignore[misc]
                        markers, written, token, now_ms=now_ms
                    )
                )
            except ApiError:
                await asyncio.sleep(_SHARD_RETRY_S * random.random())
            else:
                return
