"""Produce (key 0), v3-13. Appends on the event loop, in the order received; acks=0 sends no reply.

acks=1 is acknowledged from the page cache; acks=all when the high watermark has passed the batch, which under flush
policy `ack` means that every in-sync replica has synced it. Below min.insync.replicas nothing counts as committed: a
batch that was appended before the ISR shrank waits until the ISR grows again, and gets REQUEST_TIMED_OUT if that takes
too long (30 seconds if the client gives no timeout: long enough for the node's own sync).
NOT_ENOUGH_REPLICAS_AFTER_APPEND ("committed, but by too few") is therefore never sent.

A transactional batch whose transaction is open in the partition is appended like any other. Before the first batch of
a transaction the leader verifies the transaction with the coordinator, and refuses a producer that has none. A
duplicate inside the idempotent window gets its original offset, whatever the topic's current settings. What happens to
a batch without room is up to the topic's overflow policy: KAFKA_STORAGE_ERROR and a throttled connection (block),
POLICY_VIOLATION (reject), or success with offset -1 for a batch that is not stored (drop-newest, shedding). Batches of
topics that must be decoded (compacted, or with their own codec) are decoded in a thread and then appended in order. A
client that produces to a broker that is not the leader gets the leader and its address (v10). A request of more than
100 topics and partitions is parsed, appended and answered in time slices; later requests of the connection wait until
it is appended.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.broker.network.connection import CLOSE_CONNECTION, Connection, PendingReply, Reply
from penstock.broker.network.frame_buffers import kept
from penstock.broker.network.requests import RequestContext, send_later
from penstock.broker.network.topic_access import may_use_topic, topic_refused
from penstock.broker.partition.client_view import LeaderHints, find_topic
from penstock.broker.partition.overflow import HOLD_MS, NoRoomYet
from penstock.broker.partition.produced_batch import duplicate_or_raise, find_duplicate
from penstock.cluster.topic_names import AUDIT
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode, InvalidRecords
from penstock.protocol.produce import (
    TOPIC_IDS_FROM,
    ManyPartitions,
    NodeEndpoint,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceTopic,
    encode_produce_response,
    encode_produce_response_in_steps,
    parse_produce_request,
    parse_produce_request_in_steps,
)
from penstock.protocol.record_batch import BATCH_HEADER_BYTES, NO_PRODUCER_ID, TRANSACTIONAL
from penstock.protocol.steps import Steps, finish
from penstock.security.quotas import PRODUCER_BYTE_RATE

if TYPE_CHECKING:
    from penstock.broker.coordinators.transactions.verification import TransactionalWriter, VerificationResult
    from penstock.broker.partition.partition import OnCommit, Partition
    from penstock.log.log import LogAppendInfo
    from penstock.log.producer_state import VerificationGuard
    from penstock.security.authorizer import Authorizer
    from penstock.security.principal import Principal

_ACKS_ALL, _ACKS_NONE = -1, 0
_LEGAL_ACKS = frozenset({-1, 0, 1})
_ATTRIBUTES_LOW_BYTE = 22
_PRODUCER = struct.Struct(">qhi")  # id, epoch, sequence
_PRODUCER_POSITION = 43
#: Of a request in slices: how many partitions are verified together, and in how many one step looks for transactions.
_VERIFIED_TOGETHER = 50
_LOOKED_AT_TOGETHER = 200
#: For clients that send no timeout.
_TIMEOUT_MS_DEFAULT = 30_000
#: Producers retry the same batch after these errors.
_RETRIABLE_ERRORS = frozenset(
    {
        ErrorCode.not_enough_replicas,
        ErrorCode.not_leader_or_follower,
        ErrorCode.kafka_storage_error,
        ErrorCode.concurrent_transactions,
    }
)

#: The message beside a success without offset, for clients that look.
_NOT_STORED = "not stored: the topic drops records that it has no room for, or is being shed"

Results = list[PartitionProduceResponse]


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | PendingReply:
    version, services = ctx.version, ctx.services
    try:
        request = parse_produce_request(frame, position, version)
    except ManyPartitions as many:
        throttle_ms = _throttle(ctx, connection, len(frame)) if services.quotas.limits_produce else 0
        return _handle_in_slices(ctx, connection, frame, position, correlation_id, many.acks, throttle_ms)
    throttle_ms = _throttle(ctx, connection, len(frame)) if services.quotas.limits_produce else 0
    topics: list[tuple[bytes, Results]] = []
    waiting: _DelayedProduce | None = None
    allowed = request.topics
    if services.authorizer is not None and not _may_write_again(
        connection, services.authorizer, request, ctx.principal, by_id=version >= TOPIC_IDS_FROM
    ):
        allowed = _allowed_topics(ctx, request, topics)
    for name, parts in allowed:
        topics.append((name, []))
        waiting = _append(ctx, connection, request, correlation_id, topics, parts, waiting)
    if waiting is not None:
        return waiting.begin(throttle_ms)
    if services.metrics.held_producers:
        throttle_ms = max(throttle_ms, connection.throttle_ms)
    return _response(ctx, correlation_id, request.acks, topics, throttle_ms)


def _append(
    ctx: RequestContext,
    connection: Connection,
    request: ProduceRequest,
    correlation_id: int,
    topics: list[tuple[bytes, Results]],
    parts: Sequence[tuple[int, memoryview | None]],
    waiting: _DelayedProduce | None,
) -> _DelayedProduce | None:
    """Append to partitions of the last of `topics`, and add their results to it.

    Returns what waits for some of the results, if anything does.
    """
    services, acks = ctx.services, request.acks
    now_ms = services.now_ms()
    partitions_of = (
        services.partitions.by_raw_id if ctx.version >= TOPIC_IDS_FROM else services.partitions.by_raw_name
    )
    name, results = topics[-1]
    found = partitions_of.get(name)
    for index, records in parts:
        partition = None if found is None else found.get(index)
        try:
            if partition is None:
                raise _missing_partition_error(ctx, name, index)
            _check_writable(partition, records, acks, by_node=connection.is_inter_broker)
            assert records is not None
            writer = None
            if records[_ATTRIBUTES_LOW_BYTE] & TRANSACTIONAL:
                writer = _writer(ctx, request, records)
                if services.transactions.admission.must_wait(partition, writer):
                    waiting = waiting or _DelayedProduce(ctx, connection, request, correlation_id, topics)
                    waiting.verify(partition, records, results, writer)
                    continue
            if partition.takes_turns:
                waiting = waiting or _DelayedProduce(ctx, connection, request, correlation_id, topics)
                waiting.prepare(partition, records, results, writer)
                continue
            try:
                appended = partition.append(records, now_ms)
            except ApiError as error:
                appended = duplicate_or_raise(partition, records, error)
        except ApiError as error:
            if partition is not None and records is not None:
                _note_retriable_error(partition, records, error)
            results.append(_error_result(ctx, name, index, error))
            continue
        results.append(_result(partition, appended))
        if acks == _ACKS_ALL and appended.last_offset >= partition.high.offset:
            waiting = waiting or _DelayedProduce(ctx, connection, request, correlation_id, topics)
            waiting.for_commit(partition, appended.last_offset, results, len(results) - 1)
    return waiting


def _handle_in_slices(
    ctx: RequestContext,
    connection: Connection,
    frame: memoryview,
    position: int,
    correlation_id: int,
    acks: int,
    throttle_ms: int,
) -> PendingReply:
    """Handle a request of many partitions. Later requests of the connection wait until all of it is appended."""
    frame = kept(frame)
    ctx.services.server.buffers.hold(len(frame))
    connection.hold()
    reply = _ReplyInSlices(ctx, connection, correlation_id, acks, throttle_ms)
    # A producer with acks=0 may close the connection as soon as it has sent its records.
    return send_later(ctx, connection, reply.make(frame, position), until_done=reply.until_done)


class _ReplyInSlices:
    """Makes the reply to a request of many partitions."""

    def __init__(
        self,
        ctx: RequestContext,
        connection: Connection,
        correlation_id: int,
        acks: int,
        throttle_ms: int,
    ) -> None:
        self._ctx = ctx
        self._connection = connection
        self._correlation_id = correlation_id
        self._acks = acks
        self.until_done = acks == _ACKS_NONE
        self._topics: list[tuple[bytes, Results]] = []
        self._throttle_ms = throttle_ms

    async def make(self, frame: memoryview, position: int) -> Reply:
        ctx, connection = self._ctx, self._connection
        try:
            appending = self._append(frame, position)
            waiting = await ctx.finish_in_slices(appending, until_done=self.until_done)
        finally:
            ctx.services.server.buffers.release(len(frame))
            connection.release()
        if waiting is not None:
            await waiting.completed(until_done=self.until_done)
        throttle_ms = max(self._throttle_ms, connection.throttle_ms)
        reply = _response_in_steps(ctx, self._correlation_id, self._acks, self._topics, throttle_ms)
        return await ctx.finish_in_slices(reply, until_done=self.until_done)

    def _append(self, frame: memoryview, position: int) -> Steps[_DelayedProduce | None]:
        ctx, connection, topics = self._ctx, self._connection, self._topics
        request = yield from parse_produce_request_in_steps(frame, position, ctx.version)
        refusal = None
        if ctx.services.authorizer is not None and (yield from _is_transactional(request)):
            refusal = _transaction_refusal(ctx, request)
        waiting: _DelayedProduce | None = None
        number = 0
        for name, parts in request.topics:
            results: Results = []
            topics.append((name, results))
            error = refusal or _topic_refusal(ctx, name)
            for part in parts:
                if error is not None:
                    results.append(_error_result(ctx, name, part[0], error))
                else:
                    waiting = _append(
                        ctx, connection, request, self._correlation_id, topics, (part,), waiting
                    )
                number += 1
                if waiting is not None and number % _VERIFIED_TOGETHER == 0:
                    waiting.enqueue_verifications()
                yield
            yield
        return waiting


def _is_transactional(request: ProduceRequest) -> Steps[bool]:
    """Whether any batch of a request of many partitions is transactional."""
    for _, parts in request.topics:
        for begin in range(0, len(parts), _LOOKED_AT_TOGETHER):
            if _has_transactional(parts[begin : begin + _LOOKED_AT_TOGETHER]):
                return True
            yield
    return False


def _throttle(ctx: RequestContext, connection: Connection, size: int) -> int:
    """Count the request towards the quota; return for how many milliseconds the client is throttled.

    Raises Postponed.
    """
    meter, client_id = connection.meters.get(PRODUCER_BYTE_RATE), ctx.client_id
    if (
        meter is not None
        and meter.client_id == client_id
        and (pending := meter.pending + size) <= meter.slack
    ):
        meter.pending = pending
        return 0
    services = ctx.services
    now_ms = services.now_ms()
    services.quotas.await_turn(PRODUCER_BYTE_RATE, connection, client_id, size, now_ms)
    return services.quotas.throttle(PRODUCER_BYTE_RATE, connection, client_id, size, now_ms)


def _may_write_again(
    connection: Connection,
    authorizer: Authorizer,
    request: ProduceRequest,
    principal: Principal,
    *,
    by_id: bool,
) -> bool:
    """Most requests are about one partition, of a topic that the client has been allowed to write before.

    If its batch is transactional without a transactional id, `_writer` refuses it.
    """
    decisions, topics = connection.decisions, request.topics
    return (
        decisions is not None
        and decisions.generation == authorizer.generation
        and decisions.principal is principal
        and len(topics) == 1
        and len(topics[0][1]) == 1
        and request.transactional_id is None
        and topics[0][0] in decisions.writable[by_id]
    )


def _allowed_topics(
    ctx: RequestContext, request: ProduceRequest, topics: list[tuple[bytes, Results]]
) -> list[ProduceTopic]:
    """Return what the client may append; the results of the rest go to `topics`."""
    allowed = []
    refusal = None
    if any(_has_transactional(parts) for _, parts in request.topics):
        refusal = _transaction_refusal(ctx, request)
    for name, parts in request.topics:
        error = refusal or _topic_refusal(ctx, name)
        if error is None:
            allowed.append((name, parts))
        else:
            topics.append((name, [_error_result(ctx, name, index, error) for index, _ in parts]))
    return allowed


def _topic_refusal(ctx: RequestContext, name: bytes) -> ApiError | None:
    """Return why the client may not write the topic, if it may not."""
    if ctx.services.authorizer is None:
        return None
    partitions = ctx.services.partitions
    partitions_of = partitions.by_raw_id if ctx.version >= TOPIC_IDS_FROM else partitions.by_raw_name
    return None if may_use_topic(ctx, Operation.WRITE, name, partitions_of.get(name)) else topic_refused()


def _transaction_refusal(ctx: RequestContext, request: ProduceRequest) -> ApiError | None:
    """Return why no transactional batch is appended, if the client may not use the transactional id."""
    name = request.transactional_id
    if name is not None and ctx.demand(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, name):
        return None
    return ApiError(ErrorCode.transactional_id_authorization_failed)


def _has_transactional(parts: Sequence[tuple[int, memoryview | None]]) -> bool:
    return any(
        records is not None
        and len(records) >= BATCH_HEADER_BYTES
        and records[_ATTRIBUTES_LOW_BYTE] & TRANSACTIONAL
        for _, records in parts
    )


def _missing_partition_error(ctx: RequestContext, name: bytes, index: int) -> ApiError:
    by_id = ctx.version >= TOPIC_IDS_FROM
    topic = find_topic(ctx.services.image, name, by_id=by_id)
    return ctx.services.partitions.missing_partition_error(topic, index, by_id=by_id)


def _check_writable(partition: Partition, records: memoryview | None, acks: int, *, by_node: bool) -> None:
    """Raises ApiError if the records may not be appended to the partition."""
    if not partition.is_leader:
        raise ApiError(ErrorCode.not_leader_or_follower)
    if records is None or len(records) < BATCH_HEADER_BYTES:
        raise ApiError(ErrorCode.invalid_record, "a produce request carries exactly one record batch")
    if partition.is_internal and not (by_node and partition.topic == AUDIT):
        raise ApiError(ErrorCode.invalid_topic_exception, f"{partition.topic} is an internal topic")
    if acks == _ACKS_ALL:
        if partition.isr_size < partition.isr_needed:
            raise ApiError(
                ErrorCode.not_enough_replicas,
                f"{partition.isr_size} replicas are in sync, min.insync.replicas is "
                f"{partition.min_insync_replicas}",
            )
    elif acks not in _LEGAL_ACKS:
        raise ApiError(ErrorCode.invalid_required_acks, f"acks={acks} is none of -1, 0 and 1")


def _writer(ctx: RequestContext, request: ProduceRequest, records: memoryview) -> TransactionalWriter:
    """Raises ApiError if the batch has no transactional id or no producer id."""
    from penstock.broker.coordinators.transactions.verification import TransactionalWriter

    if request.transactional_id is None:
        message = "a transactional batch in a request without transactional id"
        raise ApiError(ErrorCode.transactional_id_authorization_failed, message)
    producer_id, epoch, _ = _PRODUCER.unpack_from(records, _PRODUCER_POSITION)
    if producer_id == NO_PRODUCER_ID:
        raise ApiError(ErrorCode.invalid_record, "a transactional batch without producer id")
    return TransactionalWriter(request.transactional_id, producer_id, epoch, ctx.version)


def _note_retriable_error(partition: Partition, records: memoryview, error: ApiError) -> None:
    """Remembers the refused batch, so that the producer's next batches are not taken for a sequence gap."""
    if error.code in _RETRIABLE_ERRORS and len(records) >= BATCH_HEADER_BYTES:
        producer_id, epoch, sequence = _PRODUCER.unpack_from(records, _PRODUCER_POSITION)
        if producer_id != NO_PRODUCER_ID:
            partition.log.producers.refused(producer_id, epoch, sequence, error.code)


