"""Standing for election: first ask whether it would succeed, then stand, then lead or think again."""

from penstock.protocol.errors import ErrorCode
from penstock.raft.actions import Send
from penstock.raft.membership import Membership
from penstock.raft.messages import VoteReply, VoteRequest
from penstock.raft.states import Campaign
from penstock.raft.values import EPOCH_MAX, Election, ReplicaKey, Role


class Campaigning(Membership):
    def stand(self) -> None:
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
        self.election = Election(min(self.epoch + 1, EPOCH_MAX), voted=self.local)
        self._campaign = Campaign(is_pre_vote=False, voters=self.voters.latest)
        self._run_campaign(self._campaign)

    def _run_campaign(self, campaign: Campaign) -> None:
        self.deadline_ms = self.now_ms + self._random_election_timeout_ms()
        if self.is_voter:
            campaign.granted.add(self.local.id)
        if not self._conclude(campaign):
            for voter in self.other_voters:
                self._ask_for_vote(campaign, voter)

    def _ask_for_vote(self, campaign: Campaign, voter: ReplicaKey) -> None:
        request = VoteRequest(
            epoch=self.epoch,
            candidate=self.local,
            voter=voter,
            last=self.last,
            pre_vote=campaign.is_pre_vote,
        )
        self._send(voter.id, request)

    def _vote_answered(self, sent: Send, reply: VoteReply | None, *, is_refused: bool) -> None:
        request, campaign = sent.request, self._campaign
        assert isinstance(request, VoteRequest)
        if campaign is None or (request.epoch, request.pre_vote) != (self.epoch, campaign.is_pre_vote):
            return
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
            self._lose(campaign)
        else:
            return False
        return True

    def _lose(self, campaign: Campaign) -> None:
        """Others may do better: wait a random while, or go back to a leader that others still hear."""
        if campaign.fallback:
            leader = campaign.fallback
            self.become_follower(self.epoch, leader.leader_id, leader.leader_addresses, is_heard=False)
            assert self._follower
            self._follower.doubts = leader.doubts
        else:
            self.deadline_ms = self.now_ms + 1 + self.draw(max(1, self.timings.backoff_max_ms))

    def _campaign_ran_out(self, campaign: Campaign) -> None:
        """A campaign that was lost has been answered; one that was not takes longer the next time."""
        if not campaign.is_lost:
            self.elections_failed += 1
        if campaign.fallback:
            self._lose(campaign)
        elif campaign.is_pre_vote and not campaign.is_lost:
            self.become_unattached(self.epoch)
        else:
            self.stand()

    def _tick_campaign(self, campaign: Campaign) -> None:
        for voter in self.other_voters:
            if campaign.retries_ms.get(voter.id, self.now_ms + 1) <= self.now_ms and not campaign.is_lost:
                del campaign.retries_ms[voter.id]
                self._ask_for_vote(campaign, voter)
