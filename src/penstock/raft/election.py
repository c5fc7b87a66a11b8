"""Elections: pre-votes, campaigns and votes.

A node asks for pre-votes first and becomes a candidate only if it would win. A voter votes once per epoch, and only for
a candidate whose log lacks nothing that its own log has.
"""

from penstock.protocol.errors import ErrorCode
from penstock.raft import leader, roles
from penstock.raft.actions import SendRequest, Token
from penstock.raft.state import Campaign, RaftState
from penstock.raft.types import EPOCH_MAX, ElectionState, ReplicaKey, Role, VoteReply, VoteRequest


def start_campaign(raft: RaftState) -> None:
    """Ask for pre-votes first, so that a node that cannot win does not depose the leader."""
    assert raft.is_electable
    if needs_pre_vote(raft):
        become_prospective(raft)
    else:
        become_candidate(raft)


def needs_pre_vote(raft: RaftState) -> bool:
    return raft.voters.latest.majority > 1 or not raft.is_voter


def become_prospective(raft: RaftState) -> None:
    fallback = raft.follower
    roles.leave_role(raft, Role.PROSPECTIVE)
    raft.campaign = Campaign(is_pre_vote=True, voters=raft.voters.latest, fallback=fallback)
    _run_campaign(raft, raft.campaign)


def become_candidate(raft: RaftState) -> None:
    raft.unsteady_epochs += 1
    roles.leave_role(raft, Role.CANDIDATE)
    raft.election = ElectionState(min(raft.epoch + 1, EPOCH_MAX), voted=raft.local)
    raft.campaign = Campaign(is_pre_vote=False, voters=raft.voters.latest)
    _run_campaign(raft, raft.campaign)


def _run_campaign(raft: RaftState, campaign: Campaign) -> None:
    raft.deadline_ms = raft.now_ms + raft.random_election_timeout_ms()
    if raft.is_voter:
        campaign.granted.add(raft.local.id)
    if not conclude_campaign(raft, campaign):
        for voter in raft.other_voters:
            _request_vote(raft, campaign, voter)


def _request_vote(raft: RaftState, campaign: Campaign, voter: ReplicaKey) -> None:
    request = VoteRequest(
        epoch=raft.epoch,
        candidate=raft.local,
        voter=voter,
        last=raft.last,
        pre_vote=campaign.is_pre_vote,
    )
    raft.send(voter.id, request)


def vote_answered(raft: RaftState, sent: SendRequest, reply: VoteReply | None, *, is_refused: bool) -> None:
    request, campaign = sent.request, raft.campaign
    assert isinstance(request, VoteRequest)
    if campaign is None or (request.epoch, request.pre_vote) != (raft.epoch, campaign.is_pre_vote):
        return
    if request.voter not in campaign.voters.keys:
        return  # sent in an earlier campaign of this epoch, before the voters changed
    if reply is None and not is_refused:
        campaign.retries_ms[request.voter.id] = raft.now_ms + raft.timings.retry_ms
        return
    # A voter whose host refuses the connection counts as a refusal: waiting for it would only take time.
    votes = campaign.granted if reply and is_vote(raft, request, reply) else campaign.refused
    votes.add(request.voter.id)
    conclude_campaign(raft, campaign)


def is_vote(raft: RaftState, request: VoteRequest, reply: VoteReply) -> bool:
    return reply.granted and reply.error is ErrorCode.none and reply.epoch == request.epoch


def conclude_campaign(raft: RaftState, campaign: Campaign) -> bool:
    """Act on the votes. Returns whether the campaign is over."""
    if campaign.is_won and campaign.is_pre_vote:
        become_candidate(raft)
    elif campaign.is_won:
        leader.become_leader(raft, campaign.granted)
    elif campaign.is_hopeless and not campaign.is_lost:
        campaign.is_lost = True
        _lose_campaign(raft, campaign)
    else:
        return False
    return True


def _lose_campaign(raft: RaftState, campaign: Campaign) -> None:
    """Wait for a random time so that others can win, or go back to a leader that others still hear."""
    fallback = campaign.fallback
    if fallback:
        roles.become_follower(raft, raft.epoch, fallback.leader_id, fallback.leader_addresses, is_heard=False)
        assert raft.follower
        raft.follower.refusals = fallback.refusals
    else:
        raft.deadline_ms = raft.now_ms + 1 + raft.draw(max(1, raft.timings.backoff_max_ms))


