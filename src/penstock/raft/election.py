"""Elections: pre-votes, campaigns and votes.

A node asks for pre-votes first and becomes a candidate only if it would win. A voter votes once per epoch, and only for
a candidate whose log lacks nothing that its own log has.
"""

from penstock.protocol.errors import ErrorCode
from penstock.raft.actions import SendRequest, Token
from penstock.raft.leader import VoterChangeRules
from penstock.raft.state import Campaign
from penstock.raft.types import EPOCH_MAX, ElectionState, ReplicaKey, Role, VoteReply, VoteRequest


class CampaignRules(VoterChangeRules):
    def start_campaign(self) -> None:
        """The way to an election: a node that nobody would vote for disturbs nobody."""
        assert self.is_electable
        if self.needs_pre_vote():
            self.become_prospective()
        else:
            self.become_candidate()

    def needs_pre_vote(self) -> bool:
        return self.voters.latest.majority > 1 or not self.is_voter

    def become_prospective(self) -> None:
        fallback = self._follower
        self._leave_role(Role.PROSPECTIVE)
        self._campaign = Campaign(is_pre_vote=True, voters=self.voters.latest, fallback=fallback)
        self._run_campaign(self._campaign)

    def become_candidate(self) -> None:
        self.unsteady_epochs += 1
        self._leave_role(Role.CANDIDATE)
        self.election = ElectionState(min(self.epoch + 1, EPOCH_MAX), voted=self.local)
        self._campaign = Campaign(is_pre_vote=False, voters=self.voters.latest)
        self._run_campaign(self._campaign)

    def _run_campaign(self, campaign: Campaign) -> None:
        self.deadline_ms = self.now_ms + self._random_election_timeout_ms()
        if self.is_voter:
            campaign.granted.add(self.local.id)
        if not self._conclude(campaign):
            for voter in self.other_voters:
                self._request_vote(campaign, voter)

    def _request_vote(self, campaign: Campaign, voter: ReplicaKey) -> None:
        request = VoteRequest(
            epoch=self.epoch,
            candidate=self.local,
            voter=voter,
            last=self.last,
            pre_vote=campaign.is_pre_vote,
        )
        self._send(voter.id, request)

    def _vote_answered(self, sent: SendRequest, reply: VoteReply | None, *, is_refused: bool) -> None:
        request, campaign = sent.request, self._campaign
        assert isinstance(request, VoteRequest)
        if campaign is None or (request.epoch, request.pre_vote) != (self.epoch, campaign.is_pre_vote):
            return
        if request.voter not in campaign.voters.keys:
            return  # asked in an earlier campaign of this epoch, before the voters changed
        if reply is None and not is_refused:
            campaign.retries_ms[request.voter.id] = self.now_ms + self.timings.retry_ms
            return
        # The dead do not vote, and who waits for them loses time.
        votes = campaign.granted if reply and self.is_vote(request, reply) else campaign.refused
        votes.add(request.voter.id)
        self._conclude(campaign)

    def is_vote(self, request: VoteRequest, reply: VoteReply) -> bool:
        return reply.granted and reply.error is ErrorCode.none and reply.epoch == request.epoch

    def _conclude(self, campaign: Campaign) -> bool:
        """Whether the campaign is over."""
        if campaign.is_won and campaign.is_pre_vote:
            self.become_candidate()
        elif campaign.is_won:
            self.become_leader(campaign.granted)
        elif campaign.is_hopeless and not campaign.is_lost:
            campaign.is_lost = True
            self._lose_campaign(campaign)
        else:
            return False
        return True

    def _lose_campaign(self, campaign: Campaign) -> None:
        """Others may do better: wait a random while, or go back to a leader that others still hear."""
        if campaign.fallback:
            leader = campaign.fallback
            self.become_follower(self.epoch, leader.leader_id, leader.leader_addresses, is_heard=False)
            assert self._follower
            self._follower.doubts = leader.doubts
        else:
            self.deadline_ms = self.now_ms + 1 + self.draw(max(1, self.timings.backoff_max_ms))

    def _campaign_timed_out(self, campaign: Campaign) -> None:
        """A campaign that was lost has been answered; one that was not takes longer the next time."""
        if not campaign.is_lost:
            self.elections_failed += 1
        if campaign.fallback:
            self._lose_campaign(campaign)
        elif campaign.is_pre_vote and not campaign.is_lost:
            self.become_unattached(self.epoch)
        else:
            self.start_campaign()

    def _tick_campaign(self, campaign: Campaign) -> None:
        for voter in campaign.voters.keys:
            if campaign.retries_ms.get(voter.id, self.now_ms + 1) <= self.now_ms and not campaign.is_lost:
                del campaign.retries_ms[voter.id]
                self._request_vote(campaign, voter)


