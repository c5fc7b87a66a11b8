"""The rules of a leader: it opens its epoch, commits records, serves fetches and changes the voter set.

It announces itself to the voters that do not fetch, and resigns when a majority of the voters is silent. A fetch is
answered with records, the point of divergence, a snapshot id, or after a wait. The voter set changes one voter at a
time: a change is in force from its append and is answered once it is committed.
"""

from collections.abc import Callable

from penstock.protocol.errors import ErrorCode
from penstock.raft import roles
from penstock.raft.actions import AppendControlRecords, SendRecords, SendSnapshot, Token
from penstock.raft.state import DelayedQuorumFetch, LeaderState, RaftState, ReplicaProgress, VoterChange
from penstock.raft.types import (
    BeginEpochRequest,
    ControlRecord,
    FetchReply,
    FetchRequest,
    FetchSnapshotReply,
    FetchSnapshotRequest,
    KRaftVersion,
    LeaderChange,
    OffsetAndEpoch,
    ReplicaKey,
    Role,
    Voter,
    VoterChangeReply,
    Voters,
)

#: How long the leader remembers an observer that no longer fetches.
OBSERVER_SESSION_MS = 300_000


def become_leader(raft: RaftState, granted: set[int]) -> None:
    assert raft.election.voted == raft.local, "a leader has voted for itself"
    granting = tuple(key for key in raft.voters.latest.keys if key.id in granted)
    raft.elections_failed = 0
    roles.leave_role(raft, Role.LEADER)
    raft.election = raft.election._replace(leader_id=raft.local.id)
    raft.leader = LeaderState(since_ms=raft.now_ms, epoch_start_offset=raft.log.end_offset)
    for voter in raft.other_voters:
        progress_of(raft, voter)
        raft.leader.announce_ms[voter.id] = raft.now_ms
    raft.add_action(AppendControlRecords(_first_records(raft, granting), raft.log.end_offset))
    _announce_due(raft)


def _first_records(raft: RaftState, granting: tuple[ReplicaKey, ...]) -> tuple[ControlRecord, ...]:
    """The LeaderChange record; a voter set that is not in the log yet is appended with it."""
    leader_change = LeaderChange(leader_id=raft.local.id, voters=raft.voters.latest.keys, granting=granting)
    if raft.voters.latest_offset > raft.voters.BEFORE_LOG:
        return (leader_change,)
    voters = raft.voters.latest
    raft.voters.add(raft.log.end_offset + 2, voters)
    return (leader_change, KRaftVersion(), Voters(voters=voters))


def progress_of(raft: RaftState, key: ReplicaKey) -> ReplicaProgress:
    """A voter whose directory is not known is identified by its id alone."""
    assert raft.leader
    voter = raft.voters.latest.get(key.id)
    if voter and raft.voters.latest.is_voter(key):
        key = voter.key
    return raft.leader.progress.setdefault(key, ReplicaProgress(heard_ms=raft.now_ms))


# The high watermark


def update_leader_high_watermark(raft: RaftState) -> None:
    """A majority commits records of this epoch. Earlier records are committed with the first of them."""
    assert raft.leader
    offset = majority_offset(raft)
    if may_commit_up_to(raft, offset):
        raft.raise_high_watermark(offset)
        _report_high_watermark(raft)


def may_commit_up_to(raft: RaftState, offset: int) -> bool:
    """A later leader may still replace records of earlier epochs until a record of this epoch is committed."""
    assert raft.leader
    return offset > raft.leader.epoch_start_offset


def majority_offset(raft: RaftState) -> int:
    """The offset up to which a majority of the voters has durable records."""
    offsets = sorted((durable_offset_of(raft, key) for key in counted_replicas(raft)), reverse=True)
    return offsets[raft.voters.latest.majority - 1]


def counted_replicas(raft: RaftState) -> tuple[ReplicaKey, ...]:
    """Only voters count; a leader that was removed from the voter set does not count itself."""
    return raft.voters.latest.keys


def durable_offset_of(raft: RaftState, key: ReplicaKey) -> int:
    if raft.voters.latest.is_voter(raft.local) and key.id == raft.local.id:
        return raft.log.durable_offset
    return progress_of(raft, key).offset


# Delayed fetches


def serve_delayed_fetches(raft: RaftState) -> None:
    """Send the new records to the replicas that wait at the old end of the log."""
    for delayed in _take_delayed_fetches(raft, lambda delayed: delayed.request.offset < raft.log.end_offset):
        raft.add_action(SendRecords(delayed.token, raft.fetch_reply(), delayed.request.offset))


