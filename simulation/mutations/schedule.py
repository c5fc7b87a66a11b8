"""Mutations of scheduled delivery: intake, movers, schedule shards and releasers."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from penstock.broker.coordinators.schedule import mover as mover_module
from penstock.broker.coordinators.schedule.active_shard import ActiveScheduleShard
from penstock.broker.coordinators.schedule.coordinator import ScheduleCoordinator
from penstock.broker.coordinators.schedule.messages import ScheduleOperation, ScheduleRequest
from penstock.broker.coordinators.schedule.mover import Mover
from penstock.broker.coordinators.schedule.releaser import Releaser
from penstock.broker.coordinators.schedule.storage import SourceDueIndex
from penstock.cluster.image import TopicState
from penstock.cluster.topic_names import SCHEDULE
from penstock.protocol.compression import Codec
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import Record, encode_batch
from penstock.scheduling.intake import HeldBatch
from penstock.scheduling.schedule_log import ReleasePlan, ScheduleSource, SourcePosition, SourceState
from penstock.scheduling.schedule_shard import HeldChunk, ScheduleShard, cut_chunks
from simulation.mutation import Mutation, Patch, Traps

_SOON_MS = 60

# -- movers --------------------------------------------------------------------------------------------


async def _send_without_progress(self: Mover, chunks: list[HeldChunk]) -> bool:
    assert self._position is not None
    position = await self._schedule.ask(
        ScheduleRequest(ScheduleOperation.MOVE, self.source, self._position, chunks)
    )
    if position is None:
        self._position = None
        return False
    if position == chunks[-1].position:
        self._position = position
        return True
    self._continue_from(position)
    return False


def _held_without_wake(self: Mover, offset: int) -> None:
    if self._is_idle:
        self._next = offset
    self._last_held = offset


async def _move_uncommitted(self: Mover) -> None:
    partition, upto = self.partition, self.partition.log.end
    self._wake.clear()
    if self._is_idle:
        await self._rest()
    elif self._next >= upto.offset:
        await self._more_committed()
    else:
        await self._look(partition.log, upto)


def _continue_after_position(self: Mover, position: SourcePosition) -> None:
    self._position = position
    self._next = self.partition.log.end_offset


class _NothingAborted:
    def __init__(self, aborted: object) -> None: ...

    def has(self, *_: object) -> bool:
        return False


# -- shards --------------------------------------------------------------------------------------------


async def _take_in_two_batches(self: ActiveScheduleShard, ask: ScheduleRequest) -> None:
    expected = ask.position
    for chunk in ask.chunks:
        await self.releaser.gathered(ask.source)
        records = self.shard.take(ask.source, expected, chunk, self.partition.log.end_offset)
        self.append(records[:-1], chunk.codec)
        await self.committed()
        self.append(records[-1:])
        expected = chunk.position
    self.releaser.wake()


async def _answer_before_commit(self: ActiveScheduleShard, ask: ScheduleRequest) -> SourcePosition | None:
    self._check_ready(ask.what)
    if ask.source.topic_id not in self.schedule.metadata.image.topics_by_id:
        raise ApiError(ErrorCode.unknown_topic_id)
    match ask.what:
        case ScheduleOperation.REGISTER:
            self.append(self.shard.register(ask.source, ask.position))
        case ScheduleOperation.MOVE:
            await self._take(ask)
    return self.shard.position(ask.source)


async def _load_committed(self: ActiveScheduleShard) -> None:
    from penstock.broker.coordinators.schedule.storage import load_groups, load_sources

    log, end = self.partition.log, self.partition.high
    self._last_offset = end.offset - 1
    await self.schedule.in_thread(load_sources, self.shard, log, end)
    self._knows_sources = True
    await self.schedule.in_thread(load_groups, self.shard, log, end)
    await self.schedule.in_thread(self.indexes.begin)
    self.is_loaded = True


def _append_in_any_epoch(self: ActiveScheduleShard, records: Any, codec: Codec = Codec.NONE) -> None:
    if not records:
        return
    if not self.partition.has_enough_replicas:
        raise ApiError(ErrorCode.not_enough_replicas)
    now_ms, base_offset = self.environment.now_ms(), self.partition.log.end_offset
    batch = encode_batch(
        [Record(place, now_ms, key, value) for place, (key, value) in enumerate(records)], codec=codec
    )
    self._last_offset = self.partition.append_internal(
        batch, now_ms, leader_epoch=self.partition.leader_epoch
    )
    for place, (key, value) in enumerate(records):
        self.shard.replay(base_offset + place, key, value)


def _start_shards(self: ScheduleCoordinator) -> None:
    """Does not close any."""
    for index in self.shards():
        partition = self._partitions.led(SCHEDULE, index)
        if partition is not None and index not in self.hosts:
            self.hosts[index] = ActiveScheduleShard(self, partition)


async def _wait_for_no_thread(self: Releaser, source: ScheduleSource) -> None: ...


# -- releasers -----------------------------------------------------------------------------------------


async def _release_without_wait(self: Releaser, source: ScheduleSource, topic: TopicState, line: Any) -> None:
    """Neither an earlier leader's plan nor a new one is committed before its records are appended."""
    host, index = self._host, self._host.indexes.by_source.get(source)
    assert index is not None
    done = None
    if (plan := host.shard.sources[source].plan) is not None:
        done = await self._append(source, topic, await self._planned(source, index, plan), line)
    while host.is_current:
        release = await self._next(source, index, line)
        if release is None and done is None:
            return
        plan = None if release is None else await self._plan(release, line)
        host.append(host.shard.plan(source, plan, () if done is None else done.finished))
        if release is None:
            return
        done = await self._append(source, topic, release, line)


