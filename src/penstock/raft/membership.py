"""Changes of the voter set: one at a time, in force from their append, answered once committed."""

from penstock.protocol.errors import ErrorCode
from penstock.raft.actions import AppendControl, Token
from penstock.raft.messages import VoterReply
from penstock.raft.serving import Serving
from penstock.raft.states import VoterChange
from penstock.raft.values import ReplicaKey, Voter, Voters


class Membership(Serving):
    def _add_voter(self, voter: Voter, token: Token) -> None:
        refusal = self.change_refusal() or self._adding_refusal(voter)
        if refusal:
            self._answer(token, refusal)
            return
        assert self._leader
        self._leader.change = VoterChange(
            voters=self.voters.latest.with_voter(voter),
            token=token,
            newcomer=voter.key,
            catch_up_offset=self.log.end_offset,
            deadline_ms=self.now_ms + self.timings.fetch_timeout_ms,
        )

    def _adding_refusal(self, voter: Voter) -> VoterReply | None:
        if voter.key.id in self.voters.latest:
            message = f"{voter.key.id} is a voter; one with another disk is removed first"
            return VoterReply(error=ErrorCode.duplicate_voter, message=message)
        return None

    def _remove_voter(self, key: ReplicaKey, token: Token) -> None:
        refusal = self.change_refusal() or self._naming_refusal(key)
        if not refusal and len(self.voters.latest) == 1:
            refusal = VoterReply(error=ErrorCode.invalid_request, message="the last voter cannot be removed")
        if refusal:
            self._answer(token, refusal)
            return
        self._append_change(VoterChange(voters=self.voters.latest.without(key.id), token=token))

    def _update_voter(self, voter: Voter, token: Token) -> None:
        refusal = self.change_refusal() or self._naming_refusal(voter.key)
        if not refusal and voter == self.voters.latest.get(voter.key.id):
            refusal = VoterReply()
        if refusal:
            self._answer(token, refusal)
            return
        self._append_change(VoterChange(voters=self.voters.latest.with_voter(voter), token=token))

    def _naming_refusal(self, key: ReplicaKey) -> VoterReply | None:
        if self.voters.latest.is_voter(key):
            return None
        return VoterReply(error=ErrorCode.voter_not_found, message=f"{key.id} on that disk is no voter")

    # When a change may begin

    def change_refusal(self) -> VoterReply | None:
        if self._leader is None:
            return VoterReply(error=ErrorCode.not_leader_or_follower, message="not the leader")
        if not self.has_committed_in_epoch():
            return VoterReply(
                error=ErrorCode.request_timed_out, message="the leader's epoch is not committed yet"
            )
        if self.has_change_under_way():
            return VoterReply(error=ErrorCode.request_timed_out, message="another voter change is under way")
        return None

    def has_committed_in_epoch(self) -> bool:
        """Before that, a change of an earlier leader may still come back and overlap with ours."""
        assert self._leader
        return self.high_watermark is not None and self.high_watermark > self._leader.epoch_start_offset

    def has_change_under_way(self) -> bool:
        assert self._leader
        return self._leader.change is not None or not self._is_committed(self.voters.latest_offset)

    # How it goes on

    def _advance_change(self) -> None:
        """After every event of a leader's."""
        change = self._leader.change if self._leader else None
        if change and change.offset is None:
            self._advance_newcomer(change)
        elif change and change.offset is not None and self._is_committed(change.offset):
            self._end_change(change, VoterReply())
        if self._leader and self.is_voted_out():
            self.become_resigned()

    def is_voted_out(self) -> bool:
        """A leader leads on until its removal is committed: nobody else can see to that."""
        return not self.is_voter and self._is_committed(self.voters.latest_offset)

    def _advance_newcomer(self, change: VoterChange) -> None:
        if self.has_caught_up(change):
            self._append_change(change)
        elif change.deadline_ms is not None and change.deadline_ms <= self.now_ms:
            message = "the new voter has not caught up"
            self._end_change(change, VoterReply(error=ErrorCode.request_timed_out, message=message))

    def has_caught_up(self, change: VoterChange) -> bool:
        """A voter that lags would halt the quorum while it catches up."""
        assert self._leader
        assert change.newcomer
        progress = self._leader.progress.get(change.newcomer)
        if progress is None or progress.heard_ms + self.timings.fetch_timeout_ms <= self.now_ms:
            return False
        return progress.offset >= change.catch_up_offset

    def _append_change(self, change: VoterChange) -> None:
        assert self._leader
        self._leader.change = change
        change.offset, change.deadline_ms = self.log.end_offset, None
        self.voters.add(change.offset, change.voters)
        self._do(AppendControl((Voters(voters=change.voters),), change.offset))
        for voter in self.other_voters:
            self._progress_of(voter)

    def _end_change(self, change: VoterChange, reply: VoterReply) -> None:
        assert self._leader
        self._leader.change = None
        self._answer(change.token, reply)
