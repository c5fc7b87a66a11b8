"""Fetch (key 1), v4-18. Slices of the log as they are on disk, never decoded, below the high watermark only.

Long poll: a request that finds less than min_bytes waits up to max_wait for more. The first non-empty partition
returns at least one batch, however small the limits, or a reader could never get past a large one. In a session
only partitions with something new are looked at and answered, and those that were served move to the end of the
queue. Followers read to the end of the log, wait for appends, and hear of the high watermark soon after it moved.
Whoever asks the wrong broker is told the leader (v12, with its address from v16 on).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from penstock.broker.connection import HANG_UP, Connection, Reply, Slot
from penstock.broker.context import RequestContext
from penstock.broker.fetch_sessions import NO_REPLICA, Key, Opened, Wanted
from penstock.broker.reading import NotCached, Read, Reads
from penstock.cluster.names import CLUSTER_METADATA
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame
from penstock.protocol.fetch import (
    SESSIONS_FROM,
    TOPIC_IDS_FROM,
    FetchRequest,
    PartitionData,
    encode_fetch_response,
    parse_fetch,
)

if TYPE_CHECKING:
    from penstock.broker.leading import Standing
    from penstock.broker.partition import Partition

_OK: Final = ErrorCode.none.value
#: However much slow readers hold back, a fetch may return this much, so that everyone gets on.
_BYTES_ALWAYS_ALLOWED: Final = 64 * 1024
#: How long a waiting follower is left without news of the high watermark: the next append usually brings it along.
_HIGH_WATERMARK_DELAY_S: Final = 0.025
_METADATA_TOPICS: Final = frozenset({UUID(int=1).bytes, CLUSTER_METADATA.encode()})


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | Slot:
    request = parse_fetch(frame, position, ctx.version)
    if request.replica_id > NO_REPLICA and not connection.for_nodes:
        return _refuse_follower(ctx, connection, correlation_id)
    if connection.for_nodes and request.topics and request.topics[0][0] in _METADATA_TOPICS:
        return _fetch_metadata(ctx, connection, bytes(frame), position, correlation_id)
    by_id = ctx.version >= TOPIC_IDS_FROM
    opened = ctx.node.fetch_sessions.open(request, by_id=by_id, now_ms=ctx.node.now_ms())
    fetch = _Fetch(ctx, request, correlation_id, opened)
    if opened.error is not ErrorCode.none:
        return fetch.reply([])
    try:
        # A follower's fetch moves the high watermark, and many a producer may have waited for that.
        collected = (
            fetch.collect() if request.replica_id == NO_REPLICA else ctx.node.server.gathered(fetch.collect)
        )
    except NotCached as cold:
        return fetch.read_cold(connection, cold)
    if fetch.is_satisfied_by(collected):
        return fetch.reply(collected.answers)
    return fetch.wait(connection, collected.records_bytes)


def _refuse_follower(ctx: RequestContext, connection: Connection, correlation_id: int) -> Reply:
    """A follower's fetch decides what counts as replicated, so no client may send one."""
    ctx.node.server.refuse_node_request(connection, "fetch by a replica")
    if ctx.version < SESSIONS_FROM:
        return HANG_UP  # the response has no place for an error that is not a partition's
    error = ErrorCode.cluster_authorization_failed.value
    return encode_fetch_response(ctx.version, correlation_id, error=error, session_id=0, topics=[])


def _fetch_metadata(
    ctx: RequestContext, connection: Connection, frame: bytes, position: int, correlation_id: int
) -> Slot:
    """The metadata log is the quorum's affair; its followers ask in the same way."""
    slot = connection.defer(ctx.api_key)

    async def answer() -> None:
        try:
            reply = await ctx.node.quorum.answer_fetch(ctx, frame, position, correlation_id)
        except MalformedFrame as error:
            ctx.node.server.refuse(connection, str(error))
        except Exception:
            ctx.node.server.failed(connection)
        else:
            connection.fulfil(slot, reply)

    ctx.node.spawn(answer())
    return slot


class _Answer(NamedTuple):
    key: Key
    wanted: Wanted
    read: Read


class _Collected(NamedTuple):
    answers: list[_Answer]
    records_bytes: int
    is_final: bool  # waiting would not make it better


