"""Produce (key 0), v3-13. Appends on the loop, in the order received; acks=0 sends no reply.

acks=1 is answered from the page cache; acks=all when the high watermark has passed, which under flush policy
`ack` means synced by every replica of the in-sync set. Below min.insync.replicas nothing is called committed: what
was appended before the set shrank waits for it to grow again, and is answered REQUEST_TIMED_OUT if that takes too
long (30 seconds for a client that gives no time: long enough for the node's own sync). So
NOT_ENOUGH_REPLICAS_AFTER_APPEND, "committed, but by too few", is never said.

A transactional batch whose transaction is open here is appended as any other; before the first one of a transaction the
coordinator is asked, and whoever belongs to no transaction is refused. A repeat inside the idempotent window gets its
original offset, whatever the topic's settings are by now. Topics that must be looked into (compacted, or with a
codec of their own) are decoded in a thread and appended in order afterwards. Whoever asks a broker that does not lead
is told the leader and where it is (v10).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.broker.connection import HANG_UP, Connection, Reply, Slot
from penstock.broker.context import RequestContext
from penstock.broker.repeats import find_repeat, repeated
from penstock.broker.topology import LeaderHints, absence, topic_of
from penstock.protocol.errors import ApiError, ErrorCode, InvalidRecords
from penstock.protocol.produce import (
    TOPIC_IDS_FROM,
    Endpoint,
    PartitionResult,
    ProduceRequest,
    encode_produce_response,
    parse_produce,
)
from penstock.protocol.records import HEADER_BYTES, NO_PRODUCER_ID, TRANSACTIONAL

if TYPE_CHECKING:
    from penstock.broker.partition import OnCommit, Partition
    from penstock.broker.transactions.admission import Word, Writer
    from penstock.log.log import Appended
    from penstock.log.transactions import VerificationGuard

_ACKS_ALL, _ACKS_NONE = -1, 0
_LEGAL_ACKS = frozenset({-1, 0, 1})
_ATTRIBUTES_LOW_BYTE = 22
_PRODUCER = struct.Struct(">qhi")  # id, epoch, sequence
_PRODUCER_AT = 43
#: For clients that give no time to wait.
_TIMEOUT_MS_DEFAULT = 30_000
#: Refusals that producers answer with the same batch again.
_PASSING = frozenset(
    {
        ErrorCode.not_enough_replicas,
        ErrorCode.not_leader_or_follower,
        ErrorCode.kafka_storage_error,
        ErrorCode.concurrent_transactions,
    }
)

Results = list[PartitionResult]


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | Slot:
    version, node = ctx.version, ctx.node
    request = parse_produce(frame, position, version)
    partitions_of = node.partitions.by_raw_id if version >= TOPIC_IDS_FROM else node.partitions.by_raw_name
    acks, now_ms = request.acks, node.now_ms()
    topics: list[tuple[bytes, Results]] = []
    waiting: _Waiting | None = None
    for name, parts in request.topics:
        results: Results = []
        topics.append((name, results))
        found = partitions_of.get(name)
        for index, records in parts:
            partition = None if found is None else found.get(index)
            try:
                if partition is None:
                    raise _absent(ctx, name, index)
                _check_writable(partition, records, acks)
                assert records is not None
                writer = None
                if records[_ATTRIBUTES_LOW_BYTE] & TRANSACTIONAL:
                    writer = _writer(ctx, request, records)
                    if node.transactions.admission.must_wait(partition, writer):
                        waiting = waiting or _Waiting(ctx, connection, request, correlation_id, topics)
                        waiting.verify(partition, records, results, writer)
                        continue
                if partition.takes_turns:
                    waiting = waiting or _Waiting(ctx, connection, request, correlation_id, topics)
                    waiting.prepare(partition, records, results, writer)
                    continue
                try:
                    appended = partition.append(records, now_ms)
                except ApiError as error:
                    appended = repeated(partition, records, error)
            except ApiError as error:
                if partition is not None and records is not None:
                    _note_passing(partition, records, error)
                results.append(_refused(ctx, name, index, error))
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
    return _finished(ctx, correlation_id, acks, topics)


def _absent(ctx: RequestContext, name: bytes, index: int) -> ApiError:
    by_id = ctx.version >= TOPIC_IDS_FROM
    topic = topic_of(ctx.node.image, name, by_id=by_id)
    return absence(ctx.node, topic, index, by_id=by_id)


def _check_writable(partition: Partition, records: memoryview | None, acks: int) -> None:
    """Raises ApiError when this may not be appended to the partition."""
    if not partition.is_leader:
        raise ApiError(ErrorCode.not_leader_or_follower)
    if records is None or len(records) < HEADER_BYTES:
        raise ApiError(ErrorCode.invalid_record, "a produce request carries exactly one record batch")
    if partition.is_internal:
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


def _writer(ctx: RequestContext, request: ProduceRequest, records: memoryview) -> Writer:
    """Raises ApiError: a transactional batch belongs to a transactional id."""
    from penstock.broker.transactions.admission import Writer

    if request.transactional_id is None:
        message = "a transactional batch in a request without transactional id"
        raise ApiError(ErrorCode.transactional_id_authorization_failed, message)
    producer_id, epoch, _ = _PRODUCER.unpack_from(records, _PRODUCER_AT)
    if producer_id == NO_PRODUCER_ID:
        raise ApiError(ErrorCode.invalid_record, "a transactional batch without producer id")
    return Writer(request.transactional_id, producer_id, epoch, ctx.version)


def _note_passing(partition: Partition, records: memoryview, error: ApiError) -> None:
    """So that what the same producer has sent right behind it is not taken for a gap when the reason has passed."""
    if error.code in _PASSING and len(records) >= HEADER_BYTES:
        producer_id, epoch, sequence = _PRODUCER.unpack_from(records, _PRODUCER_AT)
        if producer_id != NO_PRODUCER_ID:
            partition.log.producers.refused(producer_id, epoch, sequence, error.code)


def _refused(ctx: RequestContext, topic: bytes, index: int, error: ApiError) -> PartitionResult:
    ctx.node.metrics.count_error("produce", error.code.name)
    places = error.places if isinstance(error, InvalidRecords) else ()
    leader = None
    if error.code is ErrorCode.not_leader_or_follower:
        leader = _hints(ctx).leader(topic, index, error.code)
    return PartitionResult(
        index, error.code.value, message=error.message, record_errors=places, current_leader=leader
    )


def _hints(ctx: RequestContext) -> LeaderHints:
    return LeaderHints(ctx.node, ctx.listener, by_id=ctx.version >= TOPIC_IDS_FROM)


def _finished(
    ctx: RequestContext, correlation_id: int, acks: int, topics: list[tuple[bytes, Results]]
) -> Reply:
    if acks != _ACKS_NONE:
        for _, results in topics:
            for result in results:
                if result.current_leader is not None:
                    endpoints = _endpoints(ctx, topics)
                    return encode_produce_response(ctx.version, correlation_id, topics, endpoints)
        return encode_produce_response(ctx.version, correlation_id, topics)
    if any(result.error for _, results in topics for result in results):
        # The only way to tell a client that waits for no answer, as Apache Kafka does.
        return HANG_UP
    return None


def _endpoints(ctx: RequestContext, topics: list[tuple[bytes, Results]]) -> tuple[Endpoint, ...]:
    hints = _hints(ctx)
    for name, results in topics:
        for result in results:
            if result.current_leader is not None:
                hints.leader(name, result.partition, ErrorCode.not_leader_or_follower)
    return tuple(hints.endpoints.values())


class _Late(NamedTuple):
    """A batch that cannot be appended at once, and the place of its result."""

    partition: Partition
    records: bytearray
    results: Results
    place: int
    key: tuple[int, int]


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
        self._timeout_ms = request.timeout_ms if request.timeout_ms > 0 else _TIMEOUT_MS_DEFAULT
        self._correlation_id = correlation_id
        self._topics = topics
        self._open: set[tuple[int, int]] = set()  # (identity of the results list, place in it)
        self._lists: dict[int, Results] = {}
        self._commits: list[tuple[Partition, OnCommit]] = []
        self._unverified: dict[Writer, list[_Late]] = {}
        self._slot: Slot | None = None
        self._timer: asyncio.TimerHandle | None = None

    def for_commit(self, partition: Partition, last_offset: int, results: Results, place: int) -> None:
        key = self._opened(results, place)

        def committed(error: ApiError | None) -> None:
            if error is not None and key in self._open:
                results[place] = self._refused(partition, error)
            self._done(key)

        self._commits.append((partition, committed))
        partition.when_committed(last_offset, committed)

    def prepare(
        self, partition: Partition, records: memoryview, results: Results, writer: Writer | None
    ) -> None:
        """Decode off the loop."""
        late = self._begin(partition, records, results)
        turn = self._append_in_turn(late, partition.last_turn, writer, None)
        task = self._ctx.node.spawn(self._finish(turn, late))
        partition.begin_turn(task)
        self._hold_memory(len(records), task)

    def verify(self, partition: Partition, records: memoryview, results: Results, writer: Writer) -> None:
        """Ask the coordinator first, about all of a writer's at once."""
        self._unverified.setdefault(writer, []).append(self._begin(partition, records, results))

    def _line_up(self, writer: Writer, batches: list[_Late]) -> None:
        """What else the same producer sends meanwhile waits for them."""
        task = self._ctx.node.transactions.admission.line_up(
            [late.partition for late in batches], writer, partial(self._append_verified, batches, writer)
        )
        self._hold_memory(sum(len(late.records) for late in batches), task)

    def _begin(self, partition: Partition, records: memoryview, results: Results) -> _Late:
        """The bytes are copied because the frame's buffer is reused meanwhile."""
        max_bytes = partition.log.config.max_message_bytes
        if len(records) > max_bytes and find_repeat(partition, records) is None:
            raise ApiError(
                ErrorCode.message_too_large,
                f"record batch of {len(records)} bytes, the topic takes {max_bytes}",
            )
        place = len(results)
        results.append(PartitionResult(partition.index, ErrorCode.request_timed_out.value))
        return _Late(partition, bytearray(records), results, place, self._opened(results, place))

    def _hold_memory(self, size: int, task: asyncio.Task[None]) -> None:
        server = self._ctx.node.server
        server.buffers.hold(size)
        task.add_done_callback(lambda _: server.buffers.release(size))
        if server.buffers.is_full:
            server.wait_for_memory(self._connection)

    async def _finish(self, appending: Coroutine[None, None, Appended], late: _Late) -> None:
        partition, _, results, place, key = late
        try:
            appended = await appending
        except ApiError as error:
            results[place] = self._refused(partition, error)
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
        self,
        late: _Late,
        previous: asyncio.Task[Any] | None,
        writer: Writer | None,
        guard: VerificationGuard | None,
    ) -> Appended:
        """Batches are prepared side by side and appended in the order in which they came."""
        node, partition = self._ctx.node, late.partition
        prepared = node.spawn(
            node.prepared_batch(partition, late.records, self._connection, is_owed=self._acks != _ACKS_NONE)
        )
        if previous is not None:
            await asyncio.wait([previous])
        try:
            ready = memoryview(await prepared)
        except ApiError as error:
            partition.check_leader()
            return repeated(partition, memoryview(late.records), error)
        return self._append_late(partition, ready, writer, guard)

    async def _append_verified(
        self, batches: list[_Late], writer: Writer, previous: set[asyncio.Task[None]]
    ) -> None:
        if previous:
            await asyncio.wait(previous)
        partitions = [late.partition for late in batches]
        try:
            words = await self._ctx.node.transactions.admission.words(partitions, writer)
        except Exception:
            self._ctx.node.server.failed(self._connection)
            return
        appending = [
            self._finish(self._append_at_word(late, writer, words[late.partition]), late) for late in batches
        ]
        if any(partition.takes_turns for partition in partitions):
            await asyncio.gather(*appending)
            return
        for each in appending:
            await each  # none of them waits, so none needs a task

    async def _append_at_word(self, late: _Late, writer: Writer, word: Word) -> Appended:
        partition, records = late.partition, late.records
        if isinstance(word, ApiError):
            _note_passing(partition, memoryview(records), word)
            raise word
        if not partition.takes_turns:
            return self._append_late(partition, memoryview(records), writer, word)
        turn = self._ctx.node.spawn(self._append_in_turn(late, partition.last_turn, writer, word))
        partition.begin_turn(turn)
        return await turn

    def _append_late(
        self,
        partition: Partition,
        batch: memoryview,
        writer: Writer | None,
        guard: VerificationGuard | None,
    ) -> Appended:
        """What has waited meets the partition as it is now."""
        node = self._ctx.node
        if partition.is_retired:
            raise ApiError(ErrorCode.unknown_topic_or_partition, "the topic was deleted")
        try:
            partition.check_leader()
            if writer is not None and guard is None:
                node.transactions.admission.check_open(partition, writer)
            try:
                return partition.append(batch, node.now_ms(), guard)
            except ApiError as error:
                return repeated(partition, batch, error)
        except ApiError as error:
            _note_passing(partition, batch, error)
            raise

    def begin(self) -> Slot:
        for writer, batches in self._unverified.items():
            self._line_up(writer, batches)
        self._slot = self._connection.defer(self._ctx.api_key)
        if not self._open:
            self._reply()
        else:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_ms / 1000, self._timed_out)
        return self._slot

    def _refused(self, partition: Partition, error: ApiError) -> PartitionResult:
        by_id = self._ctx.version >= TOPIC_IDS_FROM
        topic = partition.topic_id.bytes if by_id else partition.topic.encode()
        return _refused(self._ctx, topic, partition.index, error)

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
        for partition, committed in self._commits:
            partition.give_up(committed)
        self._reply()

    def _reply(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._commits.clear()  # they refer to this object, which would live until the collector comes
        assert self._slot is not None
        reply = _finished(self._ctx, self._correlation_id, self._acks, self._topics)
        self._connection.fulfil(self._slot, reply)
