"""The mover of a partition that this broker leads: it moves held records to the schedule shard that stores them.

It reads only committed data, and no aborted transactions. The shard stores the position up to which records were
moved, so the next leader continues from there, and records that are sent twice are stored once. The mover remembers
where records were held since it started, and reads nothing else. It scans the log in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.coordinators.runtime.sharded_coordinator import leads_in_epoch
from penstock.broker.coordinators.schedule.messages import ScheduleOperation, ScheduleRequest
from penstock.log.indexes import AbortedTransactionFilter
from penstock.log.validation import read_validated
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.errors import ApiError
from penstock.protocol.record_batch import BatchHeader, iter_batches
from penstock.scheduling.intake import HeldBatch, is_held_batch, read_held_batch
from penstock.scheduling.schedule_log import ScheduleSource, SourcePosition
from penstock.scheduling.schedule_shard import FoundHeldBatch, HeldChunk, cut_chunks, resume_from

if TYPE_CHECKING:
    from penstock.broker.coordinators.schedule.coordinator import ScheduleCoordinator
    from penstock.broker.partition.partition import Partition
    from penstock.log.log import Log
    from penstock.log.segment import LogOffsetMetadata


_READ_BYTES: Final = 256 << 10

_Batch = tuple[BatchHeader, memoryview]


class ScanResult(NamedTuple):
    found: list[FoundHeldBatch]
    next_offset: int


def scan_held_records(log: Log, offset: int, upto: LogOffsetMetadata) -> ScanResult:
    """Return the held records up to `upto`, the last stable offset.

    A control batch of held records counts only if the batch that the records were taken from follows it. Raises
    CORRUPT_MESSAGE for a damaged batch: moving its records would give them a new, valid checksum.
    """
    batches, next_offset = _read_batches(log, offset, upto)
    aborts = AbortedTransactionFilter(log.aborted_in(offset, next_offset))
    found: list[FoundHeldBatch] = []
    pending: tuple[BatchHeader, HeldBatch] | None = None
    for header, batch in batches:
        is_aborted = aborts.has(header.base_offset, header.attributes, header.producer_id)
        if pending is not None and pending[1].belongs_to(pending[0], header) and not is_aborted:
            at = SourcePosition(pending[0].leader_epoch, pending[0].base_offset)
            found.append(
                FoundHeldBatch(at, SourcePosition(header.leader_epoch, header.last_offset + 1), pending[1])
            )
        pending = None
        if is_held_batch(header, batch):
            pending = header, read_held_batch(batch, log.config.decoded_bytes_max)
    return ScanResult(found, next_offset if pending is None else pending[0].base_offset)


def _read_batches(log: Log, offset: int, upto: LogOffsetMetadata) -> tuple[list[_Batch], int]:
    piece = read_validated(log, offset, _READ_BYTES, upto)
    batches, next_offset = list(iter_batches(piece.data)), piece.next_offset
    if batches and is_held_batch(*batches[-1]) and next_offset < upto.offset:
        # The batch that decides whether it counts is beyond this chunk.
        following = read_validated(log, next_offset, 1, upto)
        batches += iter_batches(following.data)
        next_offset = following.next_offset
    return batches, next_offset


logger = logging.getLogger("penstock.schedule")

#: Bytes of held records in one request to the shard.
_REQUEST_BYTES: Final = 512 << 10
_BACKOFF: Final = ExponentialBackoff(base_ms=50, cap_ms=2_000)
#: How often the mover reports a position that advanced without held records.
_POSITION_INTERVAL_S: Final = 30.0


class Mover:
    def __init__(self, schedule: ScheduleCoordinator, partition: Partition) -> None:
        self._schedule = schedule
        self.partition = partition
        self.leader_epoch = partition.leader_epoch
        self.source = ScheduleSource(partition.topic_id, partition.index)
        self._position: SourcePosition | None = None  # as stored in the shard
        self._next = self._last_held = 0  # next offset to scan; offset of the last held records, if any
        self._save_at = self._clock() + _POSITION_INTERVAL_S
        self._wake = asyncio.Event()
        self._task = schedule.environment.spawn(self._run())

    def __repr__(self) -> str:
        name = f"{self.partition.topic}-{self.partition.index}"
        return f"<Mover of {name} at {self._next}, {self._position} is saved>"

    @property
    def is_current(self) -> bool:
        return leads_in_epoch(self.partition, self.leader_epoch)

    @property
    def moved_offset(self) -> int:
        """The offset from which on records may still have to be moved; 0 while it is unknown."""
        if self._position is None:
            return 0
        return self.partition.log.end_offset if self._is_idle else self._next

    @property
    def has_position(self) -> bool:
        return self._position is not None

    @property
    def _is_idle(self) -> bool:
        return self._next > self._last_held

    def close(self) -> None:
        self._task.cancel()
        self.partition.unwatch(self)
        if self.partition.on_held == self._held_at:
            self.partition.on_held = None

    def configured(self) -> None:
        """Called when the settings of the topic may have changed."""
        if self._position is not None and self.partition.is_scheduled:
            self.partition.on_held = self._held_at
        if self._task.done() and self.partition.is_scheduled:
            self._task = self._schedule.environment.spawn(self._run())

    def bytes_arrived(self, count: int) -> None:
        """Called when more data is committed."""
        self._wake.set()

    def _held_at(self, offset: int) -> None:
        if self._is_idle:
            self._next = offset
        self._last_held = offset
        self._wake.set()

    async def _run(self) -> None:
        failures = 0
        while self.is_current:
            try:
                if self._position is None and not await self._begin():
                    return
                await self._move_on()
                failures = 0
            except (ApiError, ConnectionError, TimeoutError) as error:
                # The first failure is normal, because a shard takes a moment to load.
                level = logging.INFO if failures else logging.DEBUG
                logger.log(
                    level, "cannot hand held records over", extra={"mover": repr(self), "reason": str(error)}
                )
                await asyncio.sleep(_BACKOFF.spread_ms(failures, random) / 1000)
                failures += 1
            except Exception:
                logger.exception("mover failed", extra={"mover": repr(self)})
                await asyncio.sleep(_BACKOFF.cap_ms / 1000)

    async def _begin(self) -> bool:
        """Look up where to continue. Returns False if no records were ever held here and none will be."""
        partition = self.partition
        if partition.is_scheduled:
            await self._schedule.ensure_topic()
        position = await self._schedule.ask(ScheduleRequest(ScheduleOperation.POSITION, self.source))
        if position is None:
            if not partition.is_scheduled:
                return False
            # The partition accepts held records only from now on, so there are none before.
            start = SourcePosition(self.leader_epoch, partition.log.end_offset)
            position = await self._schedule.ask(
                ScheduleRequest(ScheduleOperation.REGISTER, self.source, start)
            )
            assert position is not None
        self._continue_from(position)
        self._last_held = max(self._last_held, partition.log.end_offset - 1)
        if partition.is_scheduled:
            partition.on_held = self._held_at
        return True

    def _continue_from(self, position: SourcePosition) -> None:
        self._position = position
        partition, offset = self.partition, position.offset
        _, end = partition.end_of_epoch(position.epoch)
        if 0 <= end < offset:
            # An unclean election has removed records that the previous leader had moved.
            offset = end
        self._next = max(offset, partition.log.start_offset)

    async def _move_on(self) -> None:
        partition, upto = self.partition, self.partition.last_stable
        self._wake.clear()
        if self._clock() > self._save_at:
            await self._save()
        elif self._is_idle:
            await self._rest()
        elif self._next >= upto.offset:
            await self._more_committed()
        else:
            await self._look(partition.log, upto)

    async def _look(self, log: Log, upto: LogOffsetMetadata) -> None:
        try:
            scanned = await self._schedule.environment.in_thread(scan_held_records, log, self._next, upto)
        except ApiError as error:
            if self.is_current:
                self._schedule.handle_read_error(self.partition, error)
            raise
        if not self.is_current or (scanned.found and not await self._hand_over(scanned)):
            return
        if scanned.next_offset == self._next and self.partition.last_stable.offset == upto.offset:
            # The batch that the held records were taken from is not committed, or its transaction has not ended.
            await self._more_committed()
        self._next = max(self._next, scanned.next_offset)

    async def _more_committed(self) -> None:
        self.partition.watch(self)
        try:
            await self._rest()
        finally:
            self.partition.unwatch(self)

    async def _rest(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_POSITION_INTERVAL_S):
                await self._wake.wait()

    @staticmethod
    def _clock() -> float:
        return asyncio.get_running_loop().time()

    async def _save(self) -> None:
        """Store the position, so that the next leader need not scan up to it and followers need not keep the log."""
        self._save_at = self._clock() + _POSITION_INTERVAL_S
        assert self._position is not None
        offset = min(self.moved_offset, self.partition.last_stable.offset)
        if offset > self._position.offset:
            to = SourcePosition(self.partition.epoch_at(offset - 1), offset)
            await self._send([HeldChunk.empty(to)])

    async def _hand_over(self, scanned: ScanResult) -> bool:
        """Move the records. Returns False if the shard is at another position; the mover now continues from there."""
        assert self._position is not None
        found = resume_from(self._position, scanned.found)
        chunks = await self._schedule.environment.in_thread(lambda: list(cut_chunks(found)))
        for part in _split_chunks(chunks):
            if not await self._send(part):
                return False
        return True

    async def _send(self, chunks: list[HeldChunk]) -> bool:
        assert self._position is not None
        position = await self._schedule.ask(
            ScheduleRequest(ScheduleOperation.MOVE, self.source, self._position, chunks)
        )
        if position is None:
            self._position = None  # the shard does not know the source any more: start again
            return False
        if position == chunks[-1].position:
            self._position = position
            self._next = max(self._next, position.offset)  # keep this progress if a later part fails
            return True
        self._continue_from(position)
        return False


def _split_chunks(chunks: Iterable[HeldChunk]) -> Iterable[list[HeldChunk]]:
    part: list[HeldChunk] = []
    size = 0
    for chunk in chunks:
        part.append(chunk)
        size += sum(map(len, chunk.blocks))
        if size >= _REQUEST_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
