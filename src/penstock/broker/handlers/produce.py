"""Produce (key 0), v3-13. Appends on the loop, in the order received; acks=0 sends no reply.

acks=1 is answered from the page cache; acks=all when the high watermark has passed, which under flush policy
`ack` means synced. A repeat inside the idempotent window gets its original offset. Topics that must be looked
into (compacted, or with a codec of their own) are decoded in a thread and appended in order afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from penstock.broker.connection import HANG_UP, Connection, Reply, Slot
from penstock.broker.context import RequestContext
from penstock.protocol.errors import ApiError, ErrorCode, InvalidRecords
from penstock.protocol.produce import (
    TOPIC_IDS_FROM,
    PartitionResult,
    ProduceRequest,
    encode_produce_response,
    parse_produce,
)
from penstock.protocol.records import HEADER_BYTES, TRANSACTIONAL

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.partition import Partition
    from penstock.log.log import Appended

_ACKS_ALL, _ACKS_NONE = -1, 0
_LEGAL_ACKS = frozenset({-1, 0, 1})
_ATTRIBUTES_LOW_BYTE = 22

Results = list[PartitionResult]


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | Slot:
    version, node = ctx.version, ctx.node
    request = parse_produce(frame, position, version)
    partitions_of = node.partitions.by_raw_id if version >= TOPIC_IDS_FROM else node.partitions.by_raw_name
    unknown = (
        ErrorCode.unknown_topic_id if version >= TOPIC_IDS_FROM else ErrorCode.unknown_topic_or_partition
    )
    acks, now_ms = request.acks, node.now_ms()
    topics: list[tuple[bytes, Results]] = []
    waiting: _Waiting | None = None
    for name, parts in request.topics:
        results: Results = []
        topics.append((name, results))
        found = partitions_of.get(name)
        for index, records in parts:
            try:
                partition = _writable(found, index, records, acks, unknown)
                assert records is not None
                if partition.takes_turns:
                    waiting = waiting or _Waiting(ctx, connection, request, correlation_id, topics)
                    waiting.prepare(partition, records, results)
                    continue
                appended = partition.append(records, now_ms)
            except ApiError as error:
                results.append(_refused(node, index, error))
                continue
            results.append(
                PartitionResult(
                    index, 0, appended.base_offset, appended.append_time_ms, partition.log.start_offset
                )
            )
            if acks == _ACKS_ALL and appended.last_offset >= partition.high.offset:
                waiting = waiting or _Waiting(ctx, connection, request, correlation_id, topics)
                waiting.for_commit(partition, appended.last_offset, results, len(results) - 1)
    if waiting is not None:
        return waiting.begin()
    return _finished(version, correlation_id, acks, topics)


def _writable(
    found: dict[int, Partition] | None,
    index: int,
    records: memoryview | None,
    acks: int,
    unknown: ErrorCode,
) -> Partition:
    """The partition, if this may be appended to it."""
    if found is None:
        raise ApiError(unknown)
    partition = found.get(index)
    if partition is None:
        raise ApiError(ErrorCode.unknown_topic_or_partition)
    if records is None or len(records) < HEADER_BYTES:
        raise ApiError(ErrorCode.invalid_record, "a produce request carries exactly one record batch")
    if partition.is_internal:
        raise ApiError(ErrorCode.invalid_topic_exception, f"{partition.topic} is an internal topic")
    if records[_ATTRIBUTES_LOW_BYTE] & TRANSACTIONAL:
        # As InitProducerId and FindCoordinator say it: clients take this code as final.
        message = "transactions are not supported by this broker"
        raise ApiError(ErrorCode.transactional_id_authorization_failed, message)
    if acks == _ACKS_ALL:
        # No more can be in sync than there are: one replica is enough where there is one.
        if partition.isr_size < min(partition.min_insync_replicas, partition.replica_count):
            raise ApiError(
                ErrorCode.not_enough_replicas,
                f"{partition.isr_size} replicas are in sync, min.insync.replicas is "
                f"{partition.min_insync_replicas}",
            )
    elif acks not in _LEGAL_ACKS:
        raise ApiError(ErrorCode.invalid_required_acks, f"acks={acks} is none of -1, 0 and 1")
    return partition


def _refused(node: Node, index: int, error: ApiError) -> PartitionResult:
    node.metrics.count_error("produce", error.code.name)
    places = error.places if isinstance(error, InvalidRecords) else ()
    return PartitionResult(index, error.code.value, message=error.message, record_errors=places)


def _finished(version: int, correlation_id: int, acks: int, topics: list[tuple[bytes, Results]]) -> Reply:
    if acks != _ACKS_NONE:
        return encode_produce_response(version, correlation_id, topics)
    if any(result.error for _, results in topics for result in results):
        # The only way to tell a client that waits for no answer, as Apache Kafka does.
        return HANG_UP
    return None


class _Waiting:
    """A produce request some of whose partitions are not done yet."""

    def __init__(
        self,
        ctx: RequestContext,
        connection: Connection,
        request: ProduceRequest,
        correlation_id: int,
        topics: list[tuple[bytes, Results]],
    ) -> None:
        self._ctx = ctx
        self._connection = connection
        self._acks = request.acks
        self._timeout_ms = request.timeout_ms
        self._correlation_id = correlation_id
        self._topics = topics
        self._open: set[tuple[int, int]] = set()  # (identity of the results list, place in it)
        self._lists: dict[int, Results] = {}
        self._slot: Slot | None = None
        self._timer: asyncio.TimerHandle | None = None

    def for_commit(self, partition: Partition, last_offset: int, results: Results, place: int) -> None:
        key = self._opened(results, place)

        def committed(error: ApiError | None) -> None:
            if error is not None and key in self._open:
                results[place] = _refused(self._ctx.node, partition.index, error)
            self._done(key)

        partition.when_committed(last_offset, committed)

    def prepare(self, partition: Partition, records: memoryview, results: Results) -> None:
        """Decode off the loop; the bytes are copied because the frame's buffer is reused meanwhile."""
        max_bytes = partition.log.config.max_message_bytes
        if len(records) > max_bytes:
            raise ApiError(
                ErrorCode.message_too_large,
                f"record batch of {len(records)} bytes, the topic takes {max_bytes}",
            )
        place = len(results)
        results.append(PartitionResult(partition.index, ErrorCode.request_timed_out.value))
        key = self._opened(results, place)
        turn = self._append_in_turn(partition, bytearray(records), partition.last_turn)
        task = self._ctx.node.spawn(self._take_turn(turn, partition, results, place, key))
        partition.begin_turn(task)
        self._hold_memory(len(records), task)

    def _hold_memory(self, size: int, task: asyncio.Task[None]) -> None:
        server = self._ctx.node.server
        server.buffers.hold(size)
        task.add_done_callback(lambda _: server.buffers.release(size))
        if server.buffers.is_full:
            server.wait_for_memory(self._connection)

    async def _take_turn(
        self,
        turn: Coroutine[None, None, Appended],
        partition: Partition,
        results: Results,
        place: int,
        key: tuple[int, int],
    ) -> None:
        try:
            appended = await turn
        except ApiError as error:
            results[place] = _refused(self._ctx.node, partition.index, error)
        except Exception:
            self._ctx.node.server.failed(self._connection)
        else:
            results[place] = PartitionResult(
                partition.index, 0, appended.base_offset, appended.append_time_ms, partition.log.start_offset
            )
            if (
                key in self._open
                and self._acks == _ACKS_ALL
                and appended.last_offset >= partition.high.offset
            ):
                self.for_commit(partition, appended.last_offset, results, place)
                return
        self._done(key)

    async def _append_in_turn(
        self, partition: Partition, records: bytearray, previous: asyncio.Task[None] | None
    ) -> Appended:
        """Batches are prepared side by side and appended in the order in which they came."""
        node = self._ctx.node
        prepared = node.in_thread(node.prepare_batch, partition, records)
        if previous is not None:
            await asyncio.wait([previous])
        batch = memoryview(await prepared)
        if partition.is_retired:
            raise ApiError(ErrorCode.unknown_topic_or_partition, "the topic was deleted")
        return partition.append(batch, node.now_ms())

    def begin(self) -> Slot:
        self._slot = self._connection.defer(self._ctx.api_key)
        if not self._open:
            self._reply()
        elif self._timeout_ms > 0:  # without it a client waits for this node only, and for its sync
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_ms / 1000, self._timed_out)
        return self._slot

    def _opened(self, results: Results, place: int) -> tuple[int, int]:
        key = (id(results), place)
        self._lists[key[0]] = results
        self._open.add(key)
        return key

    def _done(self, key: tuple[int, int]) -> None:
        if key in self._open:
            self._open.discard(key)
            if not self._open and self._slot is not None:
                self._reply()

    def _timed_out(self) -> None:
        for identity, place in self._open:
            results = self._lists[identity]
            results[place] = PartitionResult(results[place].partition, ErrorCode.request_timed_out.value)
        self._open.clear()
        self._reply()

    def _reply(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        assert self._slot is not None
        reply = _finished(self._ctx.version, self._correlation_id, self._acks, self._topics)
        self._connection.fulfil(self._slot, reply)
