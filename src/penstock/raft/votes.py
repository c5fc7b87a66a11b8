"""Voting for others: once per epoch, only for one whose log lacks nothing that ours has."""

from penstock.protocol.errors import ErrorCode
from penstock.raft.actions import Token
from penstock.raft.campaign import Campaigning
from penstock.raft.messages import VoteReply, VoteRequest
from penstock.raft.values import ReplicaKey, Role


class Voting(Campaigning):
    def _vote_received(self, request: VoteRequest, token: Token) -> None:
        error = self.vote_error(request)
        if error is not ErrorCode.none:
            self._answer_plainly(request, token, error)
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
        self._answer(token, reply)

    def vote_error(self, request: VoteRequest) -> ErrorCode:
        if not self.is_meant(request.voter):
            return ErrorCode.invalid_voter_key
        if request.candidate.id == self.local.id or not self.is_controller:
            return ErrorCode.inconsistent_voter_set
        if request.epoch < self.epoch:
            return ErrorCode.fenced_leader_epoch
        if not self.may_be_true(request.epoch):
            return ErrorCode.invalid_request
        if not self.may_be_voter(request):
            return ErrorCode.inconsistent_voter_set
        return ErrorCode.none

    def may_be_voter(self, request: VoteRequest) -> bool:
        """A voter, or one made a voter by a record that our log has not reached.

        Such a candidate's log is ahead of ours, and it knows our disk from the voter set that holds both of us. To
        refuse it could leave too few to elect anyone.
        """
        if any(voters.is_voter(request.candidate) for voters in self.voter_sets_in_question()):
            return True
        is_ahead = (request.last.epoch, request.last.offset) > (self.last.epoch, self.last.offset)
        return is_ahead and self.is_known_to(request.voter)

    def is_known_to(self, addressee: ReplicaKey) -> bool:
        """Whether the sender of a request has named this node by its disk, as voter sets do."""
        return addressee == self.local

    def is_meant(self, voter: ReplicaKey) -> bool:
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
        return not self.hears_leader() and self.is_up_to_date(request)

    def hears_leader(self) -> bool:
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
