"""Bugs of partitions: leader and follower rules, and the points where their shells must wait for the disk."""

from __future__ import annotations

from functools import partial
from typing import Any

from penstock.log.producer_state import ProducerStateManager
from penstock.protocol.errors import ErrorCode
from penstock.replication import follower as follower_rules
from penstock.replication.follower import FollowerRules, RaiseHighWatermark
from penstock.replication.leader import LeaderRules
from simulation.coordinator import Coordinator
from simulation.disk import Disk
from simulation.fetching import Fetcher
from simulation.mutation import Mutation, Patch, Traps
from simulation.node import CLEAN_FILE, Node
from simulation.replica import Replica
from simulation.simlog import SimLog


def _raise_then_truncate(self: FollowerRules, asked: Any, answer: Any, log: Any) -> list[Any]:
    actions = _answered(self, asked, answer, log)
    parted = any(isinstance(action, follower_rules.Truncate) for action in actions)
    return [RaiseHighWatermark(answer.high_watermark), *actions] if parted else actions


_answered = FollowerRules.answered


def _confirm_unsynced(self: Fetcher, number: int, replicas: Any) -> None:
    for replica, served in replicas:
        self.node.sync(replica.log, lambda: None)
        if replica.following is not None:
            self.raise_high_watermark(replica, replica.following, served.answer.high_watermark)
    self._again(number)


def _append_and_forget(self: Fetcher, replica: Replica, served: Any) -> bool:
    appended = _append(self, replica, served)
    replica.log.producers.clear()
    return appended


_append = Fetcher.append


