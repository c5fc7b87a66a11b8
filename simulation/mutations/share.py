"""Bugs of share groups: of the rules of share partitions, and of the code that stores them and hands out records."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from penstock.broker.coordinators.runtime.active_shard import ActiveShard, replay_log
from penstock.broker.coordinators.runtime.runtime import CoordinatorRuntime
from penstock.broker.coordinators.share import partitions
from penstock.broker.coordinators.share.dead_letter_writer import DeadLetterWriter
from penstock.broker.coordinators.share.fetch import DelayedShareFetch
from penstock.broker.coordinators.share.partitions import SharePartitionLeader
from penstock.broker.coordinators.share.persister import Persister
from penstock.groups.share.partition import acknowledgement, share_partition_state
from penstock.groups.share.partition.in_flight_records import at_least
from penstock.groups.share.partition.share_partition import SharePartition
from penstock.groups.share.partition.share_partition_state import SharePartitionPolicy
from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard
from penstock.protocol.errors import ApiError
from simulation.mutation import Mutation, Patch, Traps

# -- share partitions ----------------------------------------------------------------------------------

_acknowledge = SharePartitionLeader.acknowledge
_take = DelayedShareFetch._take
_read_state = ShareCoordinatorShard._read
_release_code = share_partition_state.release_code
_share_policy = partitions.share_policy


def _answered_before_write(self: SharePartitionLeader, *args: Any, **kwargs: Any) -> None:
    _acknowledge(self, *args, **kwargs)


def _stored_later(self: DelayedShareFetch, place: Any, records_max: int, bytes_max: int) -> Any:
    portion = _take(self, place, records_max, bytes_max)
    led = self._leaders.get(place)
    if portion is not None or not self._pending_writes or led is None or led.rules is None:
        return portion
    write = led.rules.take_write()
    if write is not None:
        led.rules.written()
        led._shares.environment.spawn(_unanswered(led._store(*write)))
    self._pending_writes = []
    self._reserved = 0
    return _take(self, place, records_max, bytes_max)


async def _unanswered(work: Coroutine[Any, Any, Any]) -> None:
    with suppress(ApiError, TimeoutError):
        await work


def _one_delivery_less(policy: SharePartitionPolicy, delivery_count: int, *, expired: bool = False) -> int:
    return _release_code(policy, delivery_count + 1, expired=expired)


def _tick_without_next_timer(self: SharePartitionLeader) -> None:
    if self.rules is None or self.error is not None:
        return
    self._timer_ms = 0
    self.current().tick(now_ms=partitions.monotonic_ms(), chance=0.5)
    self.changed()
    self.wake()


async def _never_repeated(self: SharePartitionLeader, rules: Any, write: Any, waiting: Any) -> None:
    try:
        await self._store(*write)
    except ApiError as error:
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        if error.code in partitions._FENCED_CODES:
            self.close(error)
        else:
            await asyncio.sleep(0.5)
        return
    rules.written()
    for future in waiting:
        if not future.done():
            future.set_result(None)
    self.changed()
    self.wake()


# -- share state ---------------------------------------------------------------------------------------

_write = Persister.write
_read = Persister.read
_reply_when_committed = ActiveShard._reply_when_committed
_load = CoordinatorRuntime._load


def _read_without_fencing(self: ShareCoordinatorShard, read: Any, stored: Any, now_ms: int) -> Any:
    return _read_state(self, read, [], now_ms)


async def _sent_is_written(self: Persister, *args: Any, **kwargs: Any) -> None:
    self._context.environment.spawn(_unanswered(_write(self, *args, **kwargs)))


async def _read_start_only(self: Persister, *args: Any) -> Any:
    return (await _read(self, *args))._replace(batches=())


def _reply_at_once(self: ActiveShard[Any], replies: Any) -> None:
    if not isinstance(self.shard, ShareCoordinatorShard):
        _reply_when_committed(self, replies)
        return
    for token, reply in replies:
        if not token.done():
            token.set_result(reply)


async def _load_committed(self: CoordinatorRuntime[Any], index: int) -> None:
    shard: Any = self._new_shard()
    partition: Any = self._find_partition(index)
    if partition is None or not isinstance(shard, ShareCoordinatorShard):
        await _load(self, index)
        return
    epoch = partition.leader_epoch
    await replay_log(shard, partition.log, partition.high, self._in_thread)
    if self._is_current(partition, index, epoch):
        self._activate(index, shard, partition, partition.log.end_offset - 1)


# -- dead letters --------------------------------------------------------------------------------------

_planned = DeadLetterWriter._planned
_append = DeadLetterWriter._append


class _AppendsFirst:
    """Stands in for the active shard while a plan is made."""

    def __init__(self, writer: DeadLetterWriter, active: Any, letters: Any) -> None:
        self._writer = writer
        self._active = active
        self._letters = letters

    def submit(self, operation: Any) -> Any:
        plans: list[Any] = []
        operation(
            SimpleNamespace(
                plan_dead_letters=lambda key, plan, token: plans.append(plan),
                settle_dead_letters=lambda *_: None,
            ),
            None,
        )
        return self._append_and_store(plans[0], operation) if plans else self._active.submit(operation)

    async def _append_and_store(self, plan: Any, operation: Any) -> Any:
        await _append(self._writer, plan, self._letters)
        return await self._active.submit(operation)


async def _append_before_plan(
    self: DeadLetterWriter, view: Any, topic: Any, name: Any, asked: Any, letters: Any
) -> Any:
    active: Any = self._active
    appending: Any = _AppendsFirst(self, active, letters)
    self._active = appending
    try:
        return await _planned(self, view, topic, name, asked, letters)
    finally:
        self._active = active


async def _begin_again(self: DeadLetterWriter, view: Any, plan: Any, topic: Any) -> None:
    await self._settle(plan, (), keeps_producer=False)


async def _append_later(self: DeadLetterWriter, plan: Any, letters: Any) -> None:
    self._logs.environment.spawn(_unanswered(_append(self, plan, letters)))


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="failed-write-taken-for-done",
        sentence="After a write of share state has failed, the leader goes on as if it were stored.",
        trap=Traps.SHARE_LOCK,
        world="share",
        patches=(Patch(SharePartition, "write_failed", SharePartition.written),),
    ),
    Mutation(
        name="accept-answered-before-write",
        sentence="A member is told that its records are accepted before that is stored.",
        trap=Traps.SHARE_LOCK,
        world="share",
        patches=(Patch(SharePartitionLeader, "acknowledge", _answered_before_write),),
    ),
    Mutation(
        name="share-leader-not-fenced",
        sentence="When a new leader reads the share state, the last leader may still write it.",
        trap=Traps.FENCE,
        world="share",
        faults=("late requests", "kill", "cut from the controller", "preferred election"),
        apis=(85,),
        patches=(Patch(ShareCoordinatorShard, "_read", _read_without_fencing),),
    ),
    Mutation(
        name="at-most-once-stored-later",
        sentence="At most once: a member gets records before it is stored that they are final.",
        trap=Traps.AT_MOST_ONCE,
        world="share",
        patches=(Patch(DelayedShareFetch, "_take", _stored_later),),
    ),
    Mutation(
        name="dead-letters-before-plan",
        sentence="Dead letters are appended before their plan is stored.",
        trap=Traps.PLAN,
        world="share",
        faults=("kill", "power loss", "one-way cut", "cut"),
        patches=(Patch(DeadLetterWriter, "_planned", _append_before_plan),),
    ),
    Mutation(
        name="given-up-too-early",
        sentence="A record is given up one delivery before its limit.",
        trap=Traps.LIMIT,
        world="share",
        patches=(
            Patch(share_partition_state, "release_code", _one_delivery_less),
            Patch(acknowledgement, "at_least", lambda limit: at_least(limit - 1)),
        ),
    ),
    Mutation(
        name="renewed-lock-expires",
        sentence="A renewed lock expires when it would have expired before.",
        trap=Traps.SHARE_LOCK,
        world="share",
        patches=(Patch(acknowledgement, "_renew_locks", lambda core, row, until_ms: None),),
    ),
    Mutation(
        name="released-without-backoff",
        sentence="A released record is delivered again at once, although its group has a backoff.",
        trap=Traps.NOT_EARLY,
        world="share",
        patches=(
            Patch(
                partitions,
                "share_policy",
                lambda config, topic: _share_policy(config, topic)._replace(backoff=None),
            ),
        ),
    ),
    Mutation(
        name="lock-timer-fires-once",
        sentence="The timer of a share partition is not set again after it has fired.",
        trap=Traps.LOST_DECISION,
        world="share",
        patches=(Patch(SharePartitionLeader, "_tick", _tick_without_next_timer),),
    ),
    Mutation(
        name="failed-write-not-repeated",
        sentence="A write of share state that has failed is not repeated.",
        trap=Traps.LOST_DECISION,
        world="share",
        patches=(Patch(SharePartitionLeader, "_write_once", _never_repeated),),
    ),
    Mutation(
        name="share-state-written-when-sent",
        sentence="The persister does not wait for the share coordinator's reply.",
        trap=Traps.SHARE_LOCK,
        world="share",
        patches=(Patch(Persister, "write", _sent_is_written),),
    ),
    Mutation(
        name="share-state-loaded-in-part",
        sentence="A new leader loads the start offset of the share state, without the records after it.",
        trap=Traps.SHARE_LOCK,
        world="share",
        patches=(Patch(Persister, "read", _read_start_only),),
    ),
    Mutation(
        name="share-state-answered-uncommitted",
        sentence="The share coordinator replies before its records are committed.",
        trap=Traps.GROUP_READ,
        world="share",
        patches=(Patch(ActiveShard, "_reply_when_committed", _reply_at_once),),
    ),
    Mutation(
        name="share-state-load-skips-tail",
        sentence="A share coordinator loads only what is below its high watermark, which may be stale.",
        trap=Traps.STALE_HIGH_WATERMARK,
        world="share",
        patches=(Patch(CoordinatorRuntime, "_load", _load_committed),),
    ),
    Mutation(
        name="dead-letter-plan-begun-again",
        sentence="An open plan for dead letters is replaced by one of another producer instead of repeated.",
        trap=Traps.PLAN,
        world="share",
        faults=("kill", "power loss", "one-way cut", "cut", "suspend"),
        patches=(Patch(DeadLetterWriter, "_repeat", _begin_again),),
    ),
    Mutation(
        name="dead-letters-settled-unappended",
        sentence="A plan for dead letters counts as done before they are committed.",
        trap=Traps.PLAN,
        world="share",
        faults=("kill", "power loss", "one-way cut", "cut"),
        patches=(Patch(DeadLetterWriter, "_append", _append_later),),
    ),
)
