"""Fetch (key 1), v4-18. Slices of the log as they are on disk, never decoded, below the high watermark only.

Long poll: a request that finds less than min_bytes waits up to max_wait for more. The first non-empty partition
returns at least one batch, however small the limits, or a reader could never get past a large one. In a session
only partitions with something new are answered, and those that were served move to the end of the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from penstock.broker.connection import Connection, Reply, Slot
from penstock.broker.context import RequestContext
from penstock.broker.fetch_sessions import Key, Opened, Wanted
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.fetch import (
    TOPIC_IDS_FROM,
    FetchRequest,
    PartitionData,
    encode_fetch_response,
    parse_fetch,
)

if TYPE_CHECKING:
    from penstock.broker.partition import Partition
    from penstock.log.log import LogPosition, Slice

_READ_COMMITTED = 1
_OK = ErrorCode.none.value
#: However much slow readers hold back, a fetch may return this much, so that everyone gets on.
_BYTES_ALWAYS_ALLOWED = 64 * 1024


def handle(
    ctx: RequestContext, connection: Connection, frame: memoryview, position: int, correlation_id: int
) -> Reply | Slot:
    request = parse_fetch(frame, position, ctx.version)
    by_id = ctx.version >= TOPIC_IDS_FROM
    opened = ctx.node.fetch_sessions.open(request, by_id=by_id, now_ms=ctx.node.now_ms())
    fetch = _Fetch(ctx, request, correlation_id, opened)
    if opened.error is not ErrorCode.none:
        return fetch.reply([])
    try:
        collected = fetch.collect()
    except _NotCached as cold:
        return fetch.read_cold(connection, cold)
    if fetch.is_satisfied_by(collected):
        return fetch.reply(collected.answers)
    return fetch.wait(connection, collected.records_bytes)


class _Answer(NamedTuple):
    key: Key
    wanted: Wanted
    data: PartitionData
    next_offset: int  # after the records; -1 where there are none


class _Collected(NamedTuple):
    answers: list[_Answer]
    records_bytes: int
    is_final: bool  # waiting would not make it better


class _NotCached(Exception):
    """The bytes wanted next are not in the page cache; reading them would block the loop."""

    def __init__(self, key: Key, offset: int, read: Callable[[], Slice]) -> None:
        super().__init__(key, offset)
        self.place = (key, offset)
        self.read = read


class _Fetch:
    def __init__(
        self, ctx: RequestContext, request: FetchRequest, correlation_id: int, opened: Opened
    ) -> None:
        self._ctx = ctx
        self._node = ctx.node
        self._request = request
        self._correlation_id = correlation_id
        self._opened = opened
        self._by_id = ctx.version >= TOPIC_IDS_FROM
        partitions = ctx.node.partitions
        self._partitions_of = partitions.by_raw_id if self._by_id else partitions.by_raw_name
        self._read_from_disk: dict[tuple[Key, int], Slice | ApiError] = {}
        self._connection: Connection | None = None
        self._slot: Slot | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watched: list[Partition] = []
        self._bytes_missing = 0

    # -- collecting ----------------------------------------------------------------------------------

    def collect(self) -> _Collected:
        """What can be answered now. Raises _NotCached."""
        budget = self._bytes_allowed()
        answers: list[_Answer] = []
        total = 0
        is_final = False
        for key, wanted in self._opened.wanted.items():
            next_offset = -1
            try:
                data, next_offset = self._read(key, wanted, budget - total, is_first=total == 0)
            except ApiError as error:
                data = self._error(key, error)
            is_final = is_final or _is_final(data, next_offset)
            if not self._opened.is_incremental or _is_news(wanted, data):
                answers.append(_Answer(key, wanted, data, next_offset))
            total += len(data.records)
        return _Collected(answers, total, is_final)

    def _bytes_allowed(self) -> int:
        allowed = min(self._request.max_bytes, self._node.fetch_bytes_max)
        return min(allowed, max(self._node.server.response_bytes_left(), _BYTES_ALWAYS_ALLOWED))

    def _read(
        self, key: Key, wanted: Wanted, bytes_left: int, *, is_first: bool
    ) -> tuple[PartitionData, int]:
        partition = self._find(key)
        if wanted.leader_epoch >= 0 and wanted.leader_epoch != partition.leader_epoch:
            _refuse_epoch(wanted.leader_epoch, partition.leader_epoch)
        log = partition.log
        high = partition.high.offset
        read_committed = self._request.isolation_level == _READ_COMMITTED
        upto = partition.last_stable if read_committed else partition.high
        stable = upto.offset if read_committed else high
        if wanted.last_fetched_epoch >= 0 and (diverging := _divergence(partition, wanted)) is not None:
            return PartitionData(key[1], _OK, high, stable, log.start_offset, diverging_epoch=diverging), -1
        records: BytesLike = b""
        next_offset = -1
        if not log.start_offset <= wanted.offset <= log.end_offset:
            raise ApiError(ErrorCode.offset_out_of_range)
        if wanted.offset < upto.offset and (bytes_left > 0 or is_first):
            size = min(wanted.max_bytes, bytes_left)
            piece = self._records(key, partition, wanted.offset, size, upto, is_first)
            records, next_offset = piece
        aborted = () if read_committed else None
        return PartitionData(key[1], _OK, high, stable, log.start_offset, records, aborted), next_offset

    def _records(
        self, key: Key, partition: Partition, offset: int, size: int, upto: LogPosition, is_first: bool
    ) -> Slice:
        if self._read_from_disk and (from_disk := self._read_from_disk.get((key, offset))) is not None:
            if isinstance(from_disk, ApiError):
                raise from_disk
            return from_disk
        log = partition.log
        try:
            return log.read(offset, size, upto, at_least_one=is_first, nowait=True)
        except BlockingIOError:
            read = partial(log.read, offset, size, upto, at_least_one=is_first)
            raise _NotCached(key, offset, read) from None

    def _find(self, key: Key) -> Partition:
        found = self._partitions_of.get(key[0])
        if found is None:
            unknown = ErrorCode.unknown_topic_id if self._by_id else ErrorCode.unknown_topic_or_partition
            raise ApiError(unknown)
        partition = found.get(key[1])
        if partition is None:
            raise ApiError(ErrorCode.unknown_topic_or_partition)
        return partition

    def _error(self, key: Key, error: ApiError) -> PartitionData:
        self._node.metrics.count_error("fetch", error.code.name)
        found = (self._partitions_of.get(key[0]) or {}).get(key[1])
        if found is None or error.code is not ErrorCode.offset_out_of_range:
            return PartitionData(key[1], error.code.value)
        high = found.high.offset
        return PartitionData(key[1], error.code.value, high, high, found.log.start_offset)

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
        for key, wanted, data, next_offset in answers:
            if not topics or topics[-1][0] != key[0]:
                topics.append((key[0], []))
            topics[-1][1].append(data)
            if next_offset >= 0:
                self._count(key, len(data.records), next_offset - wanted.offset)
            if session is not None:
                self._remember_told(key, wanted, data)
        return encode_fetch_response(
            self._ctx.version,
            self._correlation_id,
            error=error.value,
            session_id=0 if session is None else session.id,
            topics=topics,
        )

    def _count(self, key: Key, size: int, records: int) -> None:
        partition = self._partitions_of[key[0]][key[1]]
        traffic = partition.traffic
        traffic.bytes_out += size
        traffic.messages_out += records
        traffic.fetches += 1

    def _remember_told(self, key: Key, wanted: Wanted, data: PartitionData) -> None:
        wanted.high_watermark = data.high_watermark
        wanted.last_stable_offset = data.last_stable_offset
        wanted.log_start_offset = data.log_start_offset
        wanted.told_error = data.error != _OK
        if data.records and self._opened.wanted.get(key) is wanted:
            # Served partitions go to the back, so that a full reply never starves the others.
            self._opened.wanted[key] = self._opened.wanted.pop(key)

    # -- waiting -------------------------------------------------------------------------------------

    def wait(self, connection: Connection, bytes_at_hand: int) -> Slot:
        self._open_slot(connection)
        assert self._slot is not None
        self._bytes_missing = self._request.min_bytes - bytes_at_hand
        self._watch()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._request.max_wait_ms / 1000, self._finish)
        return self._slot

    def _open_slot(self, connection: Connection) -> None:
        self._connection = connection
        self._slot = connection.defer(self._ctx.api_key)
        self._slot.on_lost = self._stop_waiting

    def _watch(self) -> None:
        for key in self._opened.wanted:
            try:
                partition = self._find(key)
            except ApiError:
                continue
            partition.watch(self)
            self._watched.append(partition)

    def bytes_arrived(self, count: int) -> None:
        self._bytes_missing -= count
        if self._bytes_missing <= 0 and self._watched:
            # Not at once: the producer's own reply goes first, and what else arrives now is taken along.
            self._stop_waiting()
            asyncio.get_running_loop().call_soon(self._finish)

    def _finish(self) -> None:
        self._stop_waiting()
        assert self._connection is not None
        assert self._slot is not None
        try:
            reply = self.reply(self.collect().answers)
        except _NotCached as cold:
            self._node.spawn(self._finish_cold(cold))
        except Exception:
            # Whoever appended what this reader waited for must not suffer from it.
            self._node.server.failed(self._connection)
        else:
            self._connection.fulfil(self._slot, reply)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for partition in self._watched:
            partition.unwatch(self)
        self._watched = []

    # -- reading from disk ---------------------------------------------------------------------------

    def read_cold(self, connection: Connection, cold: _NotCached) -> Slot:
        self._open_slot(connection)
        assert self._slot is not None
        self._node.spawn(self._finish_cold(cold))
        return self._slot

    async def _finish_cold(self, cold: _NotCached) -> None:
        assert self._connection is not None
        assert self._slot is not None
        try:
            collected = await self._collect_from_disk(cold)
            self._connection.fulfil(self._slot, self.reply(collected.answers))
        except Exception:
            self._node.server.failed(self._connection)

    async def _collect_from_disk(self, cold: _NotCached) -> _Collected:
        """Each round waits for what the one before found missing; an error counts as found."""
        while True:
            try:
                self._read_from_disk[cold.place] = await self._node.in_thread(cold.read)
            except ApiError as error:
                self._read_from_disk[cold.place] = error
            try:
                return self.collect()
            except _NotCached as another:
                cold = another


def _is_final(data: PartitionData, next_offset: int) -> bool:
    """An error, another history, or more than could be read in one piece: waiting would change nothing."""
    return (
        data.error != _OK
        or data.diverging_epoch is not None
        or (next_offset < data.last_stable_offset and len(data.records) > 0)
    )


def _is_news(wanted: Wanted, data: PartitionData) -> bool:
    """What a session's reader has not been told yet."""
    return bool(
        data.records
        or data.error != _OK
        or wanted.told_error
        or data.diverging_epoch is not None
        or data.high_watermark != wanted.high_watermark
        or data.last_stable_offset != wanted.last_stable_offset
        or data.log_start_offset != wanted.log_start_offset
    )


def _refuse_epoch(asked: int, current: int) -> None:
    if asked < current:
        raise ApiError(ErrorCode.fenced_leader_epoch)
    raise ApiError(ErrorCode.unknown_leader_epoch)


def _divergence(partition: Partition, wanted: Wanted) -> tuple[int, int] | None:
    """Where the reader's history leaves ours, if it does (KIP-595, KIP-320)."""
    epoch, end_offset = partition.end_of_epoch(wanted.last_fetched_epoch)
    if epoch < 0:
        raise ApiError(ErrorCode.offset_out_of_range)
    if epoch < wanted.last_fetched_epoch or end_offset < wanted.offset:
        return epoch, end_offset
    return None