def _report_high_watermark(raft: RaftState) -> None:
    """Answer the fetches of replicas that do not know the new high watermark."""
    for delayed in _take_delayed_fetches(
        raft, lambda delayed: delayed.request.high_watermark < (raft.high_watermark or 0)
    ):
        raft.send_reply(delayed.token, raft.fetch_reply())


def _expire_delayed_fetches(raft: RaftState) -> None:
    for delayed in _take_delayed_fetches(raft, lambda delayed: delayed.deadline_ms <= raft.now_ms):
        raft.send_reply(delayed.token, raft.fetch_reply())


def _take_delayed_fetches(
    raft: RaftState, is_over: Callable[[DelayedQuorumFetch], bool]
) -> list[DelayedQuorumFetch]:
    assert raft.leader
    over = [key for key, delayed in raft.leader.delayed_fetches.items() if is_over(delayed)]
    return [raft.leader.delayed_fetches.pop(key) for key in over]


# Announcements to voters that do not fetch


def _announce_due(raft: RaftState) -> None:
    assert raft.leader
    for voter in raft.other_voters:
        if raft.leader.announce_ms.get(voter.id, raft.now_ms) <= raft.now_ms:
            _announce_later(raft, voter.id)
            request = BeginEpochRequest(
                epoch=raft.epoch, leader_id=raft.local.id, voter=voter, addresses=raft.addresses
            )
            raft.send(voter.id, request)


