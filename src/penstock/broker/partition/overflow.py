"""Applies overflow policies and shedding on the leader, and counts what is dropped.

`security.overflow` decides. A partition of which nothing of this is asked has no `PartitionOverflow`. Replication and
what coordinators append are exempt: only batches of clients get here.

A batch that is dropped is checked as if it were appended, and its sequence is remembered, so that a retry gets the same
answer and is counted once. drop-oldest appends first and moves the log start soon after, for many batches at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.partition.drop_counts import DropLedger
from penstock.broker.partition.produced_batch import BatchWithHeldRecords, find_duplicate
from penstock.log.disk_space import NO_SPACE_ERRNOS
from penstock.log.producer_state import PLANNED_PRODUCER_IDS_FROM
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import BATCH_HEADER, BATCH_HEADER_BYTES, TRANSACTIONAL
from penstock.security.overflow import (
    DEFAULT_RULES,
    ClosedSegment,
    Decision,
    DroppedBy,
    DropReason,
    Fill,
    IncomingBatch,
    OverflowPolicy,
    OverflowRules,
    Sampler,
    ShedLevels,
    TrimmableLog,
    Verdict,
    decide,
    decide_overflow,
    trim,
)

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.environment import Environment, ImageView, StorageBudgets
    from penstock.broker.partition.partition import Partition
    from penstock.cluster.topic_settings import EffectiveSetting
    from penstock.log.log import Log, LogAppendInfo
    from penstock.log.log_manager import LogManager
    from penstock.log.producer_state import VerificationGuard

logger = logging.getLogger("penstock.overflow")

#: For how long the connection of a producer is not read after a batch that has to wait.
HOLD_MS: Final = 500
#: How long the log start of a drop-oldest partition stays where it is, to move it once for many batches.
_TRIM_DELAY_S: Final = 0.02
#: How often the disk is measured, bounds are enforced where nothing is appended, and counts are saved.
_ROUND_S: Final = 0.5
_BASE_OFFSET_BYTES: Final = 8
#: Attributes, last offset delta and producer id in a batch header.
_ATTRIBUTES, _LAST_DELTA, _PRODUCER_ID = 5, 6, 9


class NoRoomYet(ApiError):
    """The producer has to send the batch again; until then its connection is not read for a while."""

    def __init__(self, reason: DropReason) -> None:
        super().__init__(ErrorCode.kafka_storage_error, f"no room yet: {_SHORTAGES[reason]}")


_SHORTAGES: Final = {
    DropReason.BYTES: "the partition holds penstock.overflow.bytes",
    DropReason.RECORDS: "the partition holds penstock.overflow.records",
    DropReason.TENANT: "the tenant stores as much as it may",
    DropReason.DISK: "the disk of the leader is full",
}


class OverflowManager:
    """What the partitions of a node share: the state of the disk, the storage of tenants, and the drop counts."""

    def __init__(
        self,
        environment: Environment,
        settings: NodeSettings,
        store: LogManager,
        *,
        metadata: ImageView,
        budgets: StorageBudgets,
        partitions: Callable[[], Iterable[Partition]],
        retain: Callable[[Partition], Awaitable[None]],
        is_unlinking: Callable[[Partition], bool],
    ) -> None:
        """`retain` deletes the segments of a partition that are below its log start.

        `is_unlinking` returns whether files of a partition are about to be deleted.
        """
        self.is_unlinking = is_unlinking
        self._environment = environment
        self._store = store
        self._metadata = metadata
        self._partitions = partitions
        self._retain = retain
        self._free_bytes_min = settings.integer("penstock.overflow.disk.free.bytes")
        self._is_low = False
        self._rounds: asyncio.Task[None] | None = None
        self.budgets = budgets
        self.levels = ShedLevels(
            settings.number("penstock.shed.disk.free.ratio.start"),
            settings.number("penstock.shed.disk.free.ratio.all"),
        )
        self.disk_free = 1.0
        self.drops = DropLedger(store.directory)

    def __repr__(self) -> str:
        return f"<OverflowManager disk_free={self.disk_free:.3f}>"

    # -- configuration -------------------------------------------------------------------------------

    def configure(self, partition: Partition, settings: Mapping[str, EffectiveSetting]) -> None:
        """Apply the settings of the partition's topic."""
        self._use(partition, overflow_rules({name: each.value for name, each in settings.items()}))

    def tenants_changed(self) -> None:
        for partition in self._partitions():
            present = partition.overflow
            self._use(partition, DEFAULT_RULES if present is None else present.rules)

    def _use(self, partition: Partition, rules: OverflowRules) -> None:
        is_asked = (
            rules != DEFAULT_RULES or self._free_bytes_min > 0 or self.budgets.is_bounded(partition.topic)
        )
        if partition.is_internal or not is_asked:
            partition.overflow = None
        elif partition.overflow is None:
            partition.overflow = PartitionOverflow(partition, self, rules)
        else:
            partition.overflow.use(rules)
        if partition.overflow is not None and (self._rounds is None or self._rounds.done()):
            self._rounds = self._environment.spawn(self._repeat())

    # -- what batches ask ----------------------------------------------------------------------------

    @property
    def is_disk_full(self) -> bool:
        """Whether there is no room, or too little of it."""
        return self._is_low or self._store.space.refuse()

    @property
    def has_no_room(self) -> bool:
        """Whether the last write failed for lack of room."""
        return self._store.space.is_full

    @property
    def bytes_to_recover(self) -> int:
        """How much has to be deleted before a full disk takes records again."""
        return self._store.space.recovery_bytes

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._environment.spawn(work)

    async def retain(self, partition: Partition) -> None:
        """Delete the files of what is below the log start. A failure is repeated by the next round."""
        with suppress(ApiError, OSError):
            await self._retain(partition)

    # -- rounds --------------------------------------------------------------------------------------

    async def _repeat(self) -> None:
        while True:
            try:
                await self._round()
            except Exception:
                logger.exception("overflow round failed")  # the next one may succeed
            await asyncio.sleep(_ROUND_S)

    async def _round(self) -> None:
        self._measured(await self._environment.in_thread(os.statvfs, self._store.directory))
        for partition in list(self._partitions()):
            overflow = partition.overflow
            if overflow is None or partition.is_retired:
                continue
            if partition.is_leader:
                overflow.enforce()
            if has_passed_segments(partition.log):
                await self.retain(partition)
        await self._save()

    def _measured(self, found: os.statvfs_result) -> None:
        free_bytes = found.f_bavail * found.f_frsize
        self.disk_free = found.f_bavail / found.f_blocks if found.f_blocks else 1.0
        self._is_low = free_bytes < self._free_bytes_min

    async def _save(self) -> None:
        known = self._metadata.image.topics_by_id
        # While the node starts, it opens partitions of an image that is not published yet.
        if all(partition.topic_id in known for partition in self._partitions()):
            self.drops.keep(known.__contains__)
        if self.drops.is_dirty:
            try:
                await self._environment.in_thread(self._write, self.drops.rows())
            except OSError as error:
                if error.errno not in NO_SPACE_ERRNOS:
                    logger.error("drop counts not saved", extra={"reason": str(error)})

    def save(self) -> None:
        """Save the counts when the node stops. Blocking. Raises OSError."""
        if self.drops.is_dirty:
            self._write(self.drops.rows())

    def _write(self, rows: list[str]) -> None:
        self._store.space.with_reserve(partial(self.drops.save, rows))


