"""One ShareFetch request: it acquires the records that it can have, or waits until there are some or its maximum
wait is over.

Released records, elapsed delays, expired locks, appends and completed state writes wake it. Under at-most-once
delivery it first has records written as final, and acquires them when that is stored. When its session ends it
acquires nothing more, because nothing would release those records. The log is read in whole batches, and only their
headers are parsed. If exact record counts are needed, batches with gaps from compaction are decoded in a thread.

The checksum of each batch is verified before its records are acquired: a member could only reject a damaged record, or
release it until it has been delivered as often as the group allows, although other replicas may have it.
"""

from __future__ import annotations

import asyncio
import struct
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from penstock.broker.coordinators.share.partitions import SharePartitionLeader, monotonic_ms
from penstock.groups.share.partition.share_partition_state import (
    AcquiredBatch,
    AcquireLimits,
    ReadableRecords,
)
from penstock.log.indexes import AbortedTransactionFilter
from penstock.log.reader import damaged_records
from penstock.log.segment import LogOffsetMetadata, LogSlice
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import (
    ATTRIBUTES_OFFSET,
    BATCH_HEADER_BYTES,
    CONTROL,
    LOG_OVERHEAD_BYTES,
    BatchOffsets,
    crc32c,
    decode_records,
    read_header,
)

if TYPE_CHECKING:
    from penstock.broker.coordinators.share.partitions import SharePartitionManager
    from penstock.broker.coordinators.share.sessions import RawTopicIdPartition, ShareSession
    from penstock.protocol.share import ShareFetchRequest
    from penstock.protocol.steps import Steps


#: base offset, length, magic, checksum, attributes, last offset delta, producer id, record count
_HEADER: Final = struct.Struct(">qi4xbIhi16xq6xi")
_MAGIC: Final = 2
#: Finds the offsets of a batch's records, as runs. Raises BlockingIOError if it must not run on the event loop.
FindRecordRuns = Callable[[memoryview], list[tuple[int, int]]]


class ScannedBatches(NamedTuple):
    """`starts` are the positions of the batches in the data, followed by the end of the data."""

    data: BytesLike
    found: ReadableRecords
    starts: Sequence[int]


def scan_batches(
    offset: int,
    piece: LogSlice,
    aborted: Sequence[tuple[int, int]] = (),
    look_inside: FindRecordRuns | None = None,
    *,
    end_offset: int,
) -> ScannedBatches:
    """Scan data that was read from `offset` on, up to `end_offset`. Batches of `aborted` transactions deliver nothing.

    With `look_inside`, gaps within batches are found too. The scan ends before damage; raises DamagedRead if nothing
    is intact. The checksum does not cover the base offset, so batches must follow each other.
    """
    data, position, size = piece.data, 0, len(piece.data)
    offsets = BatchOffsets(offset)
    view = memoryview(data)
    spans: list[tuple[int, int]] = []
    ends: list[int] = []
    starts: list[int] = []
    skips = AbortedTransactionFilter(aborted) if aborted else None
    while position + BATCH_HEADER_BYTES <= size:
        base, length, magic, crc, attributes, delta, producer_id, count = _HEADER.unpack_from(data, position)
        behind = position + length + LOG_OVERHEAD_BYTES
        is_batch = magic == _MAGIC and length >= BATCH_HEADER_BYTES - LOG_OVERHEAD_BYTES
        if not is_batch or crc32c(view[position + ATTRIBUTES_OFFSET : behind]) != crc:
            break
        last = base + delta
        if last >= end_offset or not offsets.follow(base, last):
            if offsets.is_last_doubtful:
                starts.pop()
                ends.pop()
                spans = [(first, min(end, ends[-1])) for first, end in spans if ends and first < ends[-1]]
            break
        starts.append(position)
        after = last + 1
        ends.append(after)
        is_left_out = not count or attributes & CONTROL
        if skips is not None and skips.has(base, attributes, producer_id):
            is_left_out = True
        if not is_left_out:
            if count <= delta and look_inside is not None:
                spans += look_inside(view[position:behind])
            elif spans and spans[-1][1] == base:
                spans[-1] = (spans[-1][0], after)
            else:
                spans.append((base, after))
        position = behind
    if size and not ends:
        raise damaged_records(offset, piece, "checksum of the record batch does not match")
    starts.append(position)
    next_offset = ends[-1] if ends else offset
    return ScannedBatches(data, ReadableRecords(offset, next_offset, spans, ends), starts)


def defer_to_thread(batch: memoryview) -> list[tuple[int, int]]:
    raise BlockingIOError