def _result(partition: Partition, appended: LogAppendInfo) -> PartitionProduceResponse:
    base_offset = appended.base_offset
    return PartitionProduceResponse(
        partition.index,
        0,
        base_offset,
        appended.append_time_ms,
        partition.log.start_offset,
        None if base_offset >= 0 else _NOT_STORED,
    )


def _error_result(ctx: RequestContext, topic: bytes, index: int, error: ApiError) -> PartitionProduceResponse:
    ctx.services.metrics.count_error("produce", error.code.name)
    if isinstance(error, NoRoomYet):
        ctx.services.metrics.held_producers += 1
        if ctx.connection is not None and not ctx.connection.is_inter_broker:
            ctx.connection.throttle(HOLD_MS)
    indexes = error.indexes if isinstance(error, InvalidRecords) else ()
    leader = None
    if error.code is ErrorCode.not_leader_or_follower:
        leader = _leader_hints(ctx).leader(topic, index, error.code)
    return PartitionProduceResponse(
        index, error.code.value, message=error.message, record_errors=indexes, current_leader=leader
    )


def _leader_hints(ctx: RequestContext) -> LeaderHints:
    services, by_id = ctx.services, ctx.version >= TOPIC_IDS_FROM
    return LeaderHints(services.metadata, services.partitions, ctx.listener, by_id=by_id)


