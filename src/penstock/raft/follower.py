"""The rules of a follower: fetch from the leader, truncate what the leader lacks, notice when the leader is gone.

A follower that lacks records which the leader's log no longer has fetches a snapshot piece by piece; the snapshot then
replaces its log.
"""

from penstock.protocol.errors import ErrorCode
from penstock.raft import election, roles, types
from penstock.raft.actions import AppendRecords, InstallSnapshot, SendRequest, Token, Truncate, WriteSnapshot
from penstock.raft.state import CommittedRecordsLost, FollowerState, RaftState, SnapshotDownload

# Fetches


def send_next_fetch(raft: RaftState) -> None:
    """At most one fetch is in flight. Its offset tells the leader what this replica has made durable."""
    fetch = raft.pending_fetch
    if fetch.sent or (fetch.retry_ms is not None and fetch.retry_ms > raft.now_ms):
        return
    fetch.retry_ms = None
    if not is_ready_to_fetch(raft):
        return
    if raft.follower and raft.follower.download:
        fetch.sent = _fetch_snapshot(raft, raft.follower, raft.follower.download)
    elif raft.follower:
        fetch.sent = _fetch_from_leader(raft, raft.follower)
    elif raft.role is types.Role.UNATTACHED:
        fetch.sent = raft.send(_next_peer(raft), _fetch_request(raft, 0))


def is_ready_to_fetch(raft: RaftState) -> bool:
    """A follower fetches again only after the last reply is in the log and synced."""
    return not raft.is_append_pending and raft.log.durable_offset >= raft.log.end_offset


def _fetch_request(raft: RaftState, max_wait_ms: int) -> types.FetchRequest:
    return types.FetchRequest(
        epoch=raft.epoch,
        replica=raft.local,
        offset=raft.log.end_offset,
        last_epoch=raft.log.last_epoch,
        high_watermark=types.UNKNOWN_OFFSET if raft.high_watermark is None else raft.high_watermark,
        max_wait_ms=max_wait_ms,
    )


def _fetch_from_leader(raft: RaftState, follower: FollowerState) -> SendRequest:
    """Ask another peer when the leader's host refuses connections: the peer may know a newer leader."""
    if follower.is_suspect:
        return raft.send(_next_peer(raft), _fetch_request(raft, 0))
    return raft.send(follower.leader_id, _fetch_request(raft, raft.timings.fetch_wait_ms))


def _next_peer(raft: RaftState) -> int | None:
    """Rotate over the other voters and the bootstrap servers (None)."""
    rotation = (*(key.id for key in raft.other_voters), None)
    raft.pending_fetch.next_peer += 1
    return rotation[(raft.pending_fetch.next_peer - 1) % len(rotation)]


def _fetch_snapshot(raft: RaftState, follower: FollowerState, download: SnapshotDownload) -> SendRequest:
    request = types.FetchSnapshotRequest(
        epoch=raft.epoch, replica=raft.local, id=download.id, position=download.position
    )
    return raft.send(follower.leader_id, request)


# Replies to fetches


def fetch_answered(
    raft: RaftState, sent: SendRequest, reply: types.FetchReply | None, *, is_refused: bool
) -> None:
    if not _is_pending_reply(raft, sent, is_refused=is_refused, has_failed=reply is None):
        return
    assert raft.follower
    assert reply
    if is_denial(raft, raft.follower, sent, reply):
        _leader_denied(raft)
    elif reply.epoch != raft.epoch or reply.error is not ErrorCode.none:
        _retry_fetch_later(raft)
    else:
        _record_leader_contact(raft, raft.follower)
        _apply_fetch_reply(raft, raft.follower, reply)


def _is_pending_reply(raft: RaftState, sent: SendRequest, *, is_refused: bool, has_failed: bool) -> bool:
    """Whether this is the reply to the fetch in flight, and the node is still a follower."""
    if sent is not raft.pending_fetch.sent:
        return False
    raft.pending_fetch.sent = None
    if raft.follower is None or has_failed:
        _retry_fetch_later(raft)
    if is_refused and raft.follower:
        suspect_leader(raft, raft.follower)
    return raft.follower is not None and not has_failed


def _retry_fetch_later(raft: RaftState) -> None:
    raft.pending_fetch.retry_ms = raft.now_ms + raft.timings.retry_ms


