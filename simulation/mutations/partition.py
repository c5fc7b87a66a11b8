"""Bugs of partitions: the rules of leaders and followers, and the shells that wait for disks and replies."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.broker.controller.broker_lifecycle import BrokerLifecycleManager
from penstock.broker.environment import end_process as _end_process
from penstock.broker.handlers import fetch as fetch_handler
from penstock.broker.partition import fetch_reader, flusher, follower_replica, replica_manager
from penstock.broker.partition.alter_partition_manager import AlterPartitionManager
from penstock.broker.partition.fetch_reader import FetchReader
from penstock.broker.partition.fetch_sessions import RequestedPartition
from penstock.broker.partition.flusher import Flusher
from penstock.broker.partition.follower_replica import FollowerReplica
from penstock.broker.partition.partition import Partition
from penstock.broker.partition.replica_fetcher import (
    FetchSessionHandler,
    ReplicaFetcher,
    ReplicaFetcherManager,
    completed_future,
)
from penstock.broker.partition.replica_manager import LostReplicas, ReplicaManager
from penstock.log import data_directory, producer_snapshots, recovery
from penstock.log.flush import FlushState
from penstock.log.log import Log
from penstock.log.log_manager import CLEAN_SHUTDOWN_FILE
from penstock.log.producer_state import ProducerStateManager
from penstock.replication import follower as follower_rules
from penstock.replication.follower import FollowerRules, RaiseHighWatermark
from penstock.replication.leader import LeaderRules
from simulation.engine.loop import CURRENT
from simulation.mutation import Mutation, Patch, Traps

_answered = FollowerRules.answered
_advance = Partition.advance
_check_producer = ProducerStateManager.check
_append_replicated = Log.append_replicated
_count_fetch = FetchReader._count
_check_replica = FetchReader._check_replica
_divergence = fetch_reader._divergence
_read_upto = FetchReader._read_upto
_sync_done = Flusher._done
_release = Partition._release
_follow_high_watermark = Partition.follower_high_watermark
_request_isr = AlterPartitionManager._request
_take_role = ReplicaManager._take_role
_adopt = ReplicaManager._adopt
_register = BrokerLifecycleManager._register_until_accepted
_has_changed = fetch_handler._has_changed


# -- rules ---------------------------------------------------------------------------------------------


def _raise_then_truncate(self: FollowerRules, asked: Any, answer: Any, log: Any) -> list[Any]:
    actions = _answered(self, asked, answer, log)
    parted = any(isinstance(action, follower_rules.Truncate) for action in actions)
    return [RaiseHighWatermark(answer.high_watermark), *actions] if parted else actions


def _most_of_the_replicas(self: LeaderRules) -> int:
    offsets = sorted((self.local_offset, *(each.offset for each in self._followers.values())), reverse=True)
    return offsets[len(offsets) // 2]


def _drop_unknown(self: LeaderRules, *, final: bool) -> None:
    self._drop_proposal()


def _advance_or_go_back(self: Partition, to: Any, size: int | None = None) -> None:
    if to.offset < self.high.offset:
        self.high = to
    _advance(self, to, size)


def _divergence_in_own_epoch(partition: Partition, wanted: RequestedPartition) -> Any:
    is_own = wanted.leader_epoch == partition.leader_epoch
    return _divergence(partition, wanted) if is_own else None


def _count_any_epoch(self: FetchReader, partition: Partition, wanted: RequestedPartition) -> None:
    wanted.leader_epoch = partition.leader_epoch
    _count_fetch(self, partition, wanted)


def _remember_what_was_asked(self: FetchSessionHandler, key: Any) -> None:
    self._changed.pop(key, None)
    if key in self.asked:
        self._dropped[key] = None


# -- disks ---------------------------------------------------------------------------------------------


async def _report_nothing(self: LostReplicas) -> None:
    self._short.clear()


def _end_as_if_clean(error: Exception, what: str = "fsync failed") -> None:
    process = CURRENT.get()
    if process is not None:
        (process.machine.disk.folder / CLEAN_SHUTDOWN_FILE).touch()
    _end_process(error, what)


async def _note_and_register(self: BrokerLifecycleManager, last_epoch: int) -> int:
    directory = self._store.directory
    run = data_directory._read_run(directory)
    if run is not None:
        data_directory.note_run(directory, run._replace(boot_id=data_directory.current_boot_id()))
    return await _register(self, last_epoch)


def _is_durable_at_once(self: FollowerReplica) -> bool:
    self.partition.flush()
    return True


def _truncate_but_stay_synced(self: FlushState, end: Any) -> None:
    self.release_segments(
        [item.segment for item in self._held if item.segment.base_offset >= end.segment_base]
    )
    self._snapshots = [snapshot for snapshot in self._snapshots if snapshot.offset <= end.offset]


def _done_and_forget_wishes(self: Flusher, flush_job: Any, error: Exception | None, started: float) -> None:
    self._wanted = False
    _sync_done(self, flush_job, error, started)


# -- readers and producers -----------------------------------------------------------------------------


def _read_to_the_end(self: FetchReader, *args: Any) -> Any:
    reader, self._replica_id = self._replica_id, 0
    try:
        return _read_upto(self, *args)
    finally:
        self._replica_id = reader


def _check_but_welcome_repeats(self: ProducerStateManager, *args: Any) -> None:
    _check_producer(self, *args)


def _append_and_forget(self: Log, batch: memoryview, *, now_ms: int) -> Any:
    appended = _append_replicated(self, batch, now_ms=now_ms)
    self.producers.clear()
    return appended


# -- waiters and roles ---------------------------------------------------------------------------------


def _tell_success(self: Partition) -> None:
    waiting = list(self._commit_waiters)
    self._commit_waiters.clear()
    self._given_up.clear()
    for _, call in waiting:
        call(None)


def _keep_waiters(self: Partition) -> None:
    if self.is_retired:
        self._commit_waiters.clear()
        self._given_up.clear()


def _follow_and_release(self: Partition, offset: int) -> None:
    _follow_high_watermark(self, offset)
    if self._commit_waiters and self._commit_waiters[0][0] < self.high.offset:
        _release(self, self.high.offset)


async def _take_role_in_old_epoch(self: ReplicaManager, partition: Partition, state: Any) -> None:
    is_known = partition.leader_epoch >= 0
    await _take_role(
        self, partition, state._replace(leader_epoch=partition.leader_epoch) if is_known else state
    )


def _adopt_as_committed(self: ReplicaManager, *args: Any) -> Partition:
    partition = _adopt(self, *args)
    partition.high = partition.log.end
    return partition


# -- fetchers ------------------------------------------------------------------------------------------


def _ask_in_silence(self: ReplicaFetcher, following: FollowerReplica) -> None:
    if self._is_current(following):
        self._session.ask(following)


def _unfollow_but_go_on(self: ReplicaFetcherManager, partition: Partition) -> asyncio.Future[None]:
    self._followers.pop((partition.topic_id.bytes, partition.index), None)
    return completed_future()


def _bytes_arrived_unmarked(self: RequestedPartition, count: int) -> None:
    if self.session is not None and self.session.waiting is not None:
        self.session.waiting.bytes_arrived(count)


def _has_changed_but_for_commits(wanted: RequestedPartition, data: Any) -> bool:
    told = {"high_watermark": wanted.high_watermark, "last_stable_offset": wanted.last_stable_offset}
    return _has_changed(wanted, data._replace(**told))


def _check_replica_and_count(self: FetchReader, partition: Partition, wanted: RequestedPartition) -> None:
    _check_replica(self, partition, wanted)
    self._count(partition, wanted)


# -- the in-sync set -----------------------------------------------------------------------------------


def _request_in_old_epoch(self: AlterPartitionManager, changes: Any) -> Any:
    return _request_isr(
        self,
        [
            change._replace(
                proposal=change.proposal._replace(partition_epoch=max(0, change.proposal.partition_epoch - 1))
            )
            for change in changes
        ],
    )


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="truncate-to-high-watermark",
        sentence="A follower that parts from its leader cuts its log at its high watermark.",
        trap=Traps.TRUNCATE,
        patches=(Patch(FollowerRules, "_common_end", lambda self, diverging, log: log.high_watermark),),
    ),
    Mutation(
        name="high-watermark-before-truncation",
        sentence="A follower believes the leader's high watermark before it has cut off what the leader lacks.",
        trap=Traps.TRUNCATE_FIRST,
        patches=(Patch(FollowerRules, "answered", _raise_then_truncate),),
    ),
    Mutation(
        name="no-reconciliation",
        sentence="A leader does not compare epochs with a follower before it serves it.",
        trap=Traps.TRUNCATE_FIRST,
        patches=(Patch(fetch_reader, "_divergence", lambda partition, wanted: None),),
    ),
    Mutation(
        name="fetch-not-fenced",
        sentence="A leader serves and counts fetches of another leader epoch as if they were of its own.",
        trap=Traps.FENCE,
        faults=("power loss", "kill", "cut from the controller", "storm"),
        patches=(
            Patch(Partition, "_check_epoch", lambda self, leader_epoch: None),
            Patch(FetchReader, "_count", _count_any_epoch),
            Patch(fetch_reader, "_divergence", _divergence_in_own_epoch),
        ),
    ),
    Mutation(
        name="answer-to-another-question",
        sentence="A follower takes an answer to what it asked in another leader epoch, or before its log moved.",
        trap=Traps.FENCE,
        faults=("late requests", "cut from the controller", "preferred election", "cut"),
        apis=(1,),
        patches=(
            Patch(FollowerRules, "_is_current", lambda self, asked, log: True),
            Patch(FollowerReplica, "is_over", property(lambda self: self.partition.is_retired)),
            Patch(FetchSessionHandler, "drop", _remember_what_was_asked),
        ),
    ),
    Mutation(
        name="stale-leader-acknowledges",
        sentence="A leader that is deposed tells those who wait that all is well.",
        trap=Traps.FENCE,
        patches=(Patch(Partition, "_fail_commit_waiters", _tell_success),),
    ),
    Mutation(
        name="proposed-isr-not-counted",
        sentence="The high watermark moves on the committed ISR alone while a larger one is proposed.",
        trap=Traps.MAXIMAL_ISR,
        patches=(
            Patch(LeaderRules, "maximal_isr", property(lambda self: self.isr)),
            Patch(LeaderRules, "_holds", lambda self, follower: False),
        ),
    ),
    Mutation(
        name="shrunk-isr-counted-early",
        sentence="The high watermark moves on the proposed ISR before the controller has agreed.",
        trap=Traps.MAXIMAL_ISR,
        patches=(
            Patch(
                LeaderRules,
                "maximal_isr",
                property(lambda self: self.isr if self.proposed is None else self.proposed),
            ),
        ),
    ),
    Mutation(
        name="unknown-proposal-dropped",
        sentence="A leader forgets an ISR change whose outcome it does not know.",
        trap=Traps.MAXIMAL_ISR,
        faults=("late requests", "kill", "suspend", "slow disk"),
        apis=(56, 1),
        patches=(
            Patch(LeaderRules, "isr_refused", _drop_unknown),
            Patch(LeaderRules, "_holds", lambda self, follower: False),
        ),
    ),
    Mutation(
        name="follower-outside-isr-counted",
        sentence="The high watermark is what most replicas have, in sync or not.",
        trap=Traps.MAXIMAL_ISR,
        patches=(Patch(LeaderRules, "_least_offset", _most_of_the_replicas),),
    ),
    Mutation(
        name="min-isr-ignored",
        sentence="The high watermark moves although fewer than min.insync.replicas are in sync.",
        trap=Traps.MAXIMAL_ISR,
        patches=(Patch(LeaderRules, "_has_enough_in_sync", lambda self: True),),
    ),
    Mutation(
        name="high-watermark-goes-back",
        sentence="The high watermark follows the slowest in-sync replica back, too.",
        trap=Traps.MAXIMAL_ISR,
        faults=("kill", "cut", "slow disk"),
        patches=(
            Patch(LeaderRules, "_is_further", lambda self, offset: 0 <= offset != self.high_watermark),
            Patch(Partition, "advance", _advance_or_go_back),
        ),
    ),
    Mutation(
        name="isr-before-epoch-start",
        sentence="A follower enters the ISR at a high watermark that is older than the leader epoch.",
        trap=Traps.EPOCH_START,
        faults=("power loss everywhere", "kill", "cut", "power loss", "slow disk"),
        patches=(Patch(LeaderRules, "_has_reached_this_epoch", lambda self, follower: True),),
    ),
    Mutation(
        name="isr-before-caught-up",
        sentence="A follower enters the ISR without having what is committed.",
        trap=Traps.EPOCH_START,
        patches=(
            Patch(LeaderRules, "_has_all_committed", lambda self, follower: True),
            Patch(LeaderRules, "_has_reached_this_epoch", lambda self, follower: True),
        ),
    ),
    Mutation(
        name="latest-offset-too-early",
        sentence="A new leader tells the latest offset from a stale high watermark.",
        trap=Traps.STALE_HIGH_WATERMARK,
        patches=(Patch(Partition, "is_settled", property(lambda self: True)),),
    ),
    Mutation(
        name="damage-in-silence",
        sentence="A replica with a damaged log refetches it while it stays in sync by the book.",
        trap=Traps.CORRUPTION,
        faults=("bit flip", "power loss everywhere", "kill", "power loss"),
        patches=(
            Patch(LostReplicas, "report", _report_nothing),
            Patch(LostReplicas, "is_replaceable", lambda self, key, state: True),
        ),
    ),
    Mutation(
        name="fsync-retried",
        sentence="An fsync that failed is taken for done, in the hope that the next one covers it.",
        trap=Traps.DISK_FULL,
        patches=(
            Patch(
                Flusher,
                "_done",
                lambda self, flush_job, error, started: _sync_done(self, flush_job, None, started),
            ),
        ),
    ),
    Mutation(
        name="failure-marked-clean",
        sentence="A process that ends on a disk error leaves a clean-shutdown marker.",
        trap=Traps.DISK_FULL,
        faults=("sync error", "slow disk"),
        patches=(
            Patch(flusher, "end_process", _end_as_if_clean),
            Patch(follower_replica, "end_process", _end_as_if_clean),
            Patch(replica_manager, "end_process", _end_as_if_clean),
        ),
    ),
    Mutation(
        name="doubt-forgotten",
        sentence="A second start after a power loss takes itself for clean, as the first has noted the new boot.",
        trap=Traps.UNCLEAN_RESTART,
        faults=("kill", "power loss"),
        patches=(Patch(BrokerLifecycleManager, "_register_until_accepted", _note_and_register),),
    ),
    Mutation(
        name="ack-before-sync",
        sentence="A leader counts what it has written but not synced.",
        trap=Traps.DURABLE,
        patches=(
            Patch(
                Partition,
                "_durable",
                property(lambda self: self.log.end if self.is_leader else self.log.synced),
            ),
        ),
    ),
    Mutation(
        name="follower-confirms-before-sync",
        sentence="A follower asks for more before it has synced what it got.",
        trap=Traps.DURABLE,
        patches=(
            Patch(FollowerRules, "_confirmed_offset", lambda self, log: log.end_offset),
            Patch(FollowerReplica, "is_durable", property(_is_durable_at_once)),
        ),
    ),
    Mutation(
        name="page-cache-trusted",
        sentence="After a restart a replica takes all it can read for synced.",
        trap=Traps.DURABLE,
        faults=("slow disk", "kill"),
        patches=(Patch(recovery, "_make_durable", lambda segments: None),),
    ),
    Mutation(
        name="synced-offset-survives-truncation",
        sentence="A log that was truncated still counts as synced up to where it ended before.",
        trap=Traps.DURABLE,
        patches=(Patch(FlushState, "truncate_to", _truncate_but_stay_synced),),
    ),
    Mutation(
        name="wanted-sync-lost",
        sentence="What is appended while a sync runs is not synced by another one after it.",
        trap=Traps.LOST_DECISION,
        patches=(Patch(Flusher, "_done", _done_and_forget_wishes),),
    ),
    Mutation(
        name="consumers-read-uncommitted",
        sentence="Consumers read up to the end of the log.",
        trap=Traps.MAXIMAL_ISR,
        patches=(Patch(FetchReader, "_read_upto", _read_to_the_end),),
    ),
    Mutation(
        name="repeat-appended-again",
        sentence="A repeated batch is appended once more.",
        trap=Traps.REPEAT,
        patches=(Patch(ProducerStateManager, "check", _check_but_welcome_repeats),),
    ),
    Mutation(
        name="producers-lost-at-failover",
        sentence="A follower learns nothing of producers, so a new leader knows none.",
        trap=Traps.PRODUCER_STATE,
        patches=(Patch(Log, "append_replicated", _append_and_forget),),
    ),
    Mutation(
        name="producers-lost-at-restart",
        sentence="A restarted broker has forgotten the producers of its logs.",
        trap=Traps.PRODUCER_STATE,
        patches=(Patch(recovery, "restore_producer_state", lambda producers, *rest: None),),
    ),
    Mutation(
        name="producers-survive-truncation",
        sentence="After a truncation a replica still remembers the batches that were cut off.",
        trap=Traps.PRODUCER_STATE,
        faults=("kill", "cut", "one-way cut", "cut from the controller", "suspend"),
        patches=(Patch(producer_snapshots, "restore_producer_state", lambda producers, *rest: None),),
    ),
    Mutation(
        name="unknown-producer-welcome",
        sentence="A new leader takes a producer's later batches although the one before lost the first ones.",
        trap=Traps.PRODUCER_STATE,
        faults=("kill", "power loss", "cut", "suspend", "late requests"),
        apis=(0,),
        patches=(Patch(ProducerStateManager, "_must_begin", lambda self, producer_id, leader_epoch: False),),
    ),
    Mutation(
        name="all-waiters-released",
        sentence="When the high watermark moves, producers that wait for more are told that it is committed, too.",
        trap=Traps.MAXIMAL_ISR,
        patches=(
            Patch(Partition, "_release", lambda self, high_watermark: _release(self, self.log.end_offset)),
        ),
    ),
    Mutation(
        name="waiters-outlive-their-epoch",
        sentence="A producer that waits at a deposed leader is told success once that node hears of a higher offset.",
        trap=Traps.FENCE,
        faults=("cut", "cut from the controller", "one-way cut"),
        patches=(
            Patch(Partition, "_fail_commit_waiters", _keep_waiters),
            Patch(Partition, "follower_high_watermark", _follow_and_release),
        ),
    ),
    Mutation(
        name="role-in-old-epoch",
        sentence="A replica takes its new role in the leader epoch that it already knew.",
        trap=Traps.FENCE,
        patches=(Patch(ReplicaManager, "_take_role", _take_role_in_old_epoch),),
    ),
    Mutation(
        name="whole-log-taken-for-committed",
        sentence="A replica that is opened takes its whole log for committed, as if it had no other replicas.",
        trap=Traps.STALE_HIGH_WATERMARK,
        patches=(Patch(ReplicaManager, "_adopt", _adopt_as_committed),),
    ),
    Mutation(
        name="fetcher-not-woken",
        sentence="A fetcher that has nothing to fetch is not woken when a partition is added to it.",
        trap=Traps.LOST_DECISION,
        faults=("kill", "power loss", "cut"),
        patches=(Patch(ReplicaFetcher, "_ask", _ask_in_silence),),
    ),
    Mutation(
        name="fetcher-outlives-its-leader",
        sentence="A follower that has a new leader goes on fetching from the old one, too.",
        trap=Traps.FENCE,
        faults=("cut from the controller", "cut", "one-way cut"),
        patches=(Patch(ReplicaFetcherManager, "unfollow", _unfollow_but_go_on),),
    ),
    Mutation(
        name="session-omits-partition",
        sentence="A fetch session is woken by new records, but does not look at the partition that has them.",
        trap=Traps.LOST_DECISION,
        patches=(Patch(RequestedPartition, "bytes_arrived", _bytes_arrived_unmarked),),
    ),
    Mutation(
        name="session-omits-high-watermark",
        sentence="A fetch session does not tell of a high watermark that has moved without new records.",
        trap=Traps.LOST_DECISION,
        patches=(Patch(fetch_handler, "_has_changed", _has_changed_but_for_commits),),
    ),
    Mutation(
        name="diverged-position-counted",
        sentence="A leader counts the position of a follower before it has compared their histories.",
        trap=Traps.FENCE,
        patches=(Patch(FetchReader, "_check_replica", _check_replica_and_count),),
    ),
    Mutation(
        name="isr-change-in-old-epoch",
        sentence="A leader proposes ISR changes in the partition epoch before the one that it knows.",
        trap=Traps.FENCE,
        patches=(Patch(AlterPartitionManager, "_request", _request_in_old_epoch),),
    ),
)
