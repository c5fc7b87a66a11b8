"""Fetch (key 1), v4-18. Returns slices of the log as they are on disk, never decoded, below the high watermark.

Long poll: a request that finds less than min_bytes waits up to max_wait for more. The first partition with data
returns at least one batch, however small the limits, so that a reader can always get past a large batch. In a session
only partitions with changes are read and returned, and partitions that returned records move to the end of the queue.
Followers read to the log end, wait for appends, and get a new high watermark soon after it moves. A client that
fetches from the wrong broker gets the leader (v12), with its address from v16 on. A consumer's fetch that looks at many
partitions is served in time slices; those of followers, which are few and wake up producers, are not.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from penstock.broker.network.audit import audit_refusal
from penstock.broker.network.connection import CLOSE_CONNECTION, Connection, PendingReply, Reply
from penstock.broker.network.requests import RequestContext, send_later
from penstock.broker.partition.fetch_reader import FetchReader, LogReadResult, NotCached
from penstock.broker.partition.fetch_sessions import (
    CONSUMER_REPLICA_ID,
    INITIAL_EPOCH,
    FetchContext,
    PartitionKey,
    RequestedPartition,
)
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.protocol.acls import CLUSTER_NAME, Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame
from penstock.protocol.fetch import (
    SESSIONS_FROM,
    TOPIC_IDS_FROM,
    FetchRequest,
    PartitionData,
    encode_fetch_response,
    encode_fetch_response_in_steps,
    parse_fetch_request,
    parse_fetch_request_in_steps,
)
from penstock.protocol.steps import Steps, finish
from penstock.security.quotas import CONSUMER_BYTE_RATE

if TYPE_CHECKING:
    from penstock.broker.partition.leader_replica import FollowerFetchState
    from penstock.broker.partition.partition import Partition

_OK: Final = ErrorCode.none.value
#: A fetch may return this much even if slow readers use up the response memory, so that every client makes progress.
_BYTES_ALWAYS_ALLOWED: Final = 64 * 1024
#: How long a waiting follower may miss a new high watermark; usually the next append carries it sooner.
_HIGH_WATERMARK_DELAY_S: Final = 0.025
#: A larger request is read in slices, and so is what it asks for if these are more partitions.
_READ_AT_ONCE_BYTES: Final = 8 * 1024
_PARTITIONS_AT_ONCE: Final = 250
#: How many partitions are registered, or answered, before the work may pause.
_STEP: Final = 50
_METADATA_TOPICS: Final = frozenset({UUID(int=1).bytes, CLUSTER_METADATA.encode()})


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | PendingReply:
    if len(frame) > _READ_AT_ONCE_BYTES and not connection.is_node:
        # A copy, because the buffer is used again before the last step.
        frame = memoryview(bytes(frame))
        return send_later(ctx, connection, _serve_large(ctx, connection, frame, position, correlation_id))
    request = parse_fetch_request(frame, position, ctx.version)
    if request.replica_id > CONSUMER_REPLICA_ID and not _may_follow(ctx, connection):
        return finish(_refuse_follower(ctx, connection, request, correlation_id))
    if connection.may_send_as_node and request.topics and request.topics[0][0] in _METADATA_TOPICS:
        if not connection.serves_controller or not ctx.demand(Operation.CLUSTER_ACTION, ResourceType.CLUSTER):
            return _reject_follower(ctx, connection, correlation_id)
        return _fetch_metadata(ctx, connection, bytes(frame), position, correlation_id)
    by_id = ctx.version >= TOPIC_IDS_FROM
    opened = ctx.services.fetch_sessions.open(request, by_id=by_id, now_ms=ctx.services.now_ms())
    fetch = _Fetch(ctx, request, correlation_id, opened)
    if opened.error is not ErrorCode.none:
        return fetch.reply([])
    if wait_ms := fetch.turn_ms(connection):
        return fetch.reply_empty(wait_ms)
    if fetch.looks_at_many and request.replica_id <= CONSUMER_REPLICA_ID:
        return send_later(ctx, connection, fetch.serve_in_slices())
    try:
        # A follower's fetch can move the high watermark, which may complete the requests of many producers.
        collected = (
            fetch.collect()
            if request.replica_id <= CONSUMER_REPLICA_ID
            else ctx.services.server.gathered(fetch.collect)
        )
    except NotCached as cold:
        return fetch.read_cold(connection, cold)
    if fetch.is_satisfied_by(collected):
        return fetch.reply(collected.answers)
    return fetch.wait(connection, collected.records_bytes)


async def _serve_large(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply:
    buffers, size = ctx.services.server.buffers, len(frame)
    buffers.hold(size)
    try:
        request = await ctx.finish_in_slices(parse_fetch_request_in_steps(frame, position, ctx.version))
    finally:
        buffers.release(size)
    if request.replica_id > CONSUMER_REPLICA_ID and not _may_follow(ctx, connection):
        return await ctx.finish_in_slices(_refuse_follower(ctx, connection, request, correlation_id))
    opening = ctx.services.fetch_sessions.open_in_steps(
        request, by_id=ctx.version >= TOPIC_IDS_FROM, now_ms=ctx.services.now_ms()
    )
    opened = await ctx.finish_in_slices(opening)
    fetch = _Fetch(ctx, request, correlation_id, opened)
    if opened.error is not ErrorCode.none:
        return fetch.reply([])
    if wait_ms := fetch.turn_ms(connection):
        return fetch.reply_empty(wait_ms)
    return await fetch.serve_in_slices()


def _may_follow(ctx: RequestContext, connection: Connection) -> bool:
    """Whether the client may fetch as a follower, whose full fetch replaces the session that the follower has.

    So this is known before a session is looked at.
    """
    if connection.may_send_as_node:
        return ctx.demand(Operation.CLUSTER_ACTION, ResourceType.CLUSTER)
    audit_refusal(ctx, Operation.CLUSTER_ACTION.name, ResourceType.CLUSTER.name, CLUSTER_NAME)
    return False


def _refuse_follower(
    ctx: RequestContext, connection: Connection, request: FetchRequest, correlation_id: int
) -> Steps[Reply]:
    """Refuse each partition, as Apache Kafka does, if only a rule is missing."""
    if not connection.may_send_as_node:
        return _reject_follower(ctx, connection, correlation_id)
    error, topics = ErrorCode.none, []
    if request.session_epoch > INITIAL_EPOCH:
        # The full request that follows this error names all partitions.
        error = ErrorCode.fetch_session_id_not_found
    else:
        refused = ErrorCode.topic_authorization_failed.value
        for name, partitions in request.topics:
            topics.append((name, [PartitionData(each.partition, refused) for each in partitions]))
            yield
    return (
        yield from encode_fetch_response_in_steps(
            ctx.version, correlation_id, error=error.value, session_id=0, topics=topics
        )
    )


def _reject_follower(ctx: RequestContext, connection: Connection, correlation_id: int) -> Reply:
    """Rejects the fetch, because a follower's fetch decides what counts as replicated: no client may send one."""
    ctx.services.server.reject_inter_broker_request(connection, "fetch by a replica")
    if ctx.version < SESSIONS_FROM:
        return CLOSE_CONNECTION  # the response has no field for a top-level error
    error = ErrorCode.cluster_authorization_failed.value
    return encode_fetch_response(ctx.version, correlation_id, error=error, session_id=0, topics=[])