def _response(
    ctx: RequestContext, correlation_id: int, acks: int, topics: list[tuple[bytes, Results]], throttle_ms: int
) -> Reply:
    if acks != _ACKS_NONE:
        for _, results in topics:
            for result in results:
                if result.current_leader is not None:
                    endpoints = finish(_endpoints(ctx, topics))
                    return encode_produce_response(
                        ctx.version, correlation_id, topics, endpoints, throttle_ms
                    )
        return encode_produce_response(ctx.version, correlation_id, topics, (), throttle_ms)
    if any(result.error for _, results in topics for result in results):
        # The only way to report an error to a client that waits for no reply, as in Apache Kafka.
        return CLOSE_CONNECTION
    return None


def _response_in_steps(
    ctx: RequestContext, correlation_id: int, acks: int, topics: list[tuple[bytes, Results]], throttle_ms: int
) -> Steps[Reply]:
    """The same for many partitions."""
    if acks == _ACKS_NONE:
        return _response(ctx, correlation_id, acks, topics, throttle_ms)
    endpoints = yield from _endpoints(ctx, topics)
    return (
        yield from encode_produce_response_in_steps(
            ctx.version, correlation_id, topics, endpoints, throttle_ms
        )
    )


def _endpoints(ctx: RequestContext, topics: list[tuple[bytes, Results]]) -> Steps[tuple[NodeEndpoint, ...]]:
    """The leaders that the results name."""
    hints = _leader_hints(ctx)
    for name, results in topics:
        for result in results:
            if result.current_leader is not None:
                hints.leader(name, result.partition, ErrorCode.not_leader_or_follower)
            yield
    return tuple(hints.endpoints.values())


