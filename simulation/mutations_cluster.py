"""Bugs of the quorum and of the controller's decisions."""

from __future__ import annotations

from typing import Any

from penstock.cluster import image as cluster_image
from penstock.cluster import topic_settings
from penstock.cluster.controller import alter_partition, brokers, election
from penstock.cluster.controller.partition_change import PartitionChangeBuilder
from penstock.groups import offsets as group_offsets
from penstock.protocol.errors import ErrorCode
from penstock.raft import election as raft_election
from penstock.raft import follower as raft_follower
from penstock.raft import leader as raft_leader
from penstock.raft.state import RaftState
from penstock.replication.leader import LeaderRules
from simulation.metadata import Metadata
from simulation.mutation import Mutation, Patch, Traps
from simulation.node import Node
from simulation.quorum import Quorum


def _same_epoch(old: Any, record: Any) -> Any:
    return _changed_partition(old, record)._replace(leader_epoch=old.leader_epoch)


_changed_partition = cluster_image.changed_partition


def _anyone_counts(raft: RaftState) -> Any:
    assert raft.leader
    others = [key for key in raft.leader.progress if key.id != raft.local.id]
    return (raft.local, *others)


def _majority_of_anyone(raft: RaftState) -> int:
    offsets = sorted((raft_leader.durable_offset_of(raft, key) for key in _anyone_counts(raft)), reverse=True)
    return offsets[min(len(offsets), raft.voters.latest.majority) - 1]


def _own_end_counts(raft: RaftState, key: Any) -> int:
    return raft.log.end_offset if key.id == raft.local.id else raft_leader.progress_of(raft, key).offset


def _forget_vote(self: Quorum, election: Any) -> bool:
    return True


def _no_truncation(raft: RaftState, diverging: Any) -> int:
    return raft.log.end_offset - 1


def _divergence_in_own_epoch(raft: RaftState, request: Any) -> Any:
    return _divergence(raft, request) if request.epoch == raft.epoch else None


_divergence = raft_leader.divergence


def _no_refusal(raft: RaftState) -> Any:
    return None if raft.leader is not None else _change_refusal(raft)


_change_refusal = raft_leader.change_refusal


def _commit_anything(*_: Any) -> ErrorCode:
    return ErrorCode.none


QUORUM_MUTATIONS = (
    Mutation(
        name="vote-not-saved",
        sentence="A vote is given before it is on disk.",
        trap=Traps.DURABLE,
        patches=(Patch(Quorum, "save_election", _forget_vote),),
    ),
    Mutation(
        name="two-votes-in-one-epoch",
        sentence="A voter forgets in the same epoch whom it voted for.",
        trap=Traps.QUORUM,
        patches=(
            Patch(
                raft_election, "grants_vote", lambda raft, request: raft_election.is_up_to_date(raft, request)
            ),
        ),
    ),
    Mutation(
        name="vote-for-anyone",
        sentence="A voter does not compare logs with the candidate.",
        trap=Traps.QUORUM,
        patches=(Patch(raft_election, "is_up_to_date", lambda raft, request: True),),
    ),
    Mutation(
        name="earlier-epoch-committed-by-count",
        sentence="A leader commits records of an earlier epoch by counting who holds them.",
        trap=Traps.QUORUM,
        patches=(Patch(raft_leader, "may_commit_up_to", lambda raft, offset: offset >= 0),),
    ),
    Mutation(
        name="observers-counted",
        sentence="The quorum's high watermark counts observers as well as voters.",
        trap=Traps.QUORUM,
        patches=(Patch(raft_leader, "majority_offset", _majority_of_anyone),),
    ),
    Mutation(
        name="quorum-counts-unsynced",
        sentence="The quorum's leader counts what it has not synced.",
        trap=Traps.DURABLE,
        patches=(Patch(raft_leader, "durable_offset_of", _own_end_counts),),
    ),
    Mutation(
        name="quorum-follower-confirms-unsynced",
        sentence="A voter fetches on before it has synced what it got.",
        trap=Traps.DURABLE,
        patches=(Patch(raft_follower, "is_ready_to_fetch", lambda raft: not raft.is_append_pending),),
    ),
    Mutation(
        name="quorum-does-not-reconcile",
        sentence="The quorum's leader does not compare epochs with who fetches.",
        trap=Traps.TRUNCATE_FIRST,
        patches=(Patch(raft_leader, "divergence", lambda raft, request: None),),
    ),
    Mutation(
        name="quorum-truncates-one-record",
        sentence="A voter that parts from its leader cuts off its last record only, and goes on.",
        trap=Traps.TRUNCATE,
        patches=(
            Patch(raft_follower, "truncation_offset", _no_truncation),
            Patch(raft_leader, "divergence", lambda raft, request: None),
        ),
    ),
    Mutation(
        name="quorum-fetch-not-fenced",
        sentence="The quorum's leader counts fetches of other epochs as if they were of its own.",
        trap=Traps.FENCE,
        patches=(
            Patch(
                raft_leader,
                "fetch_error",
                lambda raft, request: (
                    ErrorCode.none if raft.leader is not None else ErrorCode.not_leader_or_follower
                ),
            ),
            Patch(raft_leader, "divergence", _divergence_in_own_epoch),
        ),
    ),
    Mutation(
        name="two-voter-changes",
        sentence="A voter change begins while another is not committed.",
        trap=Traps.QUORUM,
        patches=(Patch(raft_leader, "change_refusal", _no_refusal),),
    ),
    Mutation(
        name="minority-elects",
        sentence="A candidate leads with one vote less than a majority.",
        trap=Traps.QUORUM,
        patches=(
            Patch(
                raft_election,
                "conclude_campaign",
                lambda raft, campaign: _lead_with_less(raft, campaign),
            ),
        ),
    ),
    Mutation(
        name="append-out-of-turn",
        sentence="A controller appends while its rules have already moved to another epoch.",
        trap=Traps.FENCE,
        faults=("cut", "one-way cut", "cut from controllers", "slow disk", "freeze"),
        patches=(Patch(Quorum, "in_turn", lambda self, call: call()),),
    ),
    Mutation(
        name="controller-acts-too-early",
        sentence="A new controller decides before its image has all that was committed.",
        trap=Traps.QUORUM,
        patches=(Patch(Metadata, "is_caught_up", lambda self, epoch_start_offset: True),),
    ),
)