def record_runs(batch: memoryview, max_bytes: int) -> list[tuple[int, int]]:
    """Blocking. A batch that cannot be decoded counts as one run: its consumer rejects it."""
    runs: list[tuple[int, int]] = []
    try:
        for record in decode_records(batch, max_bytes):
            if runs and runs[-1][1] == record.offset:
                runs[-1] = (runs[-1][0], record.offset + 1)
            else:
                runs.append((record.offset, record.offset + 1))
    except ApiError:
        header = read_header(batch)
        return [(header.base_offset, header.last_offset + 1)]
    return runs


def select_batches(read: ScannedBatches, acquired: Sequence[AcquiredBatch]) -> list[BytesLike]:
    """Select only the batches that contain acquired records."""
    ends, starts = read.found.ends, read.starts
    pieces: list[tuple[int, int]] = []
    for first_offset, last_offset, _ in acquired:
        first = bisect_left(ends, first_offset + 1)
        after = bisect_left(ends, last_offset + 1, first) + 1
        if pieces and first <= pieces[-1][1]:
            pieces[-1] = (pieces[-1][0], max(after, pieces[-1][1]))
        else:
            pieces.append((first, after))
    if pieces == [(0, len(ends))] and starts[-1] == len(read.data):
        return [read.data]
    view = memoryview(read.data)
    return [view[starts[first] : starts[after]] for first, after in pieces]


_RECORD_LIMIT: Final = 1
#: Read more than the estimated size of the records, so that one read usually suffices.
_READ_SIZE_FACTOR: Final = 1.25
#: The maximum number of offsets to read per requested record. A read that starts at released records goes on to new
#: ones, but not if those are too far away.
_OFFSETS_PER_RECORD_MAX: Final = 5
_READ_BYTES_MIN: Final = 16 * 1024
_BYTES_ALWAYS_ALLOWED: Final = 64 * 1024
_REFUSED: Final = ApiError(ErrorCode.topic_authorization_failed)
#: No records are available now. Clients do not expect these codes (the Java client fails), so the request waits.
_RETRIABLE_CODES: Final = frozenset({ErrorCode.coordinator_not_available, ErrorCode.offset_out_of_range})


class AcquiredRecords(NamedTuple):
    """The records that a request acquires from one partition; none if there is an error."""

    records: list[BytesLike]
    acquired: Sequence[AcquiredBatch]
    error: ApiError | None = None
    led: SharePartitionLeader | None = None

    @property
    def bytes_count(self) -> int:
        return sum(map(len, self.records))

    @property
    def records_count(self) -> int:
        return sum(last - first + 1 for first, last, _ in self.acquired)


class ReadWouldBlock(Exception):
    """The next read would block the event loop."""

    def __init__(self, led: SharePartitionLeader, offset: int, read: Callable[[], ScannedBatches]) -> None:
        super().__init__(led, offset)
        self.key = (led, offset)
        self.read = read


class FetchQuota(Protocol):
    """What the quota of the member's client leaves it."""

    def bytes_max(self) -> int: ...

    def used(self, size: int) -> None: ...


