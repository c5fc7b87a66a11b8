"""Role changes, and the epochs and leaders that a node learns from replies."""

from penstock.protocol.errors import ErrorCode
from penstock.raft.state import FollowerState, LeaderState, PendingFetch, RaftState
from penstock.raft.types import (
    NO_LEADER,
    Address,
    ElectionState,
    EndEpochRequest,
    PeerReply,
    ReplicaKey,
    Role,
    VoterChangeReply,
    VoteReply,
)


def become_unattached(raft: RaftState, epoch: int, *, deadline_ms: int | None = None) -> None:
    """The leader is not known. A voter starts a campaign at the deadline; until then the node asks its peers."""
    _enter_epoch(raft, epoch)
    leave_role(raft, Role.UNATTACHED)
    raft.deadline_ms = deadline_ms or raft.now_ms + raft.random_election_timeout_ms()


def become_follower(
    raft: RaftState, epoch: int, leader_id: int, addresses: tuple[Address, ...], *, is_heard: bool
) -> None:
    assert leader_id not in (NO_LEADER, raft.local.id), leader_id
    _enter_epoch(raft, epoch)
    raft.election = raft.election._replace(leader_id=leader_id)
    leave_role(raft, Role.FOLLOWER)
    raft.follower = FollowerState(
        leader_id=leader_id, leader_addresses=addresses, since_ms=raft.now_ms, is_heard=is_heard
    )
    raft.deadline_ms = raft.follower_deadline_ms()


def become_resigned(raft: RaftState) -> None:
    """The leader steps down for the rest of this epoch and asks the voters furthest ahead to take over."""
    assert raft.leader
    successors = preferred_successors(raft, raft.leader)
    raft.ended_epoch = raft.epoch
    leave_role(raft, Role.RESIGNED)
    for voter in raft.other_voters:
        request = EndEpochRequest(epoch=raft.epoch, leader_id=raft.local.id, successors=successors)
        raft.send(voter.id, request)
    raft.deadline_ms = raft.now_ms + raft.random_election_timeout_ms()


def preferred_successors(raft: RaftState, leader: LeaderState) -> tuple[ReplicaKey, ...]:
    """The other voters, those furthest ahead first."""

    def furthest_first(key: ReplicaKey) -> int:
        progress = leader.progress.get(key)
        return -progress.offset if progress else 1

    return tuple(sorted(raft.other_voters, key=furthest_first))


def _enter_epoch(raft: RaftState, epoch: int) -> None:
    assert epoch >= raft.epoch, f"epochs never go back: {epoch} after {raft.epoch}"
    if epoch > raft.epoch:
        raft.unsteady_epochs += 1
        raft.election = ElectionState(epoch)


def leave_role(raft: RaftState, role: Role) -> None:
    leader, raft.leader = raft.leader, None
    raft.role, raft.follower, raft.campaign, raft.deadline_ms = role, None, None, None
    raft.pending_fetch = PendingFetch(next_peer=raft.pending_fetch.next_peer)
    if leader:
        _leave_leadership(raft, leader)


def _leave_leadership(raft: RaftState, leader: LeaderState) -> None:
    """Answer the requests that wait for this leader. What they asked for may still happen."""
    raft.abandoned += [(delayed.request, delayed.token) for delayed in leader.delayed_fetches.values()]
    if leader.change:
        reply = VoterChangeReply(error=ErrorCode.not_leader_or_follower, message="leadership was lost")
        raft.send_reply(leader.change.token, reply)


def _campaign_accepts_leader(raft: RaftState, reply: VoteReply) -> bool:
    """A candidate ignores the leader that it campaigns against, and the leader named by a voter that grants."""
    fallback = raft.campaign.fallback if raft.campaign else None
    return not reply.granted and (fallback is None or fallback.leader_id != reply.leader_id)


def learn(raft: RaftState, reply: PeerReply) -> None:
    if reply.epoch > raft.epoch:
        _learn_epoch(raft, reply)
    elif not isinstance(reply, VoteReply) or _campaign_accepts_leader(raft, reply):
        _learn_leader(raft, reply)


def _learn_leader(raft: RaftState, reply: PeerReply) -> None:
    """Follow the leader that a peer names. The leader itself has not been heard yet."""
    if reply.epoch == raft.epoch and seeks_leader(raft) and can_follow(raft, reply.leader_id):
        become_follower(raft, reply.epoch, reply.leader_id, reply.leader_addresses, is_heard=False)


def _learn_epoch(raft: RaftState, reply: PeerReply) -> None:
    if can_follow(raft, reply.leader_id):
        become_follower(raft, reply.epoch, reply.leader_id, reply.leader_addresses, is_heard=False)
    else:
        become_unattached(raft, reply.epoch)


def can_follow(raft: RaftState, leader_id: int) -> bool:
    """A node does not follow itself: it may have led this epoch with another disk, before it was restarted."""
    return leader_id > NO_LEADER and leader_id != raft.local.id


def seeks_leader(raft: RaftState) -> bool:
    """Peers may still name the leader of an epoch that has ended; the node does not follow it."""
    has_no_leader = raft.role in (Role.UNATTACHED, Role.PROSPECTIVE, Role.CANDIDATE)
    return has_no_leader and raft.epoch != raft.ended_epoch
