"""Following: fetch from the leader, cut off what it does not have, notice when it is gone."""

from penstock.protocol.errors import ErrorCode
from penstock.raft.actions import AppendRecords, Send, Token, Truncate
from penstock.raft.core import HistoryLost
from penstock.raft.messages import (
    BeginEpochRequest,
    EndEpochRequest,
    FetchReply,
    FetchRequest,
    FetchSnapshotReply,
    FetchSnapshotRequest,
)
from penstock.raft.states import Download, Follower
from penstock.raft.values import NOBODY, UNKNOWN_OFFSET, OffsetAndEpoch, ReplicaKey, Role
from penstock.raft.votes import Voting


class Following(Voting):
    # Asking

    def _ask(self) -> None:
        """One question at a time, from what is durable: the next one says that the last answer is safe."""
        if self.question.sent or not self._is_time_to_ask():
            return
        self.question.retry_ms = None
        if not self.is_ready_to_fetch():
            return
        if self._follower and self._follower.download:
            self.question.sent = self._ask_for_snapshot(self._follower, self._follower.download)
        elif self._follower:
            self.question.sent = self._ask_leader(self._follower)
        elif self.role is Role.UNATTACHED:
            self.question.sent = self._send(self._next_in_turn(), self._fetch_request(0))

    def _is_time_to_ask(self) -> bool:
        return self.question.retry_ms is None or self.question.retry_ms <= self.now_ms

    def is_ready_to_fetch(self) -> bool:
        """Not before the last answer is in the log and synced."""
        return not self.is_settling and self.log.durable_offset >= self.log.end_offset

    def _fetch_request(self, max_wait_ms: int) -> FetchRequest:
        return FetchRequest(
            epoch=self.epoch,
            replica=self.local,
            offset=self.log.end_offset,
            last_epoch=self.log.last_epoch,
            high_watermark=UNKNOWN_OFFSET if self.high_watermark is None else self.high_watermark,
            max_wait_ms=max_wait_ms,
        )

    def _ask_leader(self, follower: Follower) -> Send:
        """Where the leader seems dead, others may know its successor; if it lives, it says so at once."""
        if follower.is_suspect:
            return self._send(self._next_in_turn(), self._fetch_request(0))
        return self._send(follower.leader_id, self._fetch_request(self.timings.fetch_wait_ms))

    def _next_in_turn(self) -> int | None:
        """The other voters and the bootstrap servers, one after the other."""
        rotation = (*(key.id for key in self.other_voters), None)
        self.question.turn += 1
        return rotation[(self.question.turn - 1) % len(rotation)]

    def _ask_for_snapshot(self, follower: Follower, download: Download) -> Send:
        request = FetchSnapshotRequest(
            epoch=self.epoch, replica=self.local, id=download.id, position=download.position
        )
        return self._send(follower.leader_id, request)

    # The answer

    def _fetch_answered(self, sent: Send, reply: FetchReply | None, *, is_refused: bool) -> None:
        if not self._is_answer_awaited(sent, is_refused=is_refused, has_failed=reply is None):
            return
        assert self._follower
        assert reply
        if self.is_denial(self._follower, sent, reply):
            self._leader_denied()
        elif reply.epoch != self.epoch or reply.error is not ErrorCode.none:
            self._question_failed()
        else:
            self._heard_leader(self._follower)
            self._take_in(self._follower, reply)

    def _is_answer_awaited(self, sent: Send, *, is_refused: bool, has_failed: bool) -> bool:
        """Whether this answers the one question that is open, of a follower that still follows."""
        if sent is not self.question.sent:
            return False
        self.question.sent = None
        if self._follower is None or has_failed:
            self._question_failed()
        if is_refused and self._follower:
            self.suspect_leader(self._follower)
        return self._follower is not None and not has_failed

    def _question_failed(self) -> None:
        self.question.retry_ms = self.now_ms + self.timings.retry_ms

    def _heard_leader(self, follower: Follower) -> None:
        follower.steady_ms = self._steady_since(follower.steady_ms, follower.since_ms)
        follower.since_ms, follower.is_heard = self.now_ms, True
        follower.is_suspect, follower.doubts = False, 0
        self.elections_failed = 0
        self.deadline_ms = self._follower_deadline_ms()

    def _take_in(self, follower: Follower, reply: FetchReply) -> None:
        """Histories are made one before the high watermark is believed."""
        if reply.diverging:
            self._truncate(self.truncation_offset(reply.diverging))
        elif reply.snapshot:
            self._begin_download(follower, reply.snapshot)
        else:
            follower.leader_high_watermark = reply.high_watermark
            self.update_follower_high_watermark()
            if reply.records:
                self.is_settling = True
                self._do(AppendRecords(reply.records))

    def truncation_offset(self, diverging: OffsetAndEpoch) -> int:
        """The end of the largest common epoch: ours or the leader's, whichever comes first."""
        _, own_end = self.log.end_offset_for(diverging.epoch)
        return max(0, min(own_end, diverging.offset))

    def _truncate(self, offset: int) -> None:
        if offset < max(self.high_watermark or 0, self.log.start_offset):
            raise HistoryLost(
                f"the leader {self.leader_id} of epoch {self.epoch} parts from {self} at {offset}"
            )
        assert offset < self.log.end_offset, f"nothing to cut at {offset}: {self}"
        self.voters.truncate(offset)
        self.is_settling = True
        self._do(Truncate(offset))

    def _begin_download(self, follower: Follower, snapshot: OffsetAndEpoch) -> None:
        if snapshot.offset < (self.high_watermark or 0):
            raise HistoryLost(
                f"the leader {self.leader_id} of epoch {self.epoch} offers {snapshot} to {self}"
            )
        follower.download = Download(id=snapshot)

    def update_follower_high_watermark(self) -> None:
        if self._follower:
            offset = min(self._follower.leader_high_watermark, self.log.durable_offset)
            if offset > 0:
                self._raise_high_watermark(offset)

    # A leader that is gone

    def suspect_leader(self, follower: Follower) -> None:
        """Its host refused us: ask others soon, and let them ask us."""
        follower.is_suspect = True
        soon_ms = self._soon_ms(follower.doubts)
        if self.is_electable and (self.deadline_ms is None or soon_ms < self.deadline_ms):
            self.deadline_ms = soon_ms
            follower.doubts += 1

    def is_denial(self, follower: Follower, sent: Send, reply: FetchReply | FetchSnapshotReply) -> bool:
        """The leader itself, of this epoch, knows nothing of leading it: it has resigned, or restarted."""
        is_leader_asked = sent.to == follower.leader_id
        return is_leader_asked and reply.epoch == self.epoch and reply.leader_id != follower.leader_id

    def _leader_denied(self) -> None:
        """It says itself that it does not lead this epoch, so nobody ever will again."""
        self.ended_epoch = self.epoch
        self.become_unattached(self.epoch, deadline_ms=self._soon_ms())

    def _patience_ended(self) -> None:
        """The role's deadline has passed."""
        if self._campaign:
            self._campaign_ran_out(self._campaign)
        elif self.is_electable and self.role is not Role.RESIGNED:
            self.stand()
        elif self.role is Role.UNATTACHED:
            self.deadline_ms = self.now_ms + self._random_election_timeout_ms()
        else:
            self.become_unattached(self.epoch)

    # What a leader says unasked

    def _begin_epoch_received(self, request: BeginEpochRequest, token: Token) -> None:
        error = self._epoch_error(request)
        if not self.is_meant(request.voter):
            error = ErrorCode.invalid_voter_key
        elif error is ErrorCode.none and not self._may_lead(request.leader_id, is_known_to=request.voter):
            error = ErrorCode.inconsistent_voter_set
        if error is ErrorCode.none:
            self._accept_leader(request)
        self._answer_plainly(request, token, error)

    def _epoch_error(self, request: BeginEpochRequest | EndEpochRequest) -> ErrorCode:
        if request.epoch < self.epoch:
            return ErrorCode.fenced_leader_epoch
        if not self.may_be_true(request.epoch) or not self._can_follow(request.leader_id):
            return ErrorCode.invalid_request
        if request.epoch == self.epoch and self.leader_id not in (NOBODY, request.leader_id):
            return ErrorCode.invalid_request  # an epoch has one leader
        return ErrorCode.none

    def _may_lead(self, leader_id: int, *, is_known_to: ReplicaKey | None = None) -> bool:
        """A voter, or one that a record made a voter which our log has not reached; see `may_be_voter`."""
        if leader_id == self.leader_id or any(leader_id in each for each in self.voter_sets_in_question()):
            return True
        return is_known_to is not None and self.is_known_to(is_known_to)

    def _accept_leader(self, request: BeginEpochRequest) -> None:
        if self._follower and request.epoch == self.epoch:
            self._follower.leader_addresses = request.addresses
            self._heard_leader(self._follower)
        elif request.epoch > self.epoch or self._seeks_leader:
            self.become_follower(request.epoch, request.leader_id, request.addresses, is_heard=True)

    def _end_epoch_received(self, request: EndEpochRequest, token: Token) -> None:
        error = self._epoch_error(request)
        if error is ErrorCode.none and not self._may_lead(request.leader_id):
            error = ErrorCode.inconsistent_voter_set
        is_free = self.role in (Role.FOLLOWER, Role.UNATTACHED, Role.PROSPECTIVE)
        if error is ErrorCode.none and (is_free or request.epoch > self.epoch):
            self._succeed(request)
        self._answer_plainly(request, token, error)

    def _succeed(self, request: EndEpochRequest) -> None:
        """The first successor stands at once: the leader itself made way, so there is nobody to disturb."""
        self.ended_epoch = max(self.ended_epoch, request.epoch)
        rank = request.successors.index(self.local) if self.local in request.successors else None
        if rank is None or not self.is_electable:
            self.become_unattached(request.epoch)
            return
        self.become_unattached(request.epoch, deadline_ms=self._soon_ms() + rank * self.timings.retry_ms)
        if rank == 0:
            self.become_candidate()