def overflow_rules(values: Mapping[str, Any]) -> OverflowRules:
    """Return the rules of a topic. drop-oldest is block where a default of the node keeps old records."""
    policy = OverflowPolicy(values["penstock.overflow"])
    cleanup = values["cleanup.policy"]
    if policy is OverflowPolicy.DROP_OLDEST and ("delete" not in cleanup or "compact" in cleanup):
        policy = OverflowPolicy.BLOCK
    return OverflowRules(
        policy,
        bytes_max=values["penstock.overflow.bytes"],
        records_max=values["penstock.overflow.records"],
        shed_priority=values["penstock.shed.priority"],
        shed_sample=values["penstock.shed.sample"] if values["penstock.shed.priority"] >= 0 else 0.0,
    )


class PartitionOverflow:
    """The rules of one partition, and what its leader does by them."""

    __slots__ = (
        "_is_trimming",
        "_key",
        "_node",
        "_owed_bytes",
        "_owed_for",
        "_partition",
        "_sampler",
        "rules",
    )

    def __init__(self, partition: Partition, node: OverflowManager, rules: OverflowRules) -> None:
        self._partition = partition
        self._node = node
        self._key = (partition.topic_id, partition.index)
        self._is_trimming = False
        #: What drop-oldest has to delete because a tenant or the disk has no room.
        self._owed_bytes, self._owed_for = 0, DropReason.DISK
        self.rules = rules
        self._sampler = Sampler(rules.shed_sample)

    def __repr__(self) -> str:
        return f"<PartitionOverflow {self._partition.topic}-{self._partition.index} {self.rules}>"

    def use(self, rules: OverflowRules) -> None:
        if rules.shed_sample != self.rules.shed_sample:
            self._sampler = Sampler(rules.shed_sample)
        self.rules = rules

    # -- appends -------------------------------------------------------------------------------------

    def append(self, batch: memoryview, now_ms: int, guard: VerificationGuard | None) -> LogAppendInfo:
        """Append a client's batch as far as there is room; without room, do as the rules say. Raises ApiError."""
        partition = self._partition
        if len(batch) < BATCH_HEADER_BYTES:
            return partition.append(batch, now_ms, guard, is_admitted=True)  # which refuses it
        incoming = _incoming(batch)
        fill = self._fill()
        decision = decide(self.rules, fill, incoming, self._node.levels)
        if decision.verdict is not Verdict.ADMIT and decision.verdict is not Verdict.TRIM:
            repeated = find_duplicate(partition, batch)
            if repeated is not None:
                return repeated
        if decision.verdict is Verdict.SHED:
            if not self._sampler.keeps(incoming.records):
                assert decision.reason is not None
                return self._drop(batch, now_ms, incoming, DroppedBy.SHED, decision.reason)
            decision = decide_overflow(self.rules, fill, incoming)
        if decision.verdict is Verdict.ADMIT or decision.verdict is Verdict.TRIM:
            return self._admit(batch, now_ms, guard, incoming, decision)
        return self._without_room(batch, now_ms, incoming, decision)

    def _admit(
        self,
        batch: memoryview,
        now_ms: int,
        guard: VerificationGuard | None,
        incoming: IncomingBatch,
        decision: Decision,
    ) -> LogAppendInfo:
        try:
            appended = self._partition.append(batch, now_ms, guard, is_admitted=True)
        except ApiError as error:
            if error.code is not ErrorCode.kafka_storage_error or not self._node.has_no_room:
                raise
            batch[:_BASE_OFFSET_BYTES] = bytes(_BASE_OFFSET_BYTES)  # the append has set it
            return self._on_full_disk(batch, now_ms, incoming)
        if decision.verdict is Verdict.TRIM and not appended.duplicate:
            if decision.reason is DropReason.TENANT or decision.reason is DropReason.DISK:
                # Twice as much as it takes, so that the shortage ends.
                self._owe(2 * incoming.bytes, decision.reason)
            self._trim_soon()
        return appended

    def _on_full_disk(self, batch: memoryview, now_ms: int, incoming: IncomingBatch) -> LogAppendInfo:
        """The write has failed for lack of room."""
        decision = decide_overflow(self.rules, Fill(is_disk_full=True), incoming)
        if decision.verdict is Verdict.TRIM:
            first = next(iter(_closed_segments(self._partition.log)), None)
            # What was dropped before must have made room first, or everything would be dropped for nothing.
            if first is not None and not self._is_deleting:
                needed_bytes = self._node.bytes_to_recover + incoming.bytes
                self._owed_bytes = max(self._owed_bytes, needed_bytes, first.size_bytes)
                self._owed_for = DropReason.DISK
                self._trim_soon()
            decision = Decision(Verdict.WAIT, DropReason.DISK)
        return self._without_room(batch, now_ms, incoming, decision)

    @property
    def _is_deleting(self) -> bool:
        partition = self._partition
        return has_passed_segments(partition.log) or self._node.is_unlinking(partition)

    def _without_room(
        self, batch: memoryview, now_ms: int, incoming: IncomingBatch, decision: Decision
    ) -> LogAppendInfo:
        reason = decision.reason
        assert reason is not None
        if decision.verdict is Verdict.DROP:
            return self._drop(batch, now_ms, incoming, DroppedBy.DROP_NEWEST, reason)
        self._partition.traffic.refused[self.rules.policy, reason] += incoming.records
        match decision.verdict:
            case Verdict.WAIT:
                raise NoRoomYet(reason)
            case Verdict.TOO_LARGE:
                raise ApiError(
                    ErrorCode.message_too_large,
                    f"a batch of {incoming.records} records and {incoming.bytes} bytes never fits: "
                    f"the partition may hold {self._bounds}",
                )
            case _:
                why = " and a transaction is never stored in part" if incoming.is_transactional else ""
                raise ApiError(
                    ErrorCode.policy_violation,
                    f"penstock.overflow={self.rules.policy}: {_SHORTAGES[reason]}{why}",
                )

    @property
    def _bounds(self) -> str:
        rules = self.rules
        bounds = ((rules.records_max, "records"), (rules.bytes_max, "bytes"))
        return " and ".join(f"{bound} {unit}" for bound, unit in bounds if bound >= 0)

    def _drop(
        self, batch: memoryview, now_ms: int, incoming: IncomingBatch, by: DroppedBy, reason: DropReason
    ) -> LogAppendInfo:
        """Answer without an offset. Raises ApiError if the batch is not valid."""
        partition = self._partition
        skipped = partition.log.skip(
            batch,
            leader_epoch=partition.leader_epoch,
            now_ms=now_ms,
            sparse=batch.obj.__class__ is BatchWithHeldRecords,
        )
        if not skipped.duplicate:
            self._node.drops.add(self._key, by, reason, incoming.records)
        return skipped

    def _fill(self) -> Fill:
        partition, node, rules = self._partition, self._node, self.rules
        log, topic = partition.log, partition.topic
        uncommitted_bytes = uncommitted_records = 0
        if rules.policy is OverflowPolicy.DROP_OLDEST:
            uncommitted_records = log.end.offset - partition.high.offset
            uncommitted_bytes = _uncommitted_bytes(partition) if uncommitted_records else 0
        return Fill(
            bytes=held_bytes(log) if rules.bytes_max >= 0 else 0,
            records=log.end.offset - log.start_offset,
            uncommitted_bytes=uncommitted_bytes,
            uncommitted_records=uncommitted_records,
            tenant_free=node.budgets.free_share(topic),
            disk_free=node.disk_free,
            is_tenant_full=node.budgets.excess_bytes(topic) > 0,
            is_disk_full=node.is_disk_full,
        )

    # -- drop-oldest ---------------------------------------------------------------------------------

    def enforce(self) -> None:
        """Delete what is beyond the bounds although nothing is appended: they were lowered, or commits came late."""
        if self.rules.policy is not OverflowPolicy.DROP_OLDEST:
            return
        if self._owed_bytes and not (
            self._node.is_disk_full or self._node.budgets.excess_bytes(self._partition.topic)
        ):
            self._owed_bytes = 0
        self._trim_soon()

    def _owe(self, count: int, reason: DropReason) -> None:
        # Never more than there is: the debt of a log that cannot pay must not take what comes later.
        self._owed_bytes = min(self._owed_bytes + count, self._partition.log.size_bytes)
        self._owed_for = reason

    def _trim_soon(self) -> None:
        if not self._is_trimming:
            self._is_trimming = True
            self._node.spawn(self._trim_later())

    async def _trim_later(self) -> None:
        await asyncio.sleep(_TRIM_DELAY_S)
        self._is_trimming = False
        if self._partition.is_leader and not self._partition.is_retired and self._trim():
            await self._node.retain(self._partition)

    def _trim(self) -> bool:
        """Move the log start, and count what it passes. Returns whether it has moved."""
        partition, log = self._partition, self._partition.log
        view = TrimmableLog(
            log.start_offset,
            log.end.offset,
            partition.high.offset,
            held_bytes(log),
            list(_closed_segments(log)),
        )
        cut = trim(self.rules, view, owed_bytes=self._owed_bytes, owed_for=self._owed_for)
        self._owed_bytes = max(self._owed_bytes - cut.paid_bytes, 0)
        if cut.start_offset <= log.start_offset:
            return False
        log.delete_records_before(cut.start_offset)
        for reason, records in cut.dropped.items():
            self._node.drops.add(self._key, DroppedBy.DROP_OLDEST, reason, records)
        partition.dropped_before = cut.start_offset
        partition.start_moved()
        return True