def _fetch_metadata(
    ctx: RequestContext, connection: Connection, frame: bytes, position: int, correlation_id: int
) -> PendingReply:
    """Passes the fetch to the quorum, which serves the metadata log; its followers use the same API."""
    slot = connection.defer(ctx.api_key)

    async def answer() -> None:
        try:
            reply = await ctx.services.quorum.answer_fetch(ctx, frame, position, correlation_id)
        except MalformedFrame as error:
            ctx.services.server.refuse(connection, str(error))
        except Exception:
            ctx.services.server.failed(connection)
        else:
            connection.fulfil(slot, reply)

    ctx.services.spawn(answer())
    return slot


class _PartitionRead(NamedTuple):
    key: PartitionKey
    wanted: RequestedPartition
    read: LogReadResult


class _Collected(NamedTuple):
    answers: list[_PartitionRead]
    records_bytes: int
    is_final: bool  # waiting would not return more


class _Fetch:
    def __init__(
        self, ctx: RequestContext, request: FetchRequest, correlation_id: int, opened: FetchContext
    ) -> None:
        self._ctx = ctx
        self._services = ctx.services
        self._request = request
        self._correlation_id = correlation_id
        self._opened = opened
        self._reads = FetchReader(ctx, request, self._heard())
        self._connection: Connection | None = None
        self._slot: PendingReply | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watched: list[Partition] = []
        self._bytes_missing = 0
        self._is_waiting = self._is_deadline_shortened = False
        self._arrived: asyncio.Event | None = None  # of a fetch that is served in slices

    def _heard(self) -> int:
        """The arrival time of a follower's fetch; 0 for consumers, whose fetches are not timed."""
        if self._request.replica_id <= CONSUMER_REPLICA_ID:
            return 0
        from penstock.broker.partition.leader_replica import monotonic_ms

        now_ms = monotonic_ms()
        if self._opened.session is not None:
            self._opened.session.heard_ms = now_ms
        return now_ms

    # -- collecting ----------------------------------------------------------------------------------

    def collect(self) -> _Collected:
        """What can be returned now. Raises NotCached."""
        budget = self._bytes_allowed()
        answers: list[_PartitionRead] = []
        total = 0
        is_final = False
        self._reads.throttled_bytes = 0
        for key, wanted in self._to_look_at():
            read = self._reads.read(key, wanted, budget - total, is_first=total == 0)
            is_final = is_final or read.is_final
            if not self._opened.is_incremental or _has_changed(wanted, read.data):
                answers.append(_PartitionRead(key, wanted, read))
            elif not _needs_another_read(wanted, read):
                self._remove_from_dirty(key)
            total += len(read.data.records)
        return _Collected(answers, total, is_final)

    async def _collect_in_slices(self) -> _Collected:
        """The same for many partitions. What is not cached is read on the way."""
        answers: list[_PartitionRead] = []
        self._reads.throttled_bytes = 0
        left = list(reversed(self._to_look_at()))
        total, is_final = 0, False

        def read_next() -> Steps[NotCached | None]:
            nonlocal total, is_final
            budget = self._bytes_allowed()
            while left:
                key, wanted = left[-1]
                try:
                    read = self._reads.read(key, wanted, budget - total, is_first=total == 0)
                except NotCached as cold:
                    return cold
                left.pop()
                is_final = is_final or read.is_final
                if not self._opened.is_incremental or _has_changed(wanted, read.data):
                    answers.append(_PartitionRead(key, wanted, read))
                elif not _needs_another_read(wanted, read):
                    self._remove_from_dirty(key)
                total += len(read.data.records)
                yield
            return None

        while (cold := await self._ctx.finish_in_slices(read_next())) is not None:
            await self._read_from_disk(cold)
        return _Collected(answers, total, is_final)

    @property
    def looks_at_many(self) -> bool:
        session = self._opened.session
        wanted = self._opened.wanted if session is None or not self._opened.is_incremental else session.dirty
        return len(wanted) > _PARTITIONS_AT_ONCE

    def _to_look_at(self) -> list[tuple[PartitionKey, RequestedPartition]]:
        session = self._opened.session
        wanted = self._opened.wanted if session is None or not self._opened.is_incremental else session.dirty
        # A copy, because a follower's fetch moves the high watermark, which changes `dirty`.
        return list(wanted.items())

    def _remove_from_dirty(self, key: PartitionKey) -> None:
        if self._opened.session is not None:
            self._opened.session.dirty.pop(key, None)

    def _bytes_allowed(self) -> int:
        allowed = min(self._request.max_bytes, self._services.fetch_bytes_max)
        quotas, connection = self._services.quotas, self._ctx.connection
        if quotas.limits_fetch and not self._reads.is_replica and connection is not None:
            allowed = min(allowed, quotas.fetch_bytes_max(connection, self._ctx.client_id))
        return min(allowed, max(self._services.server.response_bytes_left(), _BYTES_ALWAYS_ALLOWED))

    def is_satisfied_by(self, collected: _Collected) -> bool:
        request = self._request
        return (
            collected.records_bytes >= request.min_bytes
            or collected.is_final
            or request.max_wait_ms <= 0
            or not self._opened.wanted
        )

    def turn_ms(self, connection: Connection) -> int:
        """Return for how long the connection waits, instead of this fetch, because its quota is used up."""
        if (
            not self._services.quotas.limits_fetch
            or CONSUMER_BYTE_RATE in connection.turns
            or self._reads.is_replica
        ):
            return 0
        return self._services.quotas.fetch_turn_ms(connection, self._ctx.client_id)

    # -- replying ------------------------------------------------------------------------------------

    def reply_empty(self, throttle_ms: int) -> Reply:
        """As in Apache Kafka, the session stays, but an empty reply makes none."""
        opened, session = self._opened, self._opened.session
        if session is not None and not opened.is_incremental:
            self._services.fetch_sessions.discard(session)
            session = None
        return encode_fetch_response(
            self._ctx.version,
            self._correlation_id,
            error=opened.error.value,
            session_id=0 if session is None else session.id,
            topics=[],
            throttle_ms=throttle_ms,
        )

    def reply(self, answers: list[_PartitionRead]) -> Reply:
        return finish(self._reply_in_steps(answers))

    def _reply_in_steps(self, answers: list[_PartitionRead], *, is_older: bool = False) -> Steps[Reply]:
        """`is_older`: the partitions may have changed since they were read."""
        opened, session = self._opened, self._opened.session
        topics: list[tuple[bytes, list[PartitionData]]] = []
        error = opened.error
        if session is not None and session.epoch != opened.epoch:
            # A later request has moved the session on; the client would take this reply's data for the later one.
            error, answers = ErrorCode.invalid_fetch_session_epoch, []
        size = 0
        for number, (key, wanted, read) in enumerate(answers, start=1):
            if not topics or topics[-1][0] != key[0]:
                topics.append((key[0], []))
            topics[-1][1].append(read.data)
            records_bytes = len(read.data.records)
            size += records_bytes
            if read.next_offset >= 0:
                self._count(wanted, records_bytes, read.next_offset - wanted.offset)
            if session is not None:
                self._remember_reported(key, wanted, read, is_older=is_older)
            if number % _STEP == 0:
                yield
        if self._reads.throttled_bytes:
            self._services.leader_throttle.take(self._reads.throttled_bytes)
        hints, quotas, throttle_ms = self._reads.hints, self._services.quotas, 0
        connection = self._ctx.connection
        if quotas.limits_fetch and not self._reads.is_replica and connection is not None:
            meter = connection.meters.get(CONSUMER_BYTE_RATE)
            client_id = self._ctx.client_id
            if (
                meter is not None
                and meter.client_id == client_id
                and (pending := meter.pending + size) <= meter.slack
            ):
                meter.pending = pending
            else:
                throttle_ms = quotas.throttle(CONSUMER_BYTE_RATE, connection, client_id, size)
        return (
            yield from encode_fetch_response_in_steps(
                self._ctx.version,
                self._correlation_id,
                error=error.value,
                session_id=0 if session is None else session.id,
                topics=topics,
                endpoints=() if hints is None else tuple(hints.endpoints.values()),
                throttle_ms=throttle_ms,
            )
        )

    def _count(self, wanted: RequestedPartition, size: int, records: int) -> None:
        assert wanted.partition is not None
        traffic = wanted.partition.traffic
        if self._reads.is_replica:
            traffic.replica_bytes_out += size
            if size:
                self._note_served(wanted.partition, wanted.offset, size)
            return
        traffic.bytes_out += size
        traffic.messages_out += records
        traffic.fetches += 1

    def _note_served(self, partition: Partition, offset: int, size: int) -> None:
        """Checks the records on disk if the follower was sent them repeatedly: it may reject them as corrupt."""
        leading = partition.leading
        if leading is not None and leading.repeated_fetches.served(self._request.replica_id, offset):
            services = self._services
            check = leading.repeated_fetches.check_records(
                services.environment, services.partitions, partition, offset, size
            )
            services.spawn(check)

    def _remember_reported(
        self, key: PartitionKey, wanted: RequestedPartition, read: LogReadResult, *, is_older: bool
    ) -> None:
        data, session = read.data, self._opened.session
        assert session is not None
        # A follower that has diverged ignores the rest of the response, so the next one repeats the high watermark.
        wanted.high_watermark = data.high_watermark if data.diverging_epoch is None else -1
        wanted.last_stable_offset = data.last_stable_offset
        wanted.log_start_offset = data.log_start_offset
        wanted.has_reported_error = data.error != _OK
        if not _needs_another_read(wanted, read):
            if not is_older:
                session.dirty.pop(key, None)
        elif data.records and session.wanted.get(key) is wanted:
            # Served partitions go to the end of the queue, so that a full reply never starves the others.
            session.dirty.pop(key, None)
            session.dirty[key] = wanted

    # -- waiting -------------------------------------------------------------------------------------

    def wait(self, connection: Connection, bytes_at_hand: int) -> PendingReply:
        self._open_slot(connection)
        assert self._slot is not None
        self._bytes_missing = self._request.min_bytes - bytes_at_hand
        self._is_waiting = True
        if self._opened.session is None:
            self._watch()
        else:
            self._opened.session.waiting = self
        self._wait_for(self._request.max_wait_ms / 1000)
        return self._slot

    async def serve_in_slices(self) -> Reply:
        """Answer a fetch that looks at many partitions.

        It listens before it reads, because partitions change between two slices.
        """
        loop, max_wait_s = asyncio.get_running_loop(), self._request.max_wait_ms / 1000
        deadline = loop.time() + max_wait_s
        self._arrived = asyncio.Event()
        try:
            await self._ctx.finish_in_slices(self._listen())
            while True:
                self._arrived.clear()
                self._bytes_missing = self._request.min_bytes
                collected = await self._collect_in_slices()
                if self.is_satisfied_by(collected) or self._is_superseded or loop.time() >= deadline:
                    break
                self._bytes_missing -= collected.records_bytes
                if self._bytes_missing <= 0:
                    continue  # enough has arrived, some of it behind the reads
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await self._arrived.wait()
        finally:
            self._stop_waiting()
        return await self._ctx.finish_in_slices(self._reply_in_steps(collected.answers, is_older=True))

    def _listen(self) -> Steps[None]:
        if self._opened.session is not None:
            self._opened.session.waiting = self
            return
        for number, key in enumerate(self._opened.wanted, start=1):
            self._watch_partition(key)
            if number % _STEP == 0:
                yield

    def _open_slot(self, connection: Connection) -> None:
        self._connection = connection
        self._slot = connection.defer(self._ctx.api_key)
        self._slot.on_lost = self._stop_waiting

    def _wait_for(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._finish)

    def _watch(self) -> None:
        for key in self._opened.wanted:
            self._watch_partition(key)

    def _watch_partition(self, key: PartitionKey) -> None:
        try:
            partition = self._reads.find(key)
        except ApiError:
            return
        partition.add_follower(self) if self._reads.is_replica else partition.watch(self)
        self._watched.append(partition)

    def bytes_arrived(self, count: int) -> None:
        self._bytes_missing -= count
        if self._bytes_missing > 0:
            return
        if self._arrived is not None:
            self._arrived.set()
        elif self._is_waiting:
            if self._reads.is_read_committed and self._is_held_back():
                return
            self._finish_soon()

    def _is_held_back(self) -> bool:
        """Everything that arrived belongs to open transactions, so there is nothing to read yet."""
        return all(
            wanted.partition is not None
            and wanted.partition.is_leader
            and wanted.offset >= wanted.partition.last_stable_offset
            for _, wanted in self._to_look_at()
        )

    def high_watermark_moved(self) -> None:
        """Called for followers only. Replies after a delay: the next append usually saves the extra round trip."""
        if self._is_waiting and not self._is_deadline_shortened:
            self._is_deadline_shortened = True
            self._wait_for(min(_HIGH_WATERMARK_DELAY_S, self._request.max_wait_ms / 1000))

    def fetch_state(self, leader_epoch: int) -> FollowerFetchState | None:
        """None, because a fetch outside any session is counted once, when it arrives."""
        return None

    def superseded(self) -> None:
        if self._arrived is not None:
            self._arrived.set()
        elif self._is_waiting:
            self._finish_soon()

    def _finish_soon(self) -> None:
        # Not at once: the producer's own reply goes first, and this reply includes whatever else arrives meanwhile.
        self._stop_waiting()
        asyncio.get_running_loop().call_soon(self._finish)

    def _finish(self) -> None:
        self._stop_waiting()
        assert self._connection is not None
        assert self._slot is not None
        try:
            reply = self.reply([] if self._is_superseded else self.collect().answers)
        except NotCached as cold:
            self._services.spawn(self._finish_cold(cold))
        except Exception:
            # An error here must not fail the append that woke up this reader.
            self._services.server.failed(self._connection)
        else:
            self._connection.fulfil(self._slot, reply)

    @property
    def _is_superseded(self) -> bool:
        session = self._opened.session
        return session is not None and session.epoch != self._opened.epoch

    def _stop_waiting(self) -> None:
        self._is_waiting = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        session = self._opened.session
        if session is not None and session.waiting is self:
            session.waiting = None
        for partition in self._watched:
            partition.remove_follower(self) if self._reads.is_replica else partition.unwatch(self)
        self._watched = []

    # -- reading from disk ---------------------------------------------------------------------------

    def read_cold(self, connection: Connection, cold: NotCached) -> PendingReply:
        self._open_slot(connection)
        assert self._slot is not None
        self._services.spawn(self._finish_cold(cold))
        return self._slot

    async def _finish_cold(self, cold: NotCached) -> None:
        assert self._connection is not None
        assert self._slot is not None
        try:
            collected = await self._collect_from_disk(cold)
            self._connection.fulfil(self._slot, self.reply(collected.answers))
        except Exception:
            self._services.server.failed(self._connection)

    async def _collect_from_disk(self, cold: NotCached) -> _Collected:
        """Each round reads what the previous round found missing; an error is kept as the result of that read."""
        while True:
            await self._read_from_disk(cold)
            try:
                return self.collect()
            except NotCached as another:
                cold = another

    async def _read_from_disk(self, cold: NotCached) -> None:
        try:
            self._reads.from_disk[cold.key] = await self._services.in_thread(cold.read)
        except ApiError as error:
            self._reads.from_disk[cold.key] = error


def _has_changed(wanted: RequestedPartition, data: PartitionData) -> bool:
    """Whether the partition has changes that the session has not reported yet."""
    return bool(
        data.records
        or data.error != _OK
        or wanted.has_reported_error
        or data.diverging_epoch is not None
        or data.preferred_read_replica >= 0
        or data.high_watermark != wanted.high_watermark
        or data.last_stable_offset != wanted.last_stable_offset
        or data.log_start_offset != wanted.log_start_offset
    )


def _needs_another_read(wanted: RequestedPartition, read: LogReadResult) -> bool:
    """There is more to read than was requested or fitted in, or an error that may be gone at the next read."""
    return not read.is_settled or wanted.offset < read.upto