def _most_of_the_replicas(self: LeaderRules) -> int:
    offsets = sorted((self.local_offset, *(each.offset for each in self._followers.values())), reverse=True)
    return offsets[len(offsets) // 2]


def _drop_unknown(self: LeaderRules, *, final: bool) -> None:
    self._drop_proposal()


def _parting_in_own_epoch(self: Replica, asked: Any) -> Any:
    is_own = self.leading is not None and asked.leader_epoch == self.leading.leader_epoch
    return _parting(self, asked) if is_own else None


_parting = Replica.parting


def _start_over_in_silence(self: Node, replica: Replica) -> None:
    replica.is_damaged = True
    replica.give_up()
    state = replica.state
    self._start_over(replica)
    if state is not None:
        replica.assume(state)


def _trust_page_cache(self: SimLog) -> None:
    self.believed_offset = self.end_offset
    self.relearn_producers()


def _retry_sync(self: Disk, log: SimLog) -> bool:
    log.lost_from = log.synced_offset if log.lost_from is None else min(log.lost_from, log.synced_offset)
    return True


def _mark_clean(self: Node, disk: Disk) -> None:
    disk.files[CLEAN_FILE] = True


def _note_boot_at_once(self: Node, disk: Disk) -> bool:
    was_clean = _find_clean(self, disk)
    self.note_boot()
    return was_clean


_find_clean = Node.find_clean


def _read_at_once(self: Coordinator, question: Any, respond: Any) -> None:
    respond(self.answer_to(question))


def _answer_at_once(self: Coordinator, replies: Any) -> None:
    self._release(replies, ErrorCode.none)


def _load_committed_only(self: Coordinator) -> None:
    log = self.replica.log
    self.replay_log(log.read(log.start_offset, log.high_watermark))
    self._last_end = log.end_offset
    self._skew_ms = self._clock_skew_ms()
    self._do(partial(self.shard.loaded, self._now_ms()))


PARTITION_MUTATIONS = (
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
        patches=(
            Patch(FollowerRules, "answered", _raise_then_truncate),
            Patch(Fetcher, "truncate", lambda self, replica, offset: replica.log.truncate(offset)),
        ),
    ),
    Mutation(
        name="no-reconciliation",
        sentence="A leader does not compare epochs with a follower before it serves it.",
        trap=Traps.TRUNCATE_FIRST,
        patches=(Patch(Replica, "parting", lambda self, asked: None),),
    ),
    Mutation(
        name="fetch-not-fenced",
        sentence="A leader serves and counts fetches of another leader epoch as if they were of its own.",
        trap=Traps.FENCE,
        faults=("cut from controllers", "freeze", "preferred election"),
        patches=(
            Patch(Replica, "fenced", lambda self, rules, asked_epoch: None),
            Patch(Replica, "parting", _parting_in_own_epoch),
        ),
    ),
    Mutation(
        name="answer-to-another-question",
        sentence="A follower takes an answer to what it asked in another leader epoch, or before its log moved.",
        trap=Traps.FENCE,
        patches=(Patch(FollowerRules, "_is_current", lambda self, asked, log: True),),
    ),
    Mutation(
        name="stale-leader-acknowledges",
        sentence="A leader that is deposed tells those who wait that all is well.",
        trap=Traps.FENCE,
        patches=(Patch(Replica, "last_word", lambda self: ErrorCode.none),),
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
        faults=("storm", "one-way cut", "cut", "slow disk"),
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
        patches=(Patch(LeaderRules, "_is_further", lambda self, offset: 0 <= offset != self.high_watermark),),
    ),
    Mutation(
        name="isr-before-epoch-start",
        sentence="A follower enters the ISR at a high watermark that is older than the leader epoch.",
        trap=Traps.EPOCH_START,
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
        patches=(Patch(Replica, "knows_latest", lambda self, rules: True),),
    ),
    Mutation(
        name="damage-in-silence",
        sentence="A replica with a damaged log refetches it while it stays in sync by the book.",
        trap=Traps.CORRUPTION,
        patches=(Patch(Node, "found_damage", _start_over_in_silence),),
    ),
    Mutation(
        name="fsync-retried",
        sentence="An fsync that failed is tried again, and its success believed.",
        trap=Traps.DISK_FULL,
        patches=(Patch(Disk, "retries", _retry_sync),),
    ),
    Mutation(
        name="failure-marked-clean",
        sentence="A process that ends on a disk error leaves a clean-shutdown marker.",
        trap=Traps.DISK_FULL,
        patches=(Patch(Node, "mark_stop", _mark_clean),),
    ),
    Mutation(
        name="doubt-forgotten",
        sentence="A second start after a power loss takes itself for clean, as the first has noted the new boot.",
        trap=Traps.UNCLEAN_RESTART,
        patches=(Patch(Node, "find_clean", _note_boot_at_once),),
    ),
    Mutation(
        name="ack-before-sync",
        sentence="A leader counts what it has written but not synced.",
        trap=Traps.DURABLE,
        patches=(Patch(Replica, "counted_offset", lambda self: self.log.end_offset),),
    ),
    Mutation(
        name="follower-confirms-before-sync",
        sentence="A follower asks for more before it has synced what it got.",
        trap=Traps.DURABLE,
        patches=(
            Patch(Fetcher, "may_ask", lambda self, replica: True),
            Patch(Fetcher, "sync_then_go_on", _confirm_unsynced),
            Patch(FollowerRules, "_confirmed_offset", lambda self, log: log.end_offset),
        ),
    ),
    Mutation(
        name="page-cache-trusted",
        sentence="After a restart a replica takes all it can read for synced.",
        trap=Traps.DURABLE,
        patches=(Patch(SimLog, "reopened", _trust_page_cache),),
    ),
    Mutation(
        name="consumers-read-uncommitted",
        sentence="Consumers read up to the end of the log.",
        trap=Traps.MAXIMAL_ISR,
        patches=(Patch(Replica, "readable_end", lambda self: self.log.end_offset),),
    ),
    Mutation(
        name="repeat-appended-again",
        sentence="A repeated batch is appended once more.",
        trap=Traps.REPEAT,
        patches=(Patch(Replica, "repeated", lambda self, request: None),),
    ),
    Mutation(
        name="producers-lost-at-failover",
        sentence="A follower learns nothing of producers, so a new leader knows none.",
        trap=Traps.PRODUCER_STATE,
        patches=(Patch(Fetcher, "append", _append_and_forget),),
    ),
    Mutation(
        name="producers-lost-at-restart",
        sentence="A restarted broker has forgotten the producers of its logs.",
        trap=Traps.PRODUCER_STATE,
        patches=(Patch(SimLog, "reopened", lambda self: self.producers.clear()),),
    ),
    Mutation(
        name="producers-survive-truncation",
        sentence="After a truncation a replica still remembers the batches that were cut off.",
        trap=Traps.PRODUCER_STATE,
        faults=("kill", "cut", "power loss", "storm"),
        patches=(Patch(SimLog, "producers_truncated", lambda self: None),),
    ),
    Mutation(
        name="unknown-producer-welcome",
        sentence="A new leader takes a producer's later batches although the one before lost the first ones.",
        trap=Traps.PRODUCER_STATE,
        patches=(Patch(ProducerStateManager, "_must_begin", lambda self, producer_id, leader_epoch: False),),
    ),
    Mutation(
        name="group-reads-uncommitted",
        sentence="A coordinator shows committed offsets before their records are committed.",
        trap=Traps.GROUP_READ,
        patches=(Patch(Coordinator, "read", _read_at_once),),
    ),
    Mutation(
        name="group-answers-uncommitted",
        sentence="A coordinator confirms a commit before its record is committed.",
        trap=Traps.GROUP_READ,
        patches=(Patch(Coordinator, "_release_later", _answer_at_once),),
    ),
    Mutation(
        name="coordinator-loads-committed-only",
        sentence="A new coordinator leaves out what lies above its stale high watermark.",
        trap=Traps.GROUP_READ,
        patches=(Patch(Coordinator, "_load", _load_committed_only),),
    ),
)
