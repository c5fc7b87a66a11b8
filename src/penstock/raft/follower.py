"""The rules of a follower: fetch from the leader, truncate what the leader lacks, notice when the leader is gone.

A follower that lacks records which the leader's log no longer has fetches a snapshot piece by piece; the snapshot then
replaces its log.
"""

from penstock.protocol.errors import ErrorCode
from penstock.raft.actions import AppendRecords, InstallSnapshot, SendRequest, Token, Truncate, WriteSnapshot
from penstock.raft.election import VoteRules
from penstock.raft.state import CommittedRecordsLost, FollowerState, SnapshotDownload
from penstock.raft.types import (
    NO_LEADER,
    UNKNOWN_OFFSET,
    BeginEpochRequest,
    EndEpochRequest,
    FetchReply,
    FetchRequest,
    FetchSnapshotReply,
    FetchSnapshotRequest,
    OffsetAndEpoch,
    ReplicaKey,
    Role,
)


class QuorumFollowerRules(VoteRules):
    # Asking

    def _send_next_fetch(self) -> None:
        """One question at a time, from what is durable: the next one says that the last answer is safe."""
        if self.pending_fetch.sent or not self._is_fetch_due():
            return
        self.pending_fetch.retry_ms = None
        if not self.is_ready_to_fetch():
            return
        if self._follower and self._follower.download:
            self.pending_fetch.sent = self._fetch_snapshot(self._follower, self._follower.download)
        elif self._follower:
            self.pending_fetch.sent = self._fetch_from_leader(self._follower)
        elif self.role is Role.UNATTACHED:
            self.pending_fetch.sent = self._send(self._next_peer(), self._fetch_request(0))

    def _is_fetch_due(self) -> bool:
        return self.pending_fetch.retry_ms is None or self.pending_fetch.retry_ms <= self.now_ms

    def is_ready_to_fetch(self) -> bool:
        """Not before the last answer is in the log and synced."""
        return not self.is_append_pending and self.log.durable_offset >= self.log.end_offset

    def _fetch_request(self, max_wait_ms: int) -> FetchRequest:
        return FetchRequest(
            epoch=self.epoch,
            replica=self.local,
            offset=self.log.end_offset,
            last_epoch=self.log.last_epoch,
            high_watermark=UNKNOWN_OFFSET if self.high_watermark is None else self.high_watermark,
            max_wait_ms=max_wait_ms,
        )

    def _fetch_from_leader(self, follower: FollowerState) -> SendRequest:
        """Where the leader seems dead, others may know its successor; if it lives, it says so at once."""
        if follower.is_suspect:
            return self._send(self._next_peer(), self._fetch_request(0))
        return self._send(follower.leader_id, self._fetch_request(self.timings.fetch_wait_ms))

    def _next_peer(self) -> int | None:
        """The other voters and the bootstrap servers, one after the other."""
        rotation = (*(key.id for key in self.other_voters), None)
        self.pending_fetch.turn += 1
        return rotation[(self.pending_fetch.turn - 1) % len(rotation)]

    def _fetch_snapshot(self, follower: FollowerState, download: SnapshotDownload) -> SendRequest:
        request = FetchSnapshotRequest(
            epoch=self.epoch, replica=self.local, id=download.id, position=download.position
        )
        return self._send(follower.leader_id, request)

    # The answer

    def _fetch_answered(self, sent: SendRequest, reply: FetchReply | None, *, is_refused: bool) -> None:
        if not self._is_pending_reply(sent, is_refused=is_refused, has_failed=reply is None):
            return
        assert self._follower
        assert reply
        if self.is_denial(self._follower, sent, reply):
            self._leader_denied()
        elif reply.epoch != self.epoch or reply.error is not ErrorCode.none:
            self._retry_fetch_later()
        else:
            self._record_leader_contact(self._follower)
            self._apply_fetch_reply(self._follower, reply)

    def _is_pending_reply(self, sent: SendRequest, *, is_refused: bool, has_failed: bool) -> bool:
        """Whether this answers the one question that is open, of a follower that still follows."""
        if sent is not self.pending_fetch.sent:
            return False
        self.pending_fetch.sent = None
        if self._follower is None or has_failed:
            self._retry_fetch_later()
        if is_refused and self._follower:
            self.suspect_leader(self._follower)
        return self._follower is not None and not has_failed

    def _retry_fetch_later(self) -> None:
        self.pending_fetch.retry_ms = self.now_ms + self.timings.retry_ms

    def _record_leader_contact(self, follower: FollowerState) -> None:
        follower.steady_ms = self._steady_since(follower.steady_ms, follower.since_ms)
        follower.since_ms, follower.is_heard = self.now_ms, True
        follower.is_suspect, follower.doubts = False, 0
        self.elections_failed = 0
        self.deadline_ms = self._follower_deadline_ms()

    def _apply_fetch_reply(self, follower: FollowerState, reply: FetchReply) -> None:
        """Histories are made one before the high watermark is believed."""
        if reply.diverging:
            self._truncate(self.truncation_offset(reply.diverging))
        elif reply.snapshot:
            self._begin_download(follower, reply.snapshot)
        else:
            follower.leader_high_watermark = reply.high_watermark
            self.update_follower_high_watermark()
            if reply.records:
                self.is_append_pending = True
                self._add_action(AppendRecords(reply.records))

    def truncation_offset(self, diverging: OffsetAndEpoch) -> int:
        """The end of the largest common epoch: ours or the leader's, whichever comes first."""
        _, own_end = self.log.end_offset_for(diverging.epoch)
        return max(0, min(own_end, diverging.offset))

    def _truncate(self, offset: int) -> None:
        if offset < max(self.high_watermark or 0, self.log.start_offset):
            raise CommittedRecordsLost(
                f"the leader {self.leader_id} of epoch {self.epoch} parts from {self} at {offset}"
            )
        assert offset < self.log.end_offset, f"nothing to cut at {offset}: {self}"
        self.voters.truncate(offset)
        self.is_append_pending = True
        self._add_action(Truncate(offset))

    def _begin_download(self, follower: FollowerState, snapshot: OffsetAndEpoch) -> None:
        if snapshot.offset < (self.high_watermark or 0):
            raise CommittedRecordsLost(
                f"the leader {self.leader_id} of epoch {self.epoch} offers {snapshot} to {self}"
            )
        follower.download = SnapshotDownload(id=snapshot)

    def update_follower_high_watermark(self) -> None:
        if self._follower:
            offset = min(self._follower.leader_high_watermark, self.log.durable_offset)
            if offset > 0:
                self._raise_high_watermark(offset)

    # A leader that is gone

    def suspect_leader(self, follower: FollowerState) -> None:
        """Its host refused us: ask others soon, and let them ask us."""
        follower.is_suspect = True
        soon_ms = self._short_deadline_ms(follower.doubts)
        if self.is_electable and (self.deadline_ms is None or soon_ms < self.deadline_ms):
            self.deadline_ms = soon_ms
            follower.doubts += 1

    def is_denial(
        self, follower: FollowerState, sent: SendRequest, reply: FetchReply | FetchSnapshotReply
    ) -> bool:
        """The leader itself, of this epoch, knows nothing of leading it: it has resigned, or restarted."""
        is_leader_asked = sent.to == follower.leader_id
        return is_leader_asked and reply.epoch == self.epoch and reply.leader_id != follower.leader_id

    def _leader_denied(self) -> None:
        """It says itself that it does not lead this epoch, so nobody ever will again."""
        self.ended_epoch = self.epoch
        self.become_unattached(self.epoch, deadline_ms=self._short_deadline_ms())

    def _deadline_passed(self) -> None:
        """The role's deadline has passed."""
        if self._campaign:
            self._campaign_timed_out(self._campaign)
        elif self.is_electable and self.role is not Role.RESIGNED:
            self.start_campaign()
        elif self.role is Role.UNATTACHED:
            self.deadline_ms = self.now_ms + self._random_election_timeout_ms()
        else:
            self.become_unattached(self.epoch)

    # What a leader says unasked

    def _begin_epoch_received(self, request: BeginEpochRequest, token: Token) -> None:
        error = self._epoch_error(request)
        if not self.is_addressed_to_self(request.voter):
            error = ErrorCode.invalid_voter_key
        elif error is ErrorCode.none and not self._may_lead(request.leader_id, is_known_to=request.voter):
            error = ErrorCode.inconsistent_voter_set
        if error is ErrorCode.none:
            self._accept_leader(request)
        self._send_leader_reply(request, token, error)

    def _epoch_error(self, request: BeginEpochRequest | EndEpochRequest) -> ErrorCode:
        if request.epoch < self.epoch:
            return ErrorCode.fenced_leader_epoch
        if not self.is_plausible_epoch(request.epoch) or not self._can_follow(request.leader_id):
            return ErrorCode.invalid_request
        if request.epoch == self.epoch and self.leader_id not in (NO_LEADER, request.leader_id):
            return ErrorCode.invalid_request  # an epoch has one leader
        return ErrorCode.none

    def _may_lead(self, leader_id: int, *, is_known_to: ReplicaKey | None = None) -> bool:
        """A voter, or one that a record made a voter which our log has not reached; see `may_be_voter`."""
        if leader_id == self.leader_id or any(leader_id in each for each in self.possible_voter_sets()):
            return True
        return is_known_to is not None and self.is_known_to(is_known_to)

    def _accept_leader(self, request: BeginEpochRequest) -> None:
        if self._follower and request.epoch == self.epoch:
            self._follower.leader_addresses = request.addresses
            self._record_leader_contact(self._follower)
        elif request.epoch > self.epoch or self._seeks_leader:
            self.become_follower(request.epoch, request.leader_id, request.addresses, is_heard=True)

    def _end_epoch_received(self, request: EndEpochRequest, token: Token) -> None:
        error = self._epoch_error(request)
        if error is ErrorCode.none and not self._may_lead(request.leader_id):
            error = ErrorCode.inconsistent_voter_set
        is_free = self.role in (Role.FOLLOWER, Role.UNATTACHED, Role.PROSPECTIVE)
        if error is ErrorCode.none and (is_free or request.epoch > self.epoch):
            self._leader_resigned(request)
        self._send_leader_reply(request, token, error)

    def _leader_resigned(self, request: EndEpochRequest) -> None:
        """The first successor stands at once: the leader itself made way, so there is nobody to disturb."""
        self.ended_epoch = max(self.ended_epoch, request.epoch)
        rank = request.successors.index(self.local) if self.local in request.successors else None
        if rank is None or not self.is_electable:
            self.become_unattached(request.epoch)
            return
        self.become_unattached(
            request.epoch, deadline_ms=self._short_deadline_ms() + rank * self.timings.retry_ms
        )
        if rank == 0:
            self.become_candidate()