class _DeferredBatch(NamedTuple):
    """A batch that cannot be appended at once, and the index of its result."""

    partition: Partition
    records: bytearray
    results: Results
    place: int
    key: tuple[int, int]


class _DelayedProduce:
    """A produce request of which some partitions are not complete yet."""

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
        self._timeout_ms = request.timeout_ms if request.timeout_ms > 0 else _TIMEOUT_MS_DEFAULT
        self._correlation_id = correlation_id
        self._topics = topics
        self._open: set[tuple[int, int]] = set()  # (identity of the results list, index in it)
        self._lists: dict[int, Results] = {}
        self._commits: list[tuple[Partition, OnCommit]] = []
        self._unverified: dict[TransactionalWriter, list[_DeferredBatch]] = {}
        self._slot: PendingReply | None = None
        self._completed: asyncio.Future[None] | None = None  # of a request in slices
        self._timer: asyncio.TimerHandle | None = None
        self._throttle_ms = 0

    def for_commit(self, partition: Partition, last_offset: int, results: Results, place: int) -> None:
        key = self._opened(results, place)

        def committed(error: ApiError | None) -> None:
            if error is not None and key in self._open:
                results[place] = self._refused(partition, error)
            self._done(key)

        self._commits.append((partition, committed))
        partition.when_committed(last_offset, committed)

    def prepare(
        self, partition: Partition, records: memoryview, results: Results, writer: TransactionalWriter | None
    ) -> None:
        """Decodes the batch off the event loop."""
        late = self._begin(partition, records, results)
        turn = self._append_in_order(late, partition.last_turn, writer, None)
        task = self._ctx.services.spawn(self._finish(turn, late))
        partition.begin_turn(task)
        self._hold_memory(len(records), task)

    def verify(
        self, partition: Partition, records: memoryview, results: Results, writer: TransactionalWriter
    ) -> None:
        """Holds the batch until the coordinator verifies the transaction, for all batches of a writer at once."""
        self._unverified.setdefault(writer, []).append(self._begin(partition, records, results))

    def enqueue_verifications(self) -> None:
        for writer, batches in self._unverified.items():
            self._enqueue_verification(writer, batches)
        self._unverified.clear()

    def _enqueue_verification(self, writer: TransactionalWriter, batches: list[_DeferredBatch]) -> None:
        """Later batches of the same producer wait for these."""
        task = self._ctx.services.transactions.admission.queue_append(
            [late.partition for late in batches], writer, partial(self._append_verified, batches, writer)
        )
        self._hold_memory(sum(len(late.records) for late in batches), task)

    def _begin(self, partition: Partition, records: memoryview, results: Results) -> _DeferredBatch:
        """Copies the bytes, because the frame's buffer is reused meanwhile. Raises ApiError."""
        max_bytes = partition.log.config.max_message_bytes
        if len(records) > max_bytes and find_duplicate(partition, records) is None:
            raise ApiError(
                ErrorCode.message_too_large,
                f"record batch of {len(records)} bytes, the topic takes {max_bytes}",
            )
        place = len(results)
        results.append(PartitionProduceResponse(partition.index, ErrorCode.request_timed_out.value))
        return _DeferredBatch(partition, bytearray(records), results, place, self._opened(results, place))

    def _hold_memory(self, size: int, task: asyncio.Task[None]) -> None:
        server = self._ctx.services.server
        server.buffers.hold(size)
        task.add_done_callback(lambda _: server.buffers.release(size))
        if server.buffers.is_full:
            server.wait_for_memory(self._connection)

    async def _finish(self, appending: Coroutine[None, None, LogAppendInfo], late: _DeferredBatch) -> None:
        partition, _, results, place, key = late
        try:
            appended = await appending
        except ApiError as error:
            results[place] = self._refused(partition, error)
        except Exception:
            self._ctx.services.server.failed(self._connection)
        else:
            results[place] = _result(partition, appended)
            if (
                key in self._open
                and self._acks == _ACKS_ALL
                and appended.last_offset >= partition.high.offset
            ):
                self.for_commit(partition, appended.last_offset, results, place)
                return
        self._done(key)

    async def _append_in_order(
        self,
        late: _DeferredBatch,
        previous: asyncio.Task[Any] | None,
        writer: TransactionalWriter | None,
        guard: VerificationGuard | None,
    ) -> LogAppendInfo:
        """Prepares the batch in parallel with others, and appends it in the order of arrival."""
        services, partition = self._ctx.services, late.partition
        prepared = services.spawn(
            services.preparer.prepare_in_thread(
                partition, late.records, self._connection, is_owed=self._acks != _ACKS_NONE
            )
        )
        if previous is not None:
            await asyncio.wait([previous])
        try:
            ready = memoryview(await prepared)
        except ApiError as error:
            partition.check_leader()
            return duplicate_or_raise(partition, memoryview(late.records), error)
        return self._append_prepared(partition, ready, writer, guard)

    async def _append_verified(
        self, batches: list[_DeferredBatch], writer: TransactionalWriter, previous: set[asyncio.Task[None]]
    ) -> None:
        if previous:
            await asyncio.wait(previous)
        partitions = [late.partition for late in batches]
        try:
            verifications = await self._ctx.services.transactions.admission.verifications(partitions, writer)
        except Exception:
            self._ctx.services.server.failed(self._connection)
            return
        appending = [
            self._finish(self._append_if_verified(late, writer, verifications[late.partition]), late)
            for late in batches
        ]
        if any(partition.takes_turns for partition in partitions):
            await asyncio.gather(*appending)
            return
        for each in appending:
            await each  # none of them waits, so none needs a task

    async def _append_if_verified(
        self, late: _DeferredBatch, writer: TransactionalWriter, word: VerificationResult
    ) -> LogAppendInfo:
        partition, records = late.partition, late.records
        if isinstance(word, ApiError):
            _note_retriable_error(partition, memoryview(records), word)
            raise word
        if not partition.takes_turns:
            return self._append_prepared(partition, memoryview(records), writer, word)
        turn = self._ctx.services.spawn(self._append_in_order(late, partition.last_turn, writer, word))
        partition.begin_turn(turn)
        return await turn

    def _append_prepared(
        self,
        partition: Partition,
        batch: memoryview,
        writer: TransactionalWriter | None,
        guard: VerificationGuard | None,
    ) -> LogAppendInfo:
        """Checks the partition again, because it may have changed while the batch waited. Raises ApiError."""
        services = self._ctx.services
        if partition.is_retired:
            raise ApiError(ErrorCode.unknown_topic_or_partition, "the topic was deleted")
        try:
            partition.check_leader()
            if writer is not None and guard is None:
                services.transactions.admission.check_open(partition, writer)
            try:
                return partition.append(batch, services.now_ms(), guard)
            except ApiError as error:
                return duplicate_or_raise(partition, batch, error)
        except ApiError as error:
            _note_retriable_error(partition, batch, error)
            raise

    def begin(self, throttle_ms: int) -> PendingReply:
        self._throttle_ms = throttle_ms
        self.enqueue_verifications()
        self._slot = self._connection.defer(self._ctx.api_key)
        if not self._open:
            self._reply()
        else:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_ms / 1000, self._timed_out)
        return self._slot

    async def completed(self, *, until_done: bool) -> None:
        """For a request in slices, instead of `begin`: wait until all results are there."""
        self.enqueue_verifications()
        if self._open:
            self._completed = asyncio.get_running_loop().create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeout_ms / 1000):
                    await self._completed
            await self._ctx.finish_in_slices(self._give_up(), until_done=until_done)
        self._commits.clear()

    def _refused(self, partition: Partition, error: ApiError) -> PartitionProduceResponse:
        by_id = self._ctx.version >= TOPIC_IDS_FROM
        topic = partition.topic_id.bytes if by_id else partition.topic.encode()
        return _error_result(self._ctx, topic, partition.index, error)

    def _opened(self, results: Results, place: int) -> tuple[int, int]:
        key = (id(results), place)
        self._lists[key[0]] = results
        self._open.add(key)
        return key

    def _done(self, key: tuple[int, int]) -> None:
        if key in self._open:
            self._open.discard(key)
            if self._open:
                return
            if self._slot is not None:
                self._reply()
            elif self._completed is not None and not self._completed.done():
                self._completed.set_result(None)

    def _timed_out(self) -> None:
        finish(self._give_up())
        self._reply()

    def _give_up(self) -> Steps[None]:
        """What is not complete has timed out."""
        is_late = bool(self._open)
        while self._open:
            identity, place = self._open.pop()
            results = self._lists[identity]
            results[place] = PartitionProduceResponse(
                results[place].partition, ErrorCode.request_timed_out.value
            )
            yield
        if is_late:
            for partition, committed in self._commits:
                partition.give_up(committed)
                yield

    def _reply(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._commits.clear()  # breaks the reference cycle, which would live until the next garbage collection
        assert self._slot is not None
        throttle_ms = max(self._throttle_ms, self._connection.throttle_ms)
        reply = _response(self._ctx, self._correlation_id, self._acks, self._topics, throttle_ms)
        self._connection.fulfil(self._slot, reply)
