"""A leader's answers to those who fetch: records, a parting of histories, a snapshot, or a wait."""

from penstock.protocol.errors import ErrorCode
from penstock.raft.actions import Serve, ServeSnapshot, Token
from penstock.raft.leader import Leading
from penstock.raft.messages import FetchReply, FetchRequest, FetchSnapshotReply, FetchSnapshotRequest
from penstock.raft.states import ParkedFetch, Progress
from penstock.raft.values import OffsetAndEpoch, ReplicaKey

#: How long an observer that no longer fetches is remembered.
OBSERVER_SESSION_MS = 300_000


class Serving(Leading):
    def _fetch_received(self, request: FetchRequest, token: Token) -> None:
        error = self.fetch_error(request)
        if error is not ErrorCode.none:
            self._answer_plainly(request, token, error)
            return
        reply = self._parting(request)
        if reply is not None:
            self._hear(request.replica)
            self._answer(token, reply)
            return
        self._note_fetch(request)
        self.update_leader_high_watermark()
        self._serve_or_park(request, token)

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

    def _parting(self, request: FetchRequest) -> FetchReply | None:
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

    def _hear(self, replica: ReplicaKey) -> Progress:
        assert self._leader
        progress = self._progress_of(replica)
        if self.voters.latest.is_voter(replica):
            self._leader.steady_ms = self._steady_since(self._leader.steady_ms, progress.heard_ms)
            self._announce_later(replica.id)
        progress.heard_ms = self.now_ms
        return progress

    def _note_fetch(self, request: FetchRequest) -> None:
        """Who has reached our end of the last fetch was caught up then; who is at our end is caught up now."""
        progress = self._hear(request.replica)
        progress.offset = request.offset
        if request.offset >= self.log.end_offset:
            progress.last_caught_up_ms = self.now_ms
        elif progress.end_at_last_fetch >= 0 and request.offset >= progress.end_at_last_fetch:
            progress.last_caught_up_ms = max(progress.last_caught_up_ms, progress.last_fetch_ms)
        progress.last_fetch_ms = self.now_ms
        progress.end_at_last_fetch = self.log.end_offset
        self._forget_old_observers()

    def _forget_old_observers(self) -> None:
        assert self._leader
        voters, oldest_ms = self.voters.latest, self.now_ms - OBSERVER_SESSION_MS
        progress = self._leader.progress
        for key in [
            key for key, of in progress.items() if of.heard_ms < oldest_ms and not voters.is_voter(key)
        ]:
            del progress[key]

    def _serve_or_park(self, request: FetchRequest, token: Token) -> None:
        assert self._leader
        earlier = self._leader.parked.pop(request.replica, None)
        if earlier:
            self._answer(earlier.token, self._fetch_reply())
        if request.offset < self.log.end_offset:
            self._do(Serve(token, self._fetch_reply(), request.offset))
        elif self.has_news(request) or request.max_wait_ms <= 0:
            self._answer(token, self._fetch_reply())
        else:
            wait_ms = min(request.max_wait_ms, self.timings.fetch_wait_ms)
            self._leader.parked[request.replica] = ParkedFetch(
                request=request, token=token, deadline_ms=self.now_ms + wait_ms
            )

    def has_news(self, request: FetchRequest) -> bool:
        return self.high_watermark is not None and request.high_watermark < self.high_watermark

    def _snapshot_fetch_received(self, request: FetchSnapshotRequest, token: Token) -> None:
        error = self.fetch_error(request)
        if error is not ErrorCode.none:
            self._answer_plainly(request, token, error)
            return
        self._hear(request.replica)
        reply = self._reply_to(request)
        assert isinstance(reply, FetchSnapshotReply)
        self._do(ServeSnapshot(token, request, reply))