class DelayedShareFetch:
    def __init__(
        self,
        shares: SharePartitionManager,
        session: ShareSession,
        request: ShareFetchRequest,
        may_read: Callable[[bytes], bool] | None,
        work: Callable[[Steps[Any]], Awaitable[Any]],
        quota: FetchQuota | None,
    ) -> None:
        """`may_read` returns whether the member may read a topic, given by the bytes of its id; None means all.

        `work` does steps, in turn with other requests. The quota counts records as soon as they are acquired.
        """
        self._work = work
        self._quota = quota
        self._shares = shares
        self._session = session
        self._group, self._member = session.group, session.member
        self._request = request
        self._may_read = may_read
        self._partitions = session.rotated()
        self.portions: dict[RawTopicIdPartition, AcquiredRecords] = {}
        self._leaders: dict[RawTopicIdPartition, SharePartitionLeader] = {}
        self._cold_reads: dict[tuple[SharePartitionLeader, int], ScannedBatches | ApiError] = {}
        self._peeked_reads: dict[tuple[SharePartitionLeader, int], ScannedBatches] = {}
        self._pending_writes: list[asyncio.Future[None]] = []
        self._reserved = 0  # requested records that are being written as final (at-most-once)
        self._has_more = False  # the log has more to read
        self._watched: list[SharePartitionLeader] = []
        self._woken: asyncio.Future[None] | None = None
        self._is_timed_out = False

    # -- acquiring -----------------------------------------------------------------------------------

    def collect(self) -> Steps[bool]:
        """Returns whether the reply is complete. Raises ReadWouldBlock. Each partition is a step."""
        if not self._session.is_open:
            return True
        if self._may_read is not None:
            # Each time, because the rules may have changed while the request waited.
            for partition in self._partitions:
                if partition not in self.portions and not self._may_read(partition[0]):
                    self.portions[partition] = AcquiredRecords([], (), _REFUSED)
                yield
        bytes_left, records_left = self._left()
        self._peeked_reads.clear()
        self._reserved = 0
        self._has_more = False
        if not (yield from self._has_enough(bytes_left)):
            return False
        for partition in self._partitions:
            yield
            if not self._session.is_open:
                return True
            if records_left <= self._reserved or bytes_left <= 0:
                break
            if partition in self.portions:
                continue
            try:
                portion = self._take(partition, records_left - self._reserved, bytes_left)
            except ApiError as error:
                self._shares.metrics.count_error("share_fetch", error.code.name)
                portion = None if error.code in _RETRIABLE_CODES else AcquiredRecords([], (), error)
            if portion is not None:
                self.portions[partition] = portion
                bytes_left -= portion.bytes_count
                if self._quota is not None:
                    self._quota.used(portion.bytes_count)
                records_left -= portion.records_count
        return bool(self.portions)

    def _left(self) -> tuple[int, int]:
        """Bytes and records that may still be acquired."""
        allowed = min(self._request.max_bytes, self._shares.fetch_bytes_max)
        allowed = min(allowed, max(self._shares.response_bytes_left(), _BYTES_ALWAYS_ALLOWED))
        taken = self.portions.values()
        taken_bytes = sum(portion.bytes_count for portion in taken)
        if self._quota is not None:
            allowed = min(allowed, taken_bytes + self._quota.bytes_max())
        return (
            allowed - taken_bytes,
            self._request.max_records - sum(portion.records_count for portion in taken),
        )

    def _take(
        self, partition: RawTopicIdPartition, records_max: int, bytes_max: int
    ) -> AcquiredRecords | None:
        """Returns None if nothing is available now. Raises ApiError."""
        led = self._led(partition)
        if led is None:
            return None
        rules = led.current()
        read = self._read(led, records_max, bytes_max)
        if read is None:
            return None
        is_exact = led.config.share_is_exact or self._request.acquire_mode == _RECORD_LIMIT
        limits = AcquireLimits(records_max, max(self._request.batch_records, 1), is_exact)
        acquired = rules.acquire(self._member, read.found, limits, now_ms=monotonic_ms())
        if not acquired and rules.policy.is_at_most_once:
            reserved = rules.reserve(read.found, limits)
            if reserved:
                self._reserved += reserved
                self._pending_writes.append(led.stored())
        led.changed()
        if not acquired:
            # The data holds nothing (more) for this member, but the data after it may.
            self._has_more |= rules.next_offset not in (None, read.found.first_offset)
            return None
        self._update_record_size(led, read)
        portion = AcquiredRecords(select_batches(read, acquired), acquired, None, led)
        self._count(led, portion)
        return portion

    def _led(self, partition: RawTopicIdPartition) -> SharePartitionLeader | None:
        """Returns None while the partition is loading. Raises ApiError, also if loading failed."""
        led = self._leaders.get(partition)
        if led is None or not led.is_closed:
            led = self._leaders[partition] = self._shares.find(self._group, partition)
        return None if led.rules is None and not led.is_closed else led

    def _update_record_size(self, led: SharePartitionLeader, read: ScannedBatches) -> None:
        offsets = read.found.next_offset - read.found.first_offset
        led.bytes_per_record = (led.bytes_per_record + len(read.data) / max(offsets, 1)) / 2

    def _count(self, led: SharePartitionLeader, portion: AcquiredRecords) -> None:
        traffic = led.partition.traffic
        traffic.bytes_out += portion.bytes_count
        traffic.messages_out += portion.records_count
        traffic.fetches += 1

    # -- reading -------------------------------------------------------------------------------------

    def _read(self, led: SharePartitionLeader, records_max: int, bytes_max: int) -> ScannedBatches | None:
        """Returns None if there is nothing new to read. Raises ApiError and ReadWouldBlock."""
        rules, log = led.current(), led.partition.log
        if rules.start_offset < log.start_offset:
            rules.log_start_moved(log.start_offset)
        offset = rules.next_offset
        if offset is None or offset < log.start_offset:
            # Deleted records are skipped once all pending state writes for them are done.
            return None
        committed, upto = led.config.share_reads_committed, _readable_end(led)
        if offset >= upto.offset:
            return None
        cold = self._cold_reads.get((led, offset)) or self._peeked_reads.get((led, offset))
        if isinstance(cold, ApiError):
            raise cold
        if cold is not None:
            self._cold_reads.pop((led, offset), None)
            return cold
        # Under at-most-once delivery records are counted, so gaps within batches must be known.
        is_exact = rules.policy.is_at_most_once
        offsets = min(rules.reach(records_max), _OFFSETS_PER_RECORD_MAX * records_max)
        size = max(int(offsets * led.bytes_per_record * _READ_SIZE_FACTOR), _READ_BYTES_MIN)

        def read(*, nowait: bool) -> ScannedBatches:
            piece: LogSlice = log.read(offset, min(size, bytes_max), upto, at_least_one=True, nowait=nowait)
            aborted: Sequence[tuple[int, int]] = ()
            if committed and log.has_aborted:
                aborted = log.aborted_in(offset, piece.next_offset, nowait=nowait)
            look_inside = self._look(nowait=nowait) if is_exact else None
            return scan_batches(offset, piece, aborted, look_inside, end_offset=upto.offset)

        try:
            return read(nowait=True)
        except BlockingIOError:
            raise ReadWouldBlock(led, offset, partial(read, nowait=False)) from None
        except ApiError as error:
            raise self._shares.handle_read_error(led, error) from None

    def _look(self, *, nowait: bool) -> FindRecordRuns:
        if nowait:
            return defer_to_thread
        return partial(record_runs, max_bytes=self._shares.decompressed_bytes_max)

    def _has_enough(self, bytes_max: int) -> Steps[bool]:
        """Whether there are `min_bytes` to read, or more than a response can hold.

        Also True after the timeout, and if there are released records.
        """
        wanted = min(self._request.min_bytes, bytes_max)
        if wanted <= 1 or self._is_timed_out or self.portions:
            return True
        there = 0
        for partition in self._partitions:
            yield
            try:
                led = self._led(partition)
                if led is None:
                    continue
                rules = led.current()
                read = self._read(led, self._request.max_records, bytes_max)
            except ApiError:
                return True
            if read is not None:
                self._peeked_reads[led, read.found.first_offset] = read
                there += len(read.data)
                is_full = read.found.next_offset < _readable_end(led).offset
                if there >= wanted or is_full or read.found.first_offset < rules.end_offset:
                    return True
        return False

    # -- waiting -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Wait until there is something to return, or until the timeout."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._request.max_wait_ms / 1000
        try:
            while True:
                if self._pending_writes:
                    # Wait for reserved records first: they are stored as final, and no other request may ever get them.
                    paying, self._pending_writes = self._pending_writes, []
                    await asyncio.wait(paying)
                if await self._collected():
                    return
                if self._pending_writes:
                    continue
                if self._has_more and loop.time() < deadline:
                    await asyncio.sleep(0)  # let other tasks run
                    continue
                if self._is_timed_out:
                    return
                if await self._has_news(deadline):
                    return
        finally:
            self._unwatch()

    async def _collected(self) -> bool:
        while True:
            try:
                return bool(await self._work(self.collect()))
            except ReadWouldBlock as cold:
                # Keep the reads that were done before this one.
                self._cold_reads |= self._peeked_reads
                try:
                    self._cold_reads[cold.key] = await self._shares.environment.in_thread(cold.read)
                except ApiError as error:
                    # Kept until the next wait, so that the same read does not begin again and again.
                    self._cold_reads[cold.key] = self._shares.handle_read_error(cold.key[0], error)

    async def _has_news(self, deadline: float) -> bool:
        """Wait for news; return whether the reply is complete already."""
        loop = asyncio.get_running_loop()
        self._cold_reads.clear()  # there may be more data by then
        self._woken = loop.create_future()
        await self._work(self._watch())
        # Records that arrived between the last read of a partition and the watch on it have not woken this request.
        if await self._collected():
            return True
        if self._pending_writes:
            return False
        timer = loop.call_at(deadline, self._on_timeout)
        try:
            await self._woken
        finally:
            timer.cancel()
        return False

    def _watch(self) -> Steps[None]:
        self._unwatch()
        for partition in self._partitions:
            yield
            try:
                led = self._shares.find(self._group, partition)
            except ApiError:
                continue
            led.watch(self)
            self._watched.append(led)

    def _unwatch(self) -> None:
        for led in self._watched:
            led.unwatch(self)
        self._watched = []

    def wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _on_timeout(self) -> None:
        self._is_timed_out = True
        self.wake()

    def checked(self) -> dict[RawTopicIdPartition, AcquiredRecords]:
        """Check the result before it is sent: if a leader was fenced meanwhile, return its error instead of records."""
        for partition, portion in self.portions.items():
            if portion.led is not None and portion.led.is_closed:
                error = portion.led.error or ApiError(ErrorCode.not_leader_or_follower)
                self.portions[partition] = AcquiredRecords([], (), error)
        return self.portions


def _readable_end(led: SharePartitionLeader) -> LogOffsetMetadata:
    return led.partition.last_stable if led.config.share_reads_committed else led.partition.high