def _lead_with_less(raft: RaftState, campaign: Any) -> bool:
    if len(campaign.granted) + 1 >= campaign.voters.majority and not campaign.is_won:
        campaign.granted.update(campaign.voters.ids)
    return _conclude_campaign(raft, campaign)


_conclude_campaign = raft_election.conclude_campaign


def _take_no_answer_for_final(self: LeaderRules, *, final: bool) -> None:
    _isr_refused(self, final=True)


_isr_refused = LeaderRules.isr_refused


CONTROLLER_MUTATIONS = (
    Mutation(
        name="image-waited-for-for-ever",
        sentence="A leader whose request for another in-sync set was lost, or cut off, waits for its image for ever.",
        trap=Traps.LOST_DECISION,
        patches=(
            Patch(LeaderRules, "isr_refused", _take_no_answer_for_final),
            Patch(LeaderRules, "_awaits_image", lambda self: self._announced_ms is not None),
        ),
    ),
    Mutation(
        name="elect-anyone",
        sentence="The controller elects a live replica, in sync or not.",
        trap=Traps.UNCLEAN_RESTART,
        patches=(Patch(election, "is_complete", lambda candidates, replica: candidates.is_active(replica)),),
    ),
    Mutation(
        name="unclean-restart-trusted",
        sentence="A replica that lost power without syncing stays in sync by the book.",
        trap=Traps.UNCLEAN_RESTART,
        patches=(Patch(PartitionChangeBuilder, "doubt", lambda self, broker: None),),
    ),
    Mutation(
        name="lost-disk-trusted",
        sentence="A replica that comes back with another disk stays in sync by the book.",
        trap=Traps.CORRUPTION,
        faults=("disk lost", "kill"),
        patches=(Patch(brokers, "has_other_directory", lambda change, registration: False),),
    ),
    Mutation(
        name="leader-epoch-not-raised",
        sentence="A new leader begins no new leader epoch.",
        trap=Traps.FENCE,
        patches=(Patch(cluster_image, "changed_partition", _same_epoch),),
    ),
    Mutation(
        name="stale-partition-epoch-accepted",
        sentence="The controller takes an ISR change that was decided on an older state.",
        trap=Traps.FENCE,
        faults=("storm", "slow disk"),
        patches=(Patch(alter_partition, "refuse_other_epochs", lambda partition, item, broker_id: None),),
    ),
    Mutation(
        name="stale-broker-epoch-accepted",
        sentence="A replica enters the ISR on fetches of its earlier life.",
        trap=Traps.FENCE,
        patches=(
            Patch(alter_partition, "is_eligible", lambda image, member: True),
            Patch(LeaderRules, "_is_heard", lambda self, follower: True),
            Patch(Node, "is_eligible", lambda self, broker_id, broker_epoch: True),
        ),
    ),
    Mutation(
        name="eligible-though-left-behind",
        sentence="Who leaves the ISR stays eligible to lead although the high watermark goes on without it.",
        trap=Traps.MAXIMAL_ISR,
        # Leaders hold still while anyone else is eligible, so that guard goes too.
        patches=(
            Patch(PartitionChangeBuilder, "_below_min_isr", lambda self: True),
            Patch(topic_settings, "isr_floor", lambda partition: 1),
        ),
    ),
    Mutation(
        name="second-broker-accepted",
        sentence="A second broker takes the id of one that lives.",
        trap=Traps.TWO_BROKERS,
        patches=(
            Patch(brokers, "refuse_second_incarnation", lambda known, registration, silent_ms, rules: None),
        ),
    ),
    Mutation(
        name="old-generation-commits",
        sentence="A member of an earlier generation may still commit offsets.",
        trap=Traps.OWNER,
        faults=("client freeze", "clock jump"),
        patches=(Patch(group_offsets, "check_commit", _commit_anything),),
    ),
)