def _incoming(batch: memoryview) -> IncomingBatch:
    header = BATCH_HEADER.unpack_from(batch)
    control = batch.obj.control if isinstance(batch.obj, BatchWithHeldRecords) else b""
    return IncomingBatch(
        bytes=len(batch) + len(control),
        records=max(header[_LAST_DELTA] + 1, 0),
        is_transactional=bool(header[_ATTRIBUTES] & TRANSACTIONAL),
        is_planned=header[_PRODUCER_ID] >= PLANNED_PRODUCER_IDS_FROM,
    )


def held_bytes(log: Log) -> int:
    """Return the bytes of a log without the segments that are below its start, which are being deleted."""
    start = log.start_offset
    return sum(
        segment.size for segment in log.segments if segment.next_base is None or segment.next_base > start
    )


def has_passed_segments(log: Log) -> bool:
    next_base = log.segments[0].next_base
    return next_base is not None and next_base <= log.start_offset


def _closed_segments(log: Log) -> Iterable[ClosedSegment]:
    for segment in log.segments:
        if segment.next_base is None:
            return
        if segment.next_base > log.start_offset:
            yield ClosedSegment(segment.size, segment.next_base)


def _uncommitted_bytes(partition: Partition) -> int:
    high, end = partition.high, partition.log.end
    if high.segment_base == end.segment_base:
        return end.position - high.position
    return sum(
        segment.size
        for segment in partition.log.segments
        if segment.next_base is None or segment.next_base > high.offset
    )