def _announce_later(raft: RaftState, voter_id: int) -> None:
    assert raft.leader
    raft.leader.announce_ms[voter_id] = raft.now_ms + max(1, raft.timings.fetch_timeout_ms // 2)


# Contact with a majority


def quorum_deadline_ms(raft: RaftState) -> int | None:
    """When the leader loses contact with a majority; None if it is the only voter that it needs."""
    others_needed = raft.voters.latest.majority - raft.voters.latest.is_voter(raft.local)
    if others_needed <= 0:
        return None
    heard = sorted((progress_of(raft, key).heard_ms for key in raft.other_voters), reverse=True)
    return heard[others_needed - 1] + raft.fetch_timeout_ms


def has_lost_quorum(raft: RaftState) -> bool:
    deadline_ms = quorum_deadline_ms(raft)
    return deadline_ms is not None and deadline_ms <= raft.now_ms


def resign_if_quorum_lost(raft: RaftState) -> None:
    if has_lost_quorum(raft):
        roles.become_resigned(raft)


def tick_leader(raft: RaftState) -> None:
    _expire_delayed_fetches(raft)
    _announce_due(raft)
    resign_if_quorum_lost(raft)


def leader_deadlines_ms(raft: RaftState) -> list[int]:
    assert raft.leader
    deadlines = [delayed.deadline_ms for delayed in raft.leader.delayed_fetches.values()]
    deadlines += [raft.leader.announce_ms.get(voter.id, raft.now_ms) for voter in raft.other_voters]
    quorum = quorum_deadline_ms(raft)
    return deadlines if quorum is None else [*deadlines, quorum]


def fetch_received(raft: RaftState, request: FetchRequest, token: Token) -> None:
    error = fetch_error(raft, request)
    if error is not ErrorCode.none:
        raft.send_leader_reply(request, token, error)
        return
    reply = _divergence_reply(raft, request)
    if reply is not None:
        _record_contact(raft, request.replica)
        raft.send_reply(token, reply)
        return
    _record_fetch(raft, request)
    update_leader_high_watermark(raft)
    _serve_or_delay(raft, request, token)


def fetch_error(raft: RaftState, request: FetchRequest | FetchSnapshotRequest) -> ErrorCode:
    """Only the leader of the request's epoch answers."""
    if request.epoch < raft.epoch:
        return ErrorCode.fenced_leader_epoch
    if request.epoch > raft.epoch:
        return ErrorCode.unknown_leader_epoch
    if raft.leader is None:
        return ErrorCode.not_leader_or_follower
    if isinstance(request, FetchRequest) and (request.offset < 0 or request.replica.id == raft.local.id):
        return ErrorCode.invalid_request
    return ErrorCode.none


# Divergence


def _divergence_reply(raft: RaftState, request: FetchRequest) -> FetchReply | None:
    """None when the replica's log is a prefix of this log."""
    if needs_snapshot(raft, request):
        if raft.log.snapshot is None:
            return raft.fetch_reply(ErrorCode.offset_out_of_range)
        return raft.fetch_reply(snapshot=raft.log.snapshot)
    diverging = divergence(raft, request)
    if diverging is None:
        return None
    if diverging.offset < raft.log.start_offset and raft.log.snapshot:
        return raft.fetch_reply(snapshot=raft.log.snapshot)
    return raft.fetch_reply(diverging=diverging)


def needs_snapshot(raft: RaftState, request: FetchRequest) -> bool:
    """At the start of this log, only a snapshot that ends there shows which epoch came before."""
    start = raft.log.start_offset
    if request.offset < start:
        return True
    position = OffsetAndEpoch(request.offset, request.last_epoch)
    return request.offset == start > 0 and raft.log.snapshot is not None and position != raft.log.snapshot


def divergence(raft: RaftState, request: FetchRequest) -> OffsetAndEpoch | None:
    if request.offset == raft.log.start_offset:
        return None
    epoch, end_offset = raft.log.end_offset_for(request.last_epoch)
    if epoch == -1:
        return OffsetAndEpoch(raft.log.end_offset, raft.log.last_epoch)
    if epoch == request.last_epoch and request.offset <= end_offset:
        return None
    return OffsetAndEpoch(end_offset, epoch)


# Progress of replicas


def _record_contact(raft: RaftState, replica: ReplicaKey) -> ReplicaProgress:
    assert raft.leader
    progress = progress_of(raft, replica)
    if raft.voters.latest.is_voter(replica):
        raft.leader.steady_ms = raft.steady_since(raft.leader.steady_ms, progress.heard_ms)
        _announce_later(raft, replica.id)
    progress.heard_ms = raft.now_ms
    return progress


def _record_fetch(raft: RaftState, request: FetchRequest) -> None:
    """A replica at the log end is caught up now; one at the end of its last fetch was caught up then."""
    progress = _record_contact(raft, request.replica)
    progress.offset = request.offset
    if request.offset >= raft.log.end_offset:
        progress.last_caught_up_ms = raft.now_ms
    elif progress.end_at_last_fetch >= 0 and request.offset >= progress.end_at_last_fetch:
        progress.last_caught_up_ms = max(progress.last_caught_up_ms, progress.last_fetch_ms)
    progress.last_fetch_ms = raft.now_ms
    progress.end_at_last_fetch = raft.log.end_offset
    _drop_expired_observers(raft)


def _drop_expired_observers(raft: RaftState) -> None:
    assert raft.leader
    voters, oldest_ms = raft.voters.latest, raft.now_ms - OBSERVER_SESSION_MS
    progress = raft.leader.progress
    for key in [key for key, of in progress.items() if of.heard_ms < oldest_ms and not voters.is_voter(key)]:
        del progress[key]


def _serve_or_delay(raft: RaftState, request: FetchRequest, token: Token) -> None:
    assert raft.leader
    earlier = raft.leader.delayed_fetches.pop(request.replica, None)
    if earlier:
        raft.send_reply(earlier.token, raft.fetch_reply())
    if request.offset < raft.log.end_offset:
        raft.add_action(SendRecords(token, raft.fetch_reply(), request.offset))
    elif has_newer_high_watermark(raft, request) or request.max_wait_ms <= 0:
        raft.send_reply(token, raft.fetch_reply())
    else:
        wait_ms = min(request.max_wait_ms, raft.timings.fetch_wait_ms)
        raft.leader.delayed_fetches[request.replica] = DelayedQuorumFetch(
            request=request, token=token, deadline_ms=raft.now_ms + wait_ms
        )


def has_newer_high_watermark(raft: RaftState, request: FetchRequest) -> bool:
    return raft.high_watermark is not None and request.high_watermark < raft.high_watermark


def snapshot_fetch_received(raft: RaftState, request: FetchSnapshotRequest, token: Token) -> None:
    error = fetch_error(raft, request)
    if error is not ErrorCode.none:
        raft.send_leader_reply(request, token, error)
        return
    _record_contact(raft, request.replica)
    reply = raft.leader_reply(request)
    assert isinstance(reply, FetchSnapshotReply)
    raft.add_action(SendSnapshot(token, request, reply))


def add_voter(raft: RaftState, voter: Voter, token: Token) -> None:
    refusal = change_refusal(raft) or _duplicate_voter_refusal(raft, voter)
    if refusal:
        raft.send_reply(token, refusal)
        return
    assert raft.leader
    raft.leader.change = VoterChange(
        voters=raft.voters.latest.with_voter(voter),
        token=token,
        new_voter=voter.key,
        catch_up_offset=raft.log.end_offset,
        deadline_ms=raft.now_ms + raft.timings.fetch_timeout_ms,
    )


def _duplicate_voter_refusal(raft: RaftState, voter: Voter) -> VoterChangeReply | None:
    if voter.key.id in raft.voters.latest:
        message = f"{voter.key.id} is already a voter; remove it before you add one with another directory"
        return VoterChangeReply(error=ErrorCode.duplicate_voter, message=message)
    return None


def remove_voter(raft: RaftState, key: ReplicaKey, token: Token) -> None:
    refusal = change_refusal(raft) or _unknown_voter_refusal(raft, key)
    if not refusal and len(raft.voters.latest) == 1:
        refusal = VoterChangeReply(
            error=ErrorCode.invalid_request, message="the last voter cannot be removed"
        )
    if refusal:
        raft.send_reply(token, refusal)
        return
    _append_change(raft, VoterChange(voters=raft.voters.latest.without(key.id), token=token))


def update_voter(raft: RaftState, voter: Voter, token: Token) -> None:
    refusal = change_refusal(raft) or _unknown_voter_refusal(raft, voter.key)
    if not refusal and voter == raft.voters.latest.get(voter.key.id):
        refusal = VoterChangeReply()
    if refusal:
        raft.send_reply(token, refusal)
        return
    _append_change(raft, VoterChange(voters=raft.voters.latest.with_voter(voter), token=token))


def _unknown_voter_refusal(raft: RaftState, key: ReplicaKey) -> VoterChangeReply | None:
    if raft.voters.latest.is_voter(key):
        return None
    return VoterChangeReply(
        error=ErrorCode.voter_not_found, message=f"{key.id} with that directory is not a voter"
    )


# When a voter change may start


def change_refusal(raft: RaftState) -> VoterChangeReply | None:
    if raft.leader is None:
        return VoterChangeReply(error=ErrorCode.not_leader_or_follower, message="not the leader")
    if not has_committed_in_epoch(raft):
        return VoterChangeReply(
            error=ErrorCode.request_timed_out,
            message="the leader has not committed a record of its epoch yet",
        )
    if has_pending_change(raft):
        return VoterChangeReply(
            error=ErrorCode.request_timed_out, message="another voter change is in progress"
        )
    return None


def has_committed_in_epoch(raft: RaftState) -> bool:
    """Before that, a voter change of an earlier leader may still be committed and overlap with a new one."""
    assert raft.leader
    return raft.high_watermark is not None and raft.high_watermark > raft.leader.epoch_start_offset


def has_pending_change(raft: RaftState) -> bool:
    assert raft.leader
    return raft.leader.change is not None or not raft.is_committed(raft.voters.latest_offset)


# Progress of a voter change


def advance_change(raft: RaftState) -> None:
    """Called after every event of a leader."""
    change = raft.leader.change if raft.leader else None
    if change and change.offset is None:
        _advance_catch_up(raft, change)
    elif change and change.offset is not None and raft.is_committed(change.offset):
        _end_change(raft, change, VoterChangeReply())
    if raft.leader and is_removed(raft):
        roles.become_resigned(raft)


def is_removed(raft: RaftState) -> bool:
    """A leader stays leader until its own removal is committed, because only it can commit that."""
    return not raft.is_voter and raft.is_committed(raft.voters.latest_offset)


def _advance_catch_up(raft: RaftState, change: VoterChange) -> None:
    if has_caught_up(raft, change):
        _append_change(raft, change)
    elif change.deadline_ms is not None and change.deadline_ms <= raft.now_ms:
        message = "the new voter has not caught up"
        _end_change(raft, change, VoterChangeReply(error=ErrorCode.request_timed_out, message=message))


def has_caught_up(raft: RaftState, change: VoterChange) -> bool:
    """A voter that lags would block commits until it has caught up."""
    assert raft.leader
    assert change.new_voter
    progress = raft.leader.progress.get(change.new_voter)
    if progress is None or progress.heard_ms + raft.timings.fetch_timeout_ms <= raft.now_ms:
        return False
    return progress.offset >= change.catch_up_offset


def _append_change(raft: RaftState, change: VoterChange) -> None:
    assert raft.leader
    raft.leader.change = change
    change.offset, change.deadline_ms = raft.log.end_offset, None
    raft.voters.add(change.offset, change.voters)
    raft.add_action(AppendControlRecords((Voters(voters=change.voters),), change.offset))
    for voter in raft.other_voters:
        progress_of(raft, voter)


def _end_change(raft: RaftState, change: VoterChange, reply: VoterChangeReply) -> None:
    assert raft.leader
    raft.leader.change = None
    raft.send_reply(change.token, reply)