async def _repeat_at_once(self: Releaser, source: ScheduleSource, topic: TopicState, line: Any) -> None:
    """Only an earlier leader's plan is not waited for."""
    host, index = self._host, self._host.indexes.by_source.get(source)
    plan = host.shard.sources[source].plan
    if plan is None or index is None:
        await _release(self, source, topic, line)
        return
    done = await self._append(source, topic, await self._planned(source, index, plan), line)
    host.append(host.shard.plan(source, None, done.finished))
    await host.committed()


async def _repeat_as_another_producer(
    self: Releaser, source: ScheduleSource, topic: TopicState, line: Any
) -> None:
    host, index = self._host, self._host.indexes.by_source.get(source)
    plan = host.shard.sources[source].plan
    if plan is not None and index is not None and plan.producer_id != line.producer_id:
        await host.committed()
        release = await self._planned(source, index, plan)
        host.append(host.shard.plan(source, await self._plan(release, line), is_repeat=True))
    await _release(self, source, topic, line)


async def _append_later(
    self: Releaser, source: ScheduleSource, topic: TopicState, plan: ReleasePlan, release: Any, line: Any
) -> None:
    async def append() -> None:
        with suppress(ApiError, ConnectionError, TimeoutError):
            await _append_planned(self, source, topic, plan, release, line)

    self._environment.spawn(append())


def _never_try_again(self: Releaser, source: ScheduleSource, line: Any, error: Exception) -> None:
    line.is_slow = True
    line.retry_at = float("inf")


def _soon_due(
    self: SourceDueIndex, arrived: list[bytes], state: SourceState, now_ms: int, limit: int
) -> tuple[list[Any], int | None]:
    return _next_dues(self, arrived, state, now_ms + _SOON_MS, limit)


_release = Releaser._release
_append_planned = Releaser._append_planned
_next_dues = SourceDueIndex.next_dues

MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="position-stored-apart",
        sentence="Held records and the position of their source are stored one after the other.",
        trap=Traps.PLAN,
        world="schedule",
        patches=(Patch(ActiveScheduleShard, "_take", _take_in_two_batches),),
    ),
    Mutation(
        name="mover-goes-back",
        sentence="After a failure, a mover sends records again that were stored, from the position after them.",
        trap=Traps.PLAN,
        world="schedule",
        patches=(
            Patch(Mover, "_send", _send_without_progress),
            # One request for each record, so that one can fail after others of the same scan.
            Patch(mover_module, "_REQUEST_BYTES", 1),
            Patch(mover_module, "cut_chunks", partial(cut_chunks, chunk_bytes=1)),
        ),
    ),
    Mutation(
        name="release-counted-uncommitted",
        sentence="A release counts as done before its records are committed.",
        trap=Traps.PLAN,
        world="schedule",
        patches=(Patch(Releaser, "_append_planned", _append_later),),
    ),
    Mutation(
        name="release-before-plan",
        sentence="Records are released before the plan for them is committed.",
        trap=Traps.PLAN,
        world="schedule",
        patches=(Patch(Releaser, "_release", _release_without_wait),),
    ),
    Mutation(
        name="held-without-their-batch",
        sentence="Held records count although the batch that they were taken from does not follow.",
        trap=Traps.ALL_OR_NOTHING,
        world="schedule",
        faults=("power loss everywhere", "slow disk"),
        patches=(Patch(HeldBatch, "belongs_to", lambda self, control, header: True),),
    ),
    Mutation(
        name="released-early",
        sentence="Records are released when they are nearly due.",
        trap=Traps.NOT_EARLY,
        world="schedule",
        patches=(
            Patch(SourceDueIndex, "next_dues", _soon_due),
            Patch(ReleasePlan, "may_begin", lambda self, now_ms: self.upto.due_ms <= now_ms + _SOON_MS),
        ),
    ),
    Mutation(
        name="move-answered-before-commit",
        sentence="A mover is told a new position before it is committed.",
        trap=Traps.DURABLE,
        world="schedule",
        faults=("kill", "power loss", "slow disk"),
        patches=(Patch(ActiveScheduleShard, "ask", _answer_before_commit),),
    ),
    Mutation(
        name="schedule-loaded-without-tail",
        sentence="A new leader of a schedule shard loads its log only up to the high watermark.",
        trap=Traps.STALE_HIGH_WATERMARK,
        world="schedule",
        faults=("kill", "power loss", "cut", "suspend", "preferred election"),
        patches=(Patch(ActiveScheduleShard, "_load", _load_committed),),
    ),
    Mutation(
        name="uncommitted-plan-repeated",
        sentence="A new leader carries out the plan of an earlier one before it is committed.",
        trap=Traps.PLAN,
        world="schedule",
        faults=("kill", "power loss", "slow disk", "cut"),
        patches=(Patch(Releaser, "_release", _repeat_at_once),),
    ),
    Mutation(
        name="plan-repeated-as-another-producer",
        sentence="A new leader repeats the plan of an earlier one with a producer id of its own.",
        trap=Traps.REPEAT,
        world="schedule",
        patches=(Patch(Releaser, "_release", _repeat_as_another_producer),),
    ),
    Mutation(
        name="shard-survives-its-epoch",
        sentence="A shard that was led elsewhere in between goes on with its old state when the broker leads again.",
        trap=Traps.FENCE,
        world="schedule",
        faults=("cut", "suspend", "cut from the controller", "preferred election"),
        patches=(
            Patch(ActiveScheduleShard, "is_current", property(lambda self: not self.partition.is_retired)),
            Patch(ActiveScheduleShard, "append", _append_in_any_epoch),
            Patch(ScheduleCoordinator, "_update_shards", _start_shards),
        ),
    ),
    Mutation(
        name="mover-not-woken",
        sentence="A mover that rests is not woken when records are held.",
        trap=Traps.LOST_DECISION,
        world="schedule",
        patches=(Patch(Mover, "_held_at", _held_without_wake),),
    ),
    Mutation(
        name="mover-starts-at-the-end",
        sentence="The mover of a new leader moves only records that are held from then on.",
        trap=Traps.LOST_DECISION,
        world="schedule",
        patches=(Patch(Mover, "_continue_from", _continue_after_position),),
    ),
    Mutation(
        name="uncommitted-records-moved",
        sentence="A mover moves held records that are not committed, or whose transaction has not ended.",
        trap=Traps.DURABLE,
        world="schedule",
        patches=(Patch(Mover, "_move_on", _move_uncommitted),),
    ),
    Mutation(
        name="aborted-records-moved",
        sentence="A mover moves the held records of aborted transactions.",
        trap=Traps.ALL_OR_NOTHING,
        world="schedule",
        patches=(Patch(mover_module, "AbortedTransactionFilter", _NothingAborted),),
    ),
    Mutation(
        name="release-not-retried",
        sentence="A source whose partition did not accept its records is not tried again.",
        trap=Traps.LOST_DECISION,
        world="schedule",
        patches=(Patch(Releaser, "_back_off", _never_try_again),),
    ),
    Mutation(
        name="late-arrivals-before-mark",
        sentence="Records that arrive late sort before what is released, as if they were released, too.",
        trap=Traps.PLAN,
        world="schedule",
        patches=(Patch(SourceState, "floor_ms", property(lambda self: -1)),),
    ),
    Mutation(
        name="arrivals-within-plan",
        sentence="Records that arrive while a release is planned sort into the plan.",
        trap=Traps.PLAN,
        world="schedule",
        patches=(
            Patch(ScheduleShard, "reserve", lambda self, source, upto_ms: None),
            Patch(Releaser, "gathered", _wait_for_no_thread),
        ),
    ),
)
