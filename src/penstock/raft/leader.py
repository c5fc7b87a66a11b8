"""The rules of a leader: it opens its epoch, commits records, serves fetches and changes the voter set.

It announces itself to the voters that do not fetch, and resigns when a majority of the voters is silent. A fetch is
answered with records, the point of divergence, a snapshot id, or after a wait. The voter set changes one voter at a
time: a change is in force from its append and is answered once it is committed.
"""

from collections.abc import Callable

from penstock.protocol.errors import ErrorCode
from penstock.raft.actions import AppendControlRecords, SendRecords, SendSnapshot, Token
from penstock.raft.state import DelayedQuorumFetch, LeaderState, ReplicaProgress, RoleRules, VoterChange
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


class QuorumLeaderRules(RoleRules):
    def become_leader(self, granted: set[int]) -> None:
        assert self.election.voted == self.local, "a leader has voted for itself"
        granting = tuple(key for key in self.voters.latest.keys if key.id in granted)
        self.elections_failed = 0
        self._leave_role(Role.LEADER)
        self.election = self.election._replace(leader_id=self.local.id)
        self._leader = LeaderState(since_ms=self.now_ms, epoch_start_offset=self.log.end_offset)
        for voter in self.other_voters:
            self._progress_of(voter)
            self._leader.announce_ms[voter.id] = self.now_ms
        self._add_action(AppendControlRecords(self._first_records(granting), self.log.end_offset))
        self._announce_due()

    def _first_records(self, granting: tuple[ReplicaKey, ...]) -> tuple[ControlRecord, ...]:
        """The record that opens an epoch; a voter set that was given from outside goes into the log with it."""
        opening = LeaderChange(leader_id=self.local.id, voters=self.voters.latest.keys, granting=granting)
        if self.voters.latest_offset > self.voters.BEFORE_LOG:
            return (opening,)
        voters = self.voters.latest
        self.voters.add(self.log.end_offset + 2, voters)
        return (opening, KRaftVersion(), Voters(voters=voters))

    def _progress_of(self, key: ReplicaKey) -> ReplicaProgress:
        """A voter whose disk is not known goes by its id."""
        assert self._leader
        voter = self.voters.latest.get(key.id)
        if voter and self.voters.latest.is_voter(key):
            key = voter.key
        return self._leader.progress.setdefault(key, ReplicaProgress(heard_ms=self.now_ms))

    # What is committed

    def update_leader_high_watermark(self) -> None:
        """Records of this epoch commit by count, and those before them with the first of them."""
        assert self._leader
        offset = self.majority_offset()
        if self.may_commit_up_to(offset):
            self._raise_high_watermark(offset)
            self._report_high_watermark()

    def may_commit_up_to(self, offset: int) -> bool:
        """An earlier epoch's records may yet be replaced, however many hold them, until one of ours follows."""
        assert self._leader
        return offset > self._leader.epoch_start_offset

    def majority_offset(self) -> int:
        """What a majority of the voters will not lose."""
        offsets = sorted((self.durable_offset_of(key) for key in self.counted_replicas()), reverse=True)
        return offsets[self.voters.latest.majority - 1]

    def counted_replicas(self) -> tuple[ReplicaKey, ...]:
        """Voters and nobody else; a leader that was voted out leads without counting itself."""
        return self.voters.latest.keys

    def durable_offset_of(self, key: ReplicaKey) -> int:
        if self.voters.latest.is_voter(self.local) and key.id == self.local.id:
            return self.log.durable_offset
        return self._progress_of(key).offset

    # Fetches that wait

    def _serve_delayed_fetches(self) -> None:
        """The log grew: who waits at its old end gets the rest."""
        for parked in self._take_delayed_fetches(lambda parked: parked.request.offset < self.log.end_offset):
            self._add_action(SendRecords(parked.token, self._fetch_reply(), parked.request.offset))

    def _report_high_watermark(self) -> None:
        """The high watermark rose: who does not know it yet is told."""
        for parked in self._take_delayed_fetches(
            lambda parked: parked.request.high_watermark < (self.high_watermark or 0)
        ):
            self._send_reply(parked.token, self._fetch_reply())

    def _expire_delayed_fetches(self) -> None:
        for parked in self._take_delayed_fetches(lambda parked: parked.deadline_ms <= self.now_ms):
            self._send_reply(parked.token, self._fetch_reply())

    def _take_delayed_fetches(
        self, is_over: Callable[[DelayedQuorumFetch], bool]
    ) -> list[DelayedQuorumFetch]:
        assert self._leader
        over = [key for key, parked in self._leader.parked.items() if is_over(parked)]
        return [self._leader.parked.pop(key) for key in over]

    # Who leads, told to those who do not fetch

    def _announce_due(self) -> None:
        assert self._leader
        for voter in self.other_voters:
            if self._leader.announce_ms.get(voter.id, self.now_ms) <= self.now_ms:
                self._announce_later(voter.id)
                request = BeginEpochRequest(
                    epoch=self.epoch, leader_id=self.local.id, voter=voter, addresses=self.addresses
                )
                self._send(voter.id, request)

    def _announce_later(self, voter_id: int) -> None:
        assert self._leader
        self._leader.announce_ms[voter_id] = self.now_ms + max(1, self.timings.fetch_timeout_ms // 2)

    # Whether anyone still listens

    def quorum_deadline_ms(self) -> int | None:
        """When a majority will have been silent for too long; None for one who needs nobody else."""
        others_needed = self.voters.latest.majority - self.voters.latest.is_voter(self.local)
        if others_needed <= 0:
            return None
        heard = sorted((self._progress_of(key).heard_ms for key in self.other_voters), reverse=True)
        return heard[others_needed - 1] + self.fetch_timeout_ms

    def has_lost_quorum(self) -> bool:
        deadline_ms = self.quorum_deadline_ms()
        return deadline_ms is not None and deadline_ms <= self.now_ms

    def resign_if_quorum_lost(self) -> None:
        if self.has_lost_quorum():
            self.become_resigned()

    def _tick_leader(self) -> None:
        self._expire_delayed_fetches()
        self._announce_due()
        self.resign_if_quorum_lost()

    def _leader_deadlines_ms(self) -> list[int]:
        assert self._leader
        deadlines = [parked.deadline_ms for parked in self._leader.parked.values()]
        deadlines += [self._leader.announce_ms.get(voter.id, self.now_ms) for voter in self.other_voters]
        quorum = self.quorum_deadline_ms()
        return deadlines if quorum is None else [*deadlines, quorum]


#: How long an observer that no longer fetches is remembered.
OBSERVER_SESSION_MS = 300_000


class FetchRules(QuorumLeaderRules):
    def _fetch_received(self, request: FetchRequest, token: Token) -> None:
        error = self.fetch_error(request)
        if error is not ErrorCode.none:
            self._send_leader_reply(request, token, error)
            return
        reply = self._divergence_reply(request)
        if reply is not None:
            self._record_contact(request.replica)
            self._send_reply(token, reply)
            return
        self._record_fetch(request)
        self.update_leader_high_watermark()
        self._serve_or_delay(request, token)

    def fetch_error(self, request: FetchRequest | FetchSnapshotRequest) -> ErrorCode:
        """Only the leader of that very epoch answers."""
        if request.epoch < self.epoch:
            return ErrorCode.fenced_leader_epoch
        if request.epoch > self.epoch:
            return ErrorCode.unknown_leader_epoch
        if self._leader is None:
            return ErrorCode.not_leader_or_follower
        if isinstance(request, FetchRequest) and (request.offset < 0 or request.replica.id == self.local.id):
            return ErrorCode.invalid_request
        return ErrorCode.none

    # Where histories part

    def _divergence_reply(self, request: FetchRequest) -> FetchReply | None:
        """None when the asker's log is a beginning of ours."""
        if self.needs_snapshot(request):
            if self.log.snapshot is None:
                return self._fetch_reply(ErrorCode.offset_out_of_range)
            return self._fetch_reply(snapshot=self.log.snapshot)
        diverging = self.divergence(request)
        if diverging is None:
            return None
        if diverging.offset < self.log.start_offset and self.log.snapshot:
            return self._fetch_reply(snapshot=self.log.snapshot)
        return self._fetch_reply(diverging=diverging)

    def needs_snapshot(self, request: FetchRequest) -> bool:
        """At the very start of our log, only a snapshot that ends there tells which epoch came before."""
        start = self.log.start_offset
        if request.offset < start:
            return True
        position = OffsetAndEpoch(request.offset, request.last_epoch)
        return request.offset == start > 0 and self.log.snapshot is not None and position != self.log.snapshot

    def divergence(self, request: FetchRequest) -> OffsetAndEpoch | None:
        if request.offset == self.log.start_offset:
            return None
        epoch, end_offset = self.log.end_offset_for(request.last_epoch)
        if epoch == -1:
            return OffsetAndEpoch(self.log.end_offset, self.log.last_epoch)
        if epoch == request.last_epoch and request.offset <= end_offset:
            return None
        return OffsetAndEpoch(end_offset, epoch)

    # What a fetch tells about the asker

    def _record_contact(self, replica: ReplicaKey) -> ReplicaProgress:
        assert self._leader
        progress = self._progress_of(replica)
        if self.voters.latest.is_voter(replica):
            self._leader.steady_ms = self._steady_since(self._leader.steady_ms, progress.heard_ms)
            self._announce_later(replica.id)
        progress.heard_ms = self.now_ms
        return progress

    def _record_fetch(self, request: FetchRequest) -> None:
        """Who has reached our end of the last fetch was caught up then; who is at our end is caught up now."""
        progress = self._record_contact(request.replica)
        progress.offset = request.offset
        if request.offset >= self.log.end_offset:
            progress.last_caught_up_ms = self.now_ms
        elif progress.end_at_last_fetch >= 0 and request.offset >= progress.end_at_last_fetch:
            progress.last_caught_up_ms = max(progress.last_caught_up_ms, progress.last_fetch_ms)
        progress.last_fetch_ms = self.now_ms
        progress.end_at_last_fetch = self.log.end_offset
        self._drop_expired_observers()

    def _drop_expired_observers(self) -> None:
        assert self._leader
        voters, oldest_ms = self.voters.latest, self.now_ms - OBSERVER_SESSION_MS
        progress = self._leader.progress
        for key in [
            key for key, of in progress.items() if of.heard_ms < oldest_ms and not voters.is_voter(key)
        ]:
            del progress[key]

    def _serve_or_delay(self, request: FetchRequest, token: Token) -> None:
        assert self._leader
        earlier = self._leader.parked.pop(request.replica, None)
        if earlier:
            self._send_reply(earlier.token, self._fetch_reply())
        if request.offset < self.log.end_offset:
            self._add_action(SendRecords(token, self._fetch_reply(), request.offset))
        elif self.has_newer_high_watermark(request) or request.max_wait_ms <= 0:
            self._send_reply(token, self._fetch_reply())
        else:
            wait_ms = min(request.max_wait_ms, self.timings.fetch_wait_ms)
            self._leader.parked[request.replica] = DelayedQuorumFetch(
                request=request, token=token, deadline_ms=self.now_ms + wait_ms
            )

    def has_newer_high_watermark(self, request: FetchRequest) -> bool:
        return self.high_watermark is not None and request.high_watermark < self.high_watermark

    def _snapshot_fetch_received(self, request: FetchSnapshotRequest, token: Token) -> None:
        error = self.fetch_error(request)
        if error is not ErrorCode.none:
            self._send_leader_reply(request, token, error)
            return
        self._record_contact(request.replica)
        reply = self._leader_reply(request)
        assert isinstance(reply, FetchSnapshotReply)
        self._add_action(SendSnapshot(token, request, reply))


class VoterChangeRules(FetchRules):
    def _add_voter(self, voter: Voter, token: Token) -> None:
        refusal = self.change_refusal() or self._duplicate_voter_refusal(voter)
        if refusal:
            self._send_reply(token, refusal)
            return
        assert self._leader
        self._leader.change = VoterChange(
            voters=self.voters.latest.with_voter(voter),
            token=token,
            newcomer=voter.key,
            catch_up_offset=self.log.end_offset,
            deadline_ms=self.now_ms + self.timings.fetch_timeout_ms,
        )

    def _duplicate_voter_refusal(self, voter: Voter) -> VoterChangeReply | None:
        if voter.key.id in self.voters.latest:
            message = f"{voter.key.id} is a voter; one with another disk is removed first"
            return VoterChangeReply(error=ErrorCode.duplicate_voter, message=message)
        return None

    def _remove_voter(self, key: ReplicaKey, token: Token) -> None:
        refusal = self.change_refusal() or self._unknown_voter_refusal(key)
        if not refusal and len(self.voters.latest) == 1:
            refusal = VoterChangeReply(
                error=ErrorCode.invalid_request, message="the last voter cannot be removed"
            )
        if refusal:
            self._send_reply(token, refusal)
            return
        self._append_change(VoterChange(voters=self.voters.latest.without(key.id), token=token))

    def _update_voter(self, voter: Voter, token: Token) -> None:
        refusal = self.change_refusal() or self._unknown_voter_refusal(voter.key)
        if not refusal and voter == self.voters.latest.get(voter.key.id):
            refusal = VoterChangeReply()
        if refusal:
            self._send_reply(token, refusal)
            return
        self._append_change(VoterChange(voters=self.voters.latest.with_voter(voter), token=token))

    def _unknown_voter_refusal(self, key: ReplicaKey) -> VoterChangeReply | None:
        if self.voters.latest.is_voter(key):
            return None
        return VoterChangeReply(error=ErrorCode.voter_not_found, message=f"{key.id} on that disk is no voter")

    # When a change may begin

    def change_refusal(self) -> VoterChangeReply | None:
        if self._leader is None:
            return VoterChangeReply(error=ErrorCode.not_leader_or_follower, message="not the leader")
        if not self.has_committed_in_epoch():
            return VoterChangeReply(
                error=ErrorCode.request_timed_out, message="the leader's epoch is not committed yet"
            )
        if self.has_pending_change():
            return VoterChangeReply(
                error=ErrorCode.request_timed_out, message="another voter change is under way"
            )
        return None

    def has_committed_in_epoch(self) -> bool:
        """Before that, a change of an earlier leader may still come back and overlap with ours."""
        assert self._leader
        return self.high_watermark is not None and self.high_watermark > self._leader.epoch_start_offset

    def has_pending_change(self) -> bool:
        assert self._leader
        return self._leader.change is not None or not self._is_committed(self.voters.latest_offset)

    # How it goes on

    def _advance_change(self) -> None:
        """After every event of a leader's."""
        change = self._leader.change if self._leader else None
        if change and change.offset is None:
            self._advance_catch_up(change)
        elif change and change.offset is not None and self._is_committed(change.offset):
            self._end_change(change, VoterChangeReply())
        if self._leader and self.is_removed():
            self.become_resigned()

    def is_removed(self) -> bool:
        """A leader leads on until its removal is committed: nobody else can see to that."""
        return not self.is_voter and self._is_committed(self.voters.latest_offset)

    def _advance_catch_up(self, change: VoterChange) -> None:
        if self.has_caught_up(change):
            self._append_change(change)
        elif change.deadline_ms is not None and change.deadline_ms <= self.now_ms:
            message = "the new voter has not caught up"
            self._end_change(change, VoterChangeReply(error=ErrorCode.request_timed_out, message=message))

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
        self._add_action(AppendControlRecords((Voters(voters=change.voters),), change.offset))
        for voter in self.other_voters:
            self._progress_of(voter)

    def _end_change(self, change: VoterChange, reply: VoterChangeReply) -> None:
        assert self._leader
        self._leader.change = None
        self._send_reply(change.token, reply)