class SnapshotRules(QuorumFollowerRules):
    def _snapshot_answered(
        self, sent: SendRequest, reply: FetchSnapshotReply | None, *, is_refused: bool
    ) -> None:
        if not self._is_pending_reply(sent, is_refused=is_refused, has_failed=reply is None):
            return
        assert self._follower
        assert reply
        download = self._follower.download
        if self.is_denial(self._follower, sent, reply):
            self._leader_denied()
        elif reply.epoch != self.epoch or download is None:
            self._retry_fetch_later()
        elif reply.error is not ErrorCode.none or not self._is_next_piece(download, reply):
            # The leader has a newer snapshot by now, or lost this one: a fetch will tell.
            self._follower.download = None
            self._retry_fetch_later()
        else:
            self._record_leader_contact(self._follower)
            self._write_piece(download, reply)

    def _is_next_piece(self, download: SnapshotDownload, reply: FetchSnapshotReply) -> bool:
        if (reply.id, reply.position) != (download.id, download.position):
            return False
        return bool(reply.data) or reply.position == reply.size

    def _write_piece(self, download: SnapshotDownload, reply: FetchSnapshotReply) -> None:
        self._add_action(WriteSnapshot(download.id, download.position, reply.data))
        download.position += len(reply.data)
        if download.position >= reply.size:
            self.is_append_pending = True
            self._add_action(InstallSnapshot(download.id))

    def _snapshot_is_installed(self) -> None:
        """It holds committed records only, and the log begins at its end."""
        assert self.log.snapshot
        if self._follower:
            self._follower.download = None
        self.is_append_pending = False
        self.voters.truncate(self.log.snapshot.offset)
        self._raise_high_watermark(self.log.snapshot.offset)
