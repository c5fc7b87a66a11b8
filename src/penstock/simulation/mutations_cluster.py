"""Bugs of the quorum and of the controller's decisions."""

from __future__ import annotations

from typing import Any

from penstock.cluster import image as cluster_image
from penstock.cluster import topic_settings
from penstock.cluster.controller import alter_partition, brokers, election
from penstock.cluster.controller.partition_change import PartitionChangeBuilder
from penstock.groups import offsets as group_offsets
from penstock.protocol.errors import ErrorCode
from penstock.raft.election import CampaignRules, VoteRules
from penstock.raft.follower import QuorumFollowerRules
from penstock.raft.leader import FetchRules, QuorumLeaderRules, VoterChangeRules
from penstock.replication.leader import LeaderRules
from penstock.simulation.metadata import Metadata
from penstock.simulation.mutation import Mutation, Patch, Traps
from penstock.simulation.node import Node
from penstock.simulation.quorum import Quorum


def _same_epoch(old: Any, record: Any) -> Any:
    return _changed_partition(old, record)._replace(leader_epoch=old.leader_epoch)


_changed_partition = cluster_image.changed_partition


def _anyone_counts(self: QuorumLeaderRules) -> Any:
    assert self._leader
    others = [key for key in self._leader.progress if key.id != self.local.id]
    return (self.local, *others)


def _majority_of_anyone(self: QuorumLeaderRules) -> int:
    offsets = sorted((self.durable_offset_of(key) for key in _anyone_counts(self)), reverse=True)
    return offsets[min(len(offsets), self.voters.latest.majority) - 1]


def _own_end_counts(self: QuorumLeaderRules, key: Any) -> int:
    return self.log.end_offset if key.id == self.local.id else self._progress_of(key).offset


def _forget_vote(self: Quorum, election: Any) -> bool:
    return True


def _no_truncation(self: QuorumFollowerRules, diverging: Any) -> int:
    return self.log.end_offset - 1


def _divergence_in_own_epoch(self: FetchRules, request: Any) -> Any:
    return _divergence(self, request) if request.epoch == self.epoch else None


_divergence = FetchRules.divergence


def _no_refusal(self: VoterChangeRules) -> Any:
    return None if self._leader is not None else _change_refusal(self)


_change_refusal = VoterChangeRules.change_refusal


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
        patches=(Patch(VoteRules, "grants_vote", lambda self, request: self.is_up_to_date(request)),),
    ),
    Mutation(
        name="vote-for-anyone",
        sentence="A voter does not compare logs with the candidate.",
        trap=Traps.QUORUM,
        patches=(Patch(VoteRules, "is_up_to_date", lambda self, request: True),),
    ),
    Mutation(
        name="earlier-epoch-committed-by-count",
        sentence="A leader commits records of an earlier epoch by counting who holds them.",
        trap=Traps.QUORUM,
        patches=(Patch(QuorumLeaderRules, "may_commit_up_to", lambda self, offset: offset >= 0),),
    ),
    Mutation(
        name="observers-counted",
        sentence="The quorum's high watermark counts observers as well as voters.",
        trap=Traps.QUORUM,
        patches=(Patch(QuorumLeaderRules, "majority_offset", _majority_of_anyone),),
    ),
    Mutation(
        name="quorum-counts-unsynced",
        sentence="The quorum's leader counts what it has not synced.",
        trap=Traps.DURABLE,
        patches=(Patch(QuorumLeaderRules, "durable_offset_of", _own_end_counts),),
    ),
    Mutation(
        name="quorum-follower-confirms-unsynced",
        sentence="A voter fetches on before it has synced what it got.",
        trap=Traps.DURABLE,
        patches=(Patch(QuorumFollowerRules, "is_ready_to_fetch", lambda self: not self.is_append_pending),),
    ),
    Mutation(
        name="quorum-does-not-reconcile",
        sentence="The quorum's leader does not compare epochs with who fetches.",
        trap=Traps.TRUNCATE_FIRST,
        patches=(Patch(FetchRules, "divergence", lambda self, request: None),),
    ),
    Mutation(
        name="quorum-truncates-one-record",
        sentence="A voter that parts from its leader cuts off its last record only, and goes on.",
        trap=Traps.TRUNCATE,
        patches=(
            Patch(QuorumFollowerRules, "truncation_offset", _no_truncation),
            Patch(FetchRules, "divergence", lambda self, request: None),
        ),
    ),
    Mutation(
        name="quorum-fetch-not-fenced",
        sentence="The quorum's leader counts fetches of other epochs as if they were of its own.",
        trap=Traps.FENCE,
        patches=(
            Patch(
                FetchRules,
                "fetch_error",
                lambda self, request: (
                    ErrorCode.none if self._leader is not None else ErrorCode.not_leader_or_follower
                ),
            ),
            Patch(FetchRules, "divergence", _divergence_in_own_epoch),
        ),
    ),
    Mutation(
        name="two-voter-changes",
        sentence="A voter change begins while another is not committed.",
        trap=Traps.QUORUM,
        patches=(Patch(VoterChangeRules, "change_refusal", _no_refusal),),
    ),
    Mutation(
        name="minority-elects",
        sentence="A candidate leads with one vote less than a majority.",
        trap=Traps.QUORUM,
        patches=(
            Patch(
                CampaignRules,
                "_conclude",
                lambda self, campaign: _lead_with_less(self, campaign),
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


def _lead_with_less(self: CampaignRules, campaign: Any) -> bool:
    if len(campaign.granted) + 1 >= campaign.voters.majority and not campaign.is_won:
        campaign.granted.update(campaign.voters.ids)
    return _conclude(self, campaign)


_conclude = CampaignRules._conclude


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