def campaign_timed_out(raft: RaftState, campaign: Campaign) -> None:
    """A campaign that ran out of time without a result makes the next one last longer."""
    if not campaign.is_lost:
        raft.elections_failed += 1
    if campaign.fallback:
        _lose_campaign(raft, campaign)
    elif campaign.is_pre_vote and not campaign.is_lost:
        roles.become_unattached(raft, raft.epoch)
    else:
        start_campaign(raft)


def tick_campaign(raft: RaftState, campaign: Campaign) -> None:
    for voter in campaign.voters.keys:
        if campaign.retries_ms.get(voter.id, raft.now_ms + 1) <= raft.now_ms and not campaign.is_lost:
            del campaign.retries_ms[voter.id]
            _request_vote(raft, campaign, voter)


def vote_received(raft: RaftState, request: VoteRequest, token: Token) -> None:
    error = vote_error(raft, request)
    if error is not ErrorCode.none:
        raft.send_leader_reply(request, token, error)
        return
    if request.epoch > raft.epoch:
        roles.become_unattached(raft, request.epoch)
    is_granted = grants_pre_vote(raft, request) if request.pre_vote else grants_vote(raft, request)
    if is_granted and not request.pre_vote:
        record_vote(raft, request.candidate)
    reply = VoteReply(
        epoch=raft.epoch,
        leader_id=raft.leader_id,
        leader_addresses=raft.leader_addresses,
        granted=is_granted,
    )
    raft.send_reply(token, reply)


def vote_error(raft: RaftState, request: VoteRequest) -> ErrorCode:
    if not is_addressed_to_self(raft, request.voter):
        return ErrorCode.invalid_voter_key
    if request.candidate.id == raft.local.id or not raft.is_controller:
        return ErrorCode.inconsistent_voter_set
    if request.epoch < raft.epoch:
        return ErrorCode.fenced_leader_epoch
    if not raft.is_plausible_epoch(request.epoch):
        return ErrorCode.invalid_request
    if not may_be_voter(raft, request):
        return ErrorCode.inconsistent_voter_set
    return ErrorCode.none


def may_be_voter(raft: RaftState, request: VoteRequest) -> bool:
    """The candidate is a voter, or a record that this node lacks made it one.

    In the second case its log is ahead of ours, and it knows our directory from the voter set that holds both of us.
    If this node refused it, too few voters could be left to elect a leader.
    """
    if any(voters.is_voter(request.candidate) for voters in raft.possible_voter_sets()):
        return True
    is_ahead = (request.last.epoch, request.last.offset) > (raft.last.epoch, raft.last.offset)
    return is_ahead and is_known_to(raft, request.voter)


def is_known_to(raft: RaftState, addressee: ReplicaKey) -> bool:
    """Whether the sender names this node with its directory id, as voter sets do."""
    return addressee == raft.local


def is_addressed_to_self(raft: RaftState, voter: ReplicaKey) -> bool:
    """A request to another directory is refused: this node does not know what was voted there."""
    return voter.id == raft.local.id and voter.directory in (None, raft.local.directory)


def grants_vote(raft: RaftState, request: VoteRequest) -> bool:
    if raft.election.voted is not None:
        return raft.election.voted == request.candidate
    return not epoch_has_leader(raft) and is_up_to_date(raft, request)


def epoch_has_leader(raft: RaftState) -> bool:
    return raft.election.leader_id >= 0


def grants_pre_vote(raft: RaftState, request: VoteRequest) -> bool:
    """A pre-vote does not bind: a node grants any number of them, unless it still hears its leader."""
    return not has_live_leader(raft) and is_up_to_date(raft, request)


def has_live_leader(raft: RaftState) -> bool:
    if raft.follower is None:
        return raft.role is Role.LEADER
    if raft.follower.is_suspect or not raft.follower.is_heard:
        return False
    return raft.now_ms < raft.follower.since_ms + raft.fetch_timeout_ms


def is_up_to_date(raft: RaftState, request: VoteRequest) -> bool:
    return (request.last.epoch, request.last.offset) >= (raft.last.epoch, raft.last.offset)


def record_vote(raft: RaftState, candidate: ReplicaKey) -> None:
    """The vote is saved and holds for the whole epoch. It also moves this node's own election deadline."""
    raft.election = raft.election._replace(voted=candidate)
    if raft.role is Role.PROSPECTIVE:
        roles.become_unattached(raft, raft.epoch)
    elif raft.role is Role.UNATTACHED:
        raft.deadline_ms = raft.now_ms + raft.random_election_timeout_ms()