class _Fetch:
    def __init__(
        self, ctx: RequestContext, request: FetchRequest, correlation_id: int, opened: Opened
    ) -> None:
        self._ctx = ctx
        self._node = ctx.node
        self._request = request
        self._correlation_id = correlation_id
        self._opened = opened
        self._reads = Reads(ctx, request, self._heard())
        self._connection: Connection | None = None
        self._slot: Slot | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watched: list[Partition] = []
        self._bytes_missing = 0
        self._is_waiting = self._is_hastened = False

    def _heard(self) -> int:
        """When a follower was heard of; consumers are not measured."""
        if self._request.replica_id == NO_REPLICA:
            return 0
        from penstock.broker.leading import monotonic_ms

        now_ms = monotonic_ms()
        if self._opened.session is not None:
            self._opened.session.heard_ms = now_ms
        return now_ms

    # -- collecting ----------------------------------------------------------------------------------

    def collect(self) -> _Collected:
        """What can be answered now. Raises NotCached."""
        budget = self._bytes_allowed()
        answers: list[_Answer] = []
        total = 0
        is_final = False
        self._reads.throttled_bytes = 0
        for key, wanted in self._to_look_at():
            read = self._reads.read(key, wanted, budget - total, is_first=total == 0)
            is_final = is_final or read.is_final
            if not self._opened.is_incremental or _is_news(wanted, read.data):
                answers.append(_Answer(key, wanted, read))
            elif not _is_worth_another_look(wanted, read):
                self._lay_aside(key)
            total += len(read.data.records)
        return _Collected(answers, total, is_final)

    def _to_look_at(self) -> Iterable[tuple[Key, Wanted]]:
        session = self._opened.session
        wanted = self._opened.wanted if session is None or not self._opened.is_incremental else session.dirty
        # A copy, because a follower's fetch moves the high watermark, which is news.
        return list(wanted.items())

    def _lay_aside(self, key: Key) -> None:
        if self._opened.session is not None:
            self._opened.session.dirty.pop(key, None)

    def _bytes_allowed(self) -> int:
        allowed = min(self._request.max_bytes, self._node.fetch_bytes_max)
        return min(allowed, max(self._node.server.response_bytes_left(), _BYTES_ALWAYS_ALLOWED))

    def is_satisfied_by(self, collected: _Collected) -> bool:
        request = self._request
        return (
            collected.records_bytes >= request.min_bytes
            or collected.is_final
            or request.max_wait_ms <= 0
            or not self._opened.wanted
        )

    # -- answering -----------------------------------------------------------------------------------

    def reply(self, answers: list[_Answer]) -> Reply:
        opened, session = self._opened, self._opened.session
        topics: list[tuple[bytes, list[PartitionData]]] = []
        error = opened.error
        if session is not None and session.epoch != opened.epoch:
            # A later request has moved the session on, so what is said here would be taken for its answer.
            error, answers = ErrorCode.invalid_fetch_session_epoch, []
        for key, wanted, read in answers:
            if not topics or topics[-1][0] != key[0]:
                topics.append((key[0], []))
            topics[-1][1].append(read.data)
            if read.next_offset >= 0:
                self._count(wanted, len(read.data.records), read.next_offset - wanted.offset)
            if session is not None:
                self._remember_told(key, wanted, read)
        if self._reads.throttled_bytes:
            self._node.leader_throttle.take(self._reads.throttled_bytes)
        hints = self._reads.hints
        return encode_fetch_response(
            self._ctx.version,
            self._correlation_id,
            error=error.value,
            session_id=0 if session is None else session.id,
            topics=topics,
            endpoints=() if hints is None else tuple(hints.endpoints.values()),
        )

    def _count(self, wanted: Wanted, size: int, records: int) -> None:
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
        """A follower that is served the same again and again may have a reason to refuse it."""
        leading = partition.leading
        if leading is not None and leading.refetches.served(self._request.replica_id, offset):
            self._node.spawn(leading.refetches.look(self._node, partition, offset, size))

    def _remember_told(self, key: Key, wanted: Wanted, read: Read) -> None:
        data, session = read.data, self._opened.session
        assert session is not None
        wanted.high_watermark = data.high_watermark
        wanted.last_stable_offset = data.last_stable_offset
        wanted.log_start_offset = data.log_start_offset
        wanted.told_error = data.error != _OK
        if not _is_worth_another_look(wanted, read):
            session.dirty.pop(key, None)
        elif data.records and session.wanted.get(key) is wanted:
            # Served partitions go to the back, so that a full reply never starves the others.
            session.dirty.pop(key, None)
            session.dirty[key] = wanted

    # -- waiting -------------------------------------------------------------------------------------

    def wait(self, connection: Connection, bytes_at_hand: int) -> Slot:
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
            try:
                partition = self._reads.find(key)
            except ApiError:
                continue
            partition.watch_end(self) if self._reads.is_replica else partition.watch(self)
            self._watched.append(partition)

    def bytes_arrived(self, count: int) -> None:
        self._bytes_missing -= count
        if self._bytes_missing <= 0 and self._is_waiting:
            if self._reads.is_read_committed and self._is_held_back():
                return
            self._finish_soon()

    def _is_held_back(self) -> bool:
        """All that arrived belongs to transactions that have not ended, so there is nothing to read yet."""
        return all(
            wanted.partition is not None
            and wanted.partition.is_leader
            and wanted.offset >= wanted.partition.last_stable_offset
            for _, wanted in self._to_look_at()
        )

    def high_watermark_moved(self) -> None:
        """To a follower only. Told soon, but not at once, or each append would cost it another round."""
        if self._is_waiting and not self._is_hastened:
            self._is_hastened = True
            self._wait_for(min(_HIGH_WATERMARK_DELAY_S, self._request.max_wait_ms / 1000))

    def standing(self, leader_epoch: int) -> Standing | None:
        """A fetch outside any session is counted once, when it comes."""
        return None

    def overtaken(self) -> None:
        if self._is_waiting:
            self._finish_soon()

    def _finish_soon(self) -> None:
        # Not at once: the producer's own reply goes first, and what else arrives now is taken along.
        self._stop_waiting()
        asyncio.get_running_loop().call_soon(self._finish)

    def _finish(self) -> None:
        self._stop_waiting()
        assert self._connection is not None
        assert self._slot is not None
        try:
            reply = self.reply([] if self._is_overtaken else self.collect().answers)
        except NotCached as cold:
            self._node.spawn(self._finish_cold(cold))
        except Exception:
            # Whoever appended what this reader waited for must not suffer from it.
            self._node.server.failed(self._connection)
        else:
            self._connection.fulfil(self._slot, reply)

    @property
    def _is_overtaken(self) -> bool:
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
            partition.unwatch_end(self) if self._reads.is_replica else partition.unwatch(self)
        self._watched = []

    # -- reading from disk ---------------------------------------------------------------------------

    def read_cold(self, connection: Connection, cold: NotCached) -> Slot:
        self._open_slot(connection)
        assert self._slot is not None
        self._node.spawn(self._finish_cold(cold))
        return self._slot

    async def _finish_cold(self, cold: NotCached) -> None:
        assert self._connection is not None
        assert self._slot is not None
        try:
            collected = await self._collect_from_disk(cold)
            self._connection.fulfil(self._slot, self.reply(collected.answers))
        except Exception:
            self._node.server.failed(self._connection)

    async def _collect_from_disk(self, cold: NotCached) -> _Collected:
        """Each round waits for what the one before found missing; an error counts as found."""
        while True:
            try:
                self._reads.from_disk[cold.place] = await self._node.in_thread(cold.read)
            except ApiError as error:
                self._reads.from_disk[cold.place] = error
            try:
                return self.collect()
            except NotCached as another:
                cold = another


def _is_news(wanted: Wanted, data: PartitionData) -> bool:
    """What a session's reader has not been told yet."""
    return bool(
        data.records
        or data.error != _OK
        or wanted.told_error
        or data.diverging_epoch is not None
        or data.preferred_read_replica >= 0
        or data.high_watermark != wanted.high_watermark
        or data.last_stable_offset != wanted.last_stable_offset
        or data.log_start_offset != wanted.log_start_offset
    )


def _is_worth_another_look(wanted: Wanted, read: Read) -> bool:
    """There is more to read than was asked for or fitted in, or an error that may have gone by then."""
    return not read.is_settled or wanted.offset < read.upto