class VoteRules(CampaignRules):
    def _vote_received(self, request: VoteRequest, token: Token) -> None:
        error = self.vote_error(request)
        if error is not ErrorCode.none:
            self._send_leader_reply(request, token, error)
            return
        if request.epoch > self.epoch:
            self.become_unattached(request.epoch)
        is_granted = self.grants_pre_vote(request) if request.pre_vote else self.grants_vote(request)
        if is_granted and not request.pre_vote:
            self.record_vote(request.candidate)
        reply = VoteReply(
            epoch=self.epoch,
            leader_id=self.leader_id,
            leader_addresses=self.leader_addresses,
            granted=is_granted,
        )
        self._send_reply(token, reply)

    def vote_error(self, request: VoteRequest) -> ErrorCode:
        if not self.is_addressed_to_self(request.voter):
            return ErrorCode.invalid_voter_key
        if request.candidate.id == self.local.id or not self.is_controller:
            return ErrorCode.inconsistent_voter_set
        if request.epoch < self.epoch:
            return ErrorCode.fenced_leader_epoch
        if not self.is_plausible_epoch(request.epoch):
            return ErrorCode.invalid_request
        if not self.may_be_voter(request):
            return ErrorCode.inconsistent_voter_set
        return ErrorCode.none

    def may_be_voter(self, request: VoteRequest) -> bool:
        """A voter, or one made a voter by a record that our log has not reached.

        Such a candidate's log is ahead of ours, and it knows our disk from the voter set that holds both of us. To
        refuse it could leave too few to elect anyone.
        """
        if any(voters.is_voter(request.candidate) for voters in self.possible_voter_sets()):
            return True
        is_ahead = (request.last.epoch, request.last.offset) > (self.last.epoch, self.last.offset)
        return is_ahead and self.is_known_to(request.voter)

    def is_known_to(self, addressee: ReplicaKey) -> bool:
        """Whether the sender of a request has named this node by its disk, as voter sets do."""
        return addressee == self.local

    def is_addressed_to_self(self, voter: ReplicaKey) -> bool:
        """A vote asked of another disk is not ours to give: what that one promised, we do not know."""
        return voter.id == self.local.id and voter.directory in (None, self.local.directory)

    def grants_vote(self, request: VoteRequest) -> bool:
        if self.election.voted is not None:
            return self.election.voted == request.candidate
        return not self.epoch_has_leader() and self.is_up_to_date(request)

    def epoch_has_leader(self) -> bool:
        return self.election.leader_id >= 0

    def grants_pre_vote(self, request: VoteRequest) -> bool:
        """Binds nobody, so it is given as often as asked for, but not against a leader that is heard."""
        return not self.has_live_leader() and self.is_up_to_date(request)

    def has_live_leader(self) -> bool:
        if self._follower is None:
            return self.role is Role.LEADER
        if self._follower.is_suspect or not self._follower.is_heard:
            return False
        return self.now_ms < self._follower.since_ms + self.fetch_timeout_ms

    def is_up_to_date(self, request: VoteRequest) -> bool:
        return (request.last.epoch, request.last.offset) >= (self.last.epoch, self.last.offset)

    def record_vote(self, candidate: ReplicaKey) -> None:
        """A vote once given stands for the epoch, through crashes too; it also buys the candidate time."""
        self.election = self.election._replace(voted=candidate)
        if self.role is Role.PROSPECTIVE:
            self.become_unattached(self.epoch)
        elif self.role is Role.UNATTACHED:
            self.deadline_ms = self.now_ms + self._random_election_timeout_ms()