def _record_leader_contact(raft: RaftState, follower: FollowerState) -> None:
    follower.steady_ms = raft.steady_since(follower.steady_ms, follower.since_ms)
    follower.since_ms, follower.is_heard = raft.now_ms, True
    follower.is_suspect, follower.refusals = False, 0
    raft.elections_failed = 0
    raft.deadline_ms = raft.follower_deadline_ms()


def _apply_fetch_reply(raft: RaftState, follower: FollowerState, reply: types.FetchReply) -> None:
    """Take the leader's high watermark only from a reply in which the two logs agree."""
    if reply.diverging:
        _truncate(raft, truncation_offset(raft, reply.diverging))
    elif reply.snapshot:
        _begin_download(raft, follower, reply.snapshot)
    else:
        follower.leader_high_watermark = reply.high_watermark
        update_follower_high_watermark(raft)
        if reply.records:
            raft.is_append_pending = True
            raft.add_action(AppendRecords(reply.records))


def truncation_offset(raft: RaftState, diverging: types.OffsetAndEpoch) -> int:
    """The end of the largest common epoch in this log or in the leader's, whichever is lower."""
    _, own_end = raft.log.end_offset_for(diverging.epoch)
    return max(0, min(own_end, diverging.offset))


def _truncate(raft: RaftState, offset: int) -> None:
    if offset < max(raft.high_watermark or 0, raft.log.start_offset):
        raise CommittedRecordsLost(
            f"the log of leader {raft.leader_id} of epoch {raft.epoch} diverges from {raft} at offset {offset}"
        )
    assert offset < raft.log.end_offset, f"nothing to truncate at {offset}: {raft}"
    raft.voters.truncate(offset)
    raft.is_append_pending = True
    raft.add_action(Truncate(offset))


def _begin_download(raft: RaftState, follower: FollowerState, snapshot: types.OffsetAndEpoch) -> None:
    if snapshot.offset < (raft.high_watermark or 0):
        raise CommittedRecordsLost(
            f"leader {raft.leader_id} of epoch {raft.epoch} offers the older snapshot {snapshot} to {raft}"
        )
    follower.download = SnapshotDownload(id=snapshot)


def update_follower_high_watermark(raft: RaftState) -> None:
    if raft.follower:
        offset = min(raft.follower.leader_high_watermark, raft.log.durable_offset)
        if offset > 0:
            raft.raise_high_watermark(offset)


# Loss of the leader


def suspect_leader(raft: RaftState, follower: FollowerState) -> None:
    """The leader's host refused a connection: campaign soon, and grant pre-votes to others."""
    follower.is_suspect = True
    soon_ms = raft.short_deadline_ms(follower.refusals)
    if raft.is_electable and (raft.deadline_ms is None or soon_ms < raft.deadline_ms):
        raft.deadline_ms = soon_ms
        follower.refusals += 1


def is_denial(
    raft: RaftState,
    follower: FollowerState,
    sent: SendRequest,
    reply: types.FetchReply | types.FetchSnapshotReply,
) -> bool:
    """The leader itself replies that it does not lead this epoch: it has resigned or restarted."""
    is_from_leader = sent.to == follower.leader_id
    return is_from_leader and reply.epoch == raft.epoch and reply.leader_id != follower.leader_id


def _leader_denied(raft: RaftState) -> None:
    """The epoch is over: its only possible leader says that it does not lead it."""
    raft.ended_epoch = raft.epoch
    roles.become_unattached(raft, raft.epoch, deadline_ms=raft.short_deadline_ms())


def deadline_passed(raft: RaftState) -> None:

    if raft.campaign:
        election.campaign_timed_out(raft, raft.campaign)
    elif raft.is_electable and raft.role is not types.Role.RESIGNED:
        election.start_campaign(raft)
    elif raft.role is types.Role.UNATTACHED:
        raft.deadline_ms = raft.now_ms + raft.random_election_timeout_ms()
    else:
        roles.become_unattached(raft, raft.epoch)


# BeginQuorumEpoch and EndQuorumEpoch


def begin_epoch_received(raft: RaftState, request: types.BeginEpochRequest, token: Token) -> None:
    error = _epoch_error(raft, request)
    if not election.is_addressed_to_self(raft, request.voter):
        error = ErrorCode.invalid_voter_key
    elif error is ErrorCode.none and not _may_lead(raft, request.leader_id, is_known_to=request.voter):
        error = ErrorCode.inconsistent_voter_set
    if error is ErrorCode.none:
        _accept_leader(raft, request)
    raft.send_leader_reply(request, token, error)


def _epoch_error(raft: RaftState, request: types.BeginEpochRequest | types.EndEpochRequest) -> ErrorCode:
    if request.epoch < raft.epoch:
        return ErrorCode.fenced_leader_epoch
    if not raft.is_plausible_epoch(request.epoch) or not roles.can_follow(raft, request.leader_id):
        return ErrorCode.invalid_request
    if request.epoch == raft.epoch and raft.leader_id not in (types.NO_LEADER, request.leader_id):
        return ErrorCode.invalid_request  # an epoch has one leader
    return ErrorCode.none


def _may_lead(raft: RaftState, leader_id: int, *, is_known_to: types.ReplicaKey | None = None) -> bool:
    """The leader is a voter, or a record that this node lacks made it one; see `election.may_be_voter`."""
    if leader_id == raft.leader_id or any(leader_id in each for each in raft.possible_voter_sets()):
        return True
    return is_known_to is not None and election.is_known_to(raft, is_known_to)


def _accept_leader(raft: RaftState, request: types.BeginEpochRequest) -> None:
    if raft.follower and request.epoch == raft.epoch:
        raft.follower.leader_addresses = request.addresses
        _record_leader_contact(raft, raft.follower)
    elif request.epoch > raft.epoch or roles.seeks_leader(raft):
        roles.become_follower(raft, request.epoch, request.leader_id, request.addresses, is_heard=True)


def end_epoch_received(raft: RaftState, request: types.EndEpochRequest, token: Token) -> None:
    error = _epoch_error(raft, request)
    if error is ErrorCode.none and not _may_lead(raft, request.leader_id):
        error = ErrorCode.inconsistent_voter_set
    is_free = raft.role in (types.Role.FOLLOWER, types.Role.UNATTACHED, types.Role.PROSPECTIVE)
    if error is ErrorCode.none and (is_free or request.epoch > raft.epoch):
        _leader_resigned(raft, request)
    raft.send_leader_reply(request, token, error)


def _leader_resigned(raft: RaftState, request: types.EndEpochRequest) -> None:
    """The first successor campaigns at once and without a pre-vote, because there is no leader to depose."""
    raft.ended_epoch = max(raft.ended_epoch, request.epoch)
    rank = request.successors.index(raft.local) if raft.local in request.successors else None
    if rank is None or not raft.is_electable:
        roles.become_unattached(raft, request.epoch)
        return
    roles.become_unattached(
        raft, request.epoch, deadline_ms=raft.short_deadline_ms() + rank * raft.timings.retry_ms
    )
    if rank == 0:
        election.become_candidate(raft)


def snapshot_answered(
    raft: RaftState, sent: SendRequest, reply: types.FetchSnapshotReply | None, *, is_refused: bool
) -> None:
    if not _is_pending_reply(raft, sent, is_refused=is_refused, has_failed=reply is None):
        return
    assert raft.follower
    assert reply
    download = raft.follower.download
    if is_denial(raft, raft.follower, sent, reply):
        _leader_denied(raft)
    elif reply.epoch != raft.epoch or download is None:
        _retry_fetch_later(raft)
    elif reply.error is not ErrorCode.none or not _is_next_piece(raft, download, reply):
        # The leader has a newer snapshot by now, or lost this one. The next fetch returns the snapshot to use.
        raft.follower.download = None
        _retry_fetch_later(raft)
    else:
        _record_leader_contact(raft, raft.follower)
        _write_piece(raft, download, reply)


def _is_next_piece(raft: RaftState, download: SnapshotDownload, reply: types.FetchSnapshotReply) -> bool:
    if (reply.id, reply.position) != (download.id, download.position):
        return False
    return bool(reply.data) or reply.position == reply.size


def _write_piece(raft: RaftState, download: SnapshotDownload, reply: types.FetchSnapshotReply) -> None:
    raft.add_action(WriteSnapshot(download.id, download.position, reply.data))
    download.position += len(reply.data)
    if download.position >= reply.size:
        raft.is_append_pending = True
        raft.add_action(InstallSnapshot(download.id))


def snapshot_installed(raft: RaftState) -> None:
    """The snapshot holds only committed records, and the log starts at its end."""
    assert raft.log.snapshot
    if raft.follower:
        raft.follower.download = None
    raft.is_append_pending = False
    raft.voters.truncate(raft.log.snapshot.offset)
    raft.raise_high_watermark(raft.log.snapshot.offset)
