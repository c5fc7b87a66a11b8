"""One member of the quorum, voter or observer: takes events, hands back the work to do."""

from penstock.raft.actions import Action, Send, Token
from penstock.raft.messages import (
    BeginEpochRequest,
    EndEpochRequest,
    FetchReply,
    FetchRequest,
    FetchSnapshotReply,
    FetchSnapshotRequest,
    PeerReply,
    Request,
    VoteReply,
    VoteRequest,
)
from penstock.raft.snapshots import CatchingUp
from penstock.raft.states import Progress
from penstock.raft.values import (
    UNKNOWN_OFFSET,
    QuorumView,
    ReplicaKey,
    ReplicaView,
    Role,
    Voter,
    VoterSet,
)


class RaftNode(CatchingUp):
    """Every method that returns actions expects them to be carried out before the next call; see actions.py."""

    def start(self, now_ms: int) -> list[Action]:
        """Begin; a sole voter leads at once."""
        self._begin(now_ms)
        self._told = (self.leader_id, self.epoch)
        if self.is_electable and not self.needs_pre_vote():
            self.stand()
        else:
            # A pre-vote disturbs nobody, so the first need not wait as long as the next.
            patience_ms = self.timings.retry_ms + self.draw(max(1, self.timings.election_timeout_ms // 2))
            self.become_unattached(self.epoch, deadline_ms=self.now_ms + patience_ms)
            self._ask_last_leader_first()
        return self._settle()

    def _ask_last_leader_first(self) -> None:
        ids = [key.id for key in self.other_voters]
        if self._last_known_leader in ids:
            self.question.turn = ids.index(self._last_known_leader)

    def tick(self, now_ms: int) -> list[Action]:
        """Time has passed; due at `next_deadline_ms`."""
        self._begin(now_ms)
        if self._leader:
            self._tick_leader()
        elif self._campaign:
            self._tick_campaign(self._campaign)
        if self.deadline_ms is not None and self.deadline_ms <= self.now_ms:
            self._patience_ended()
        return self._settle()

    def next_deadline_ms(self) -> int | None:
        deadlines = [self.deadline_ms, self.question.retry_ms]
        if self._leader:
            deadlines += self._leader_deadlines_ms()
            deadlines.append(self._leader.change.deadline_ms if self._leader.change else None)
        if self._campaign and not self._campaign.is_lost:
            deadlines += self._campaign.retries_ms.values()
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def received(self, request: Request, token: Token, now_ms: int) -> list[Action]:
        self._begin(now_ms)
        match request:
            case FetchRequest():
                self._fetch_received(request, token)
            case FetchSnapshotRequest():
                self._snapshot_fetch_received(request, token)
            case VoteRequest():
                self._vote_received(request, token)
            case BeginEpochRequest():
                self._begin_epoch_received(request, token)
            case EndEpochRequest():
                self._end_epoch_received(request, token)
        return self._settle()

    def answered(
        self, sent: Send, reply: PeerReply | None, now_ms: int, *, refused: bool = False
    ) -> list[Action]:
        """None: there was no answer; refused: the peer's host closed or refused the connection."""
        self._begin(now_ms)
        if reply is not None and not self.may_believe(reply):
            reply = None
        if reply is not None:
            self._learn(reply)
        match sent.request:
            case FetchRequest():
                assert reply is None or isinstance(reply, FetchReply)
                self._fetch_answered(sent, reply, is_refused=refused)
            case FetchSnapshotRequest():
                assert reply is None or isinstance(reply, FetchSnapshotReply)
                self._snapshot_answered(sent, reply, is_refused=refused)
            case VoteRequest():
                assert reply is None or isinstance(reply, VoteReply)
                self._vote_answered(sent, reply, is_refused=refused)
        return self._settle()

    def appended(self, now_ms: int) -> list[Action]:
        """The log's end has moved; or could not, and the records will be asked for again."""
        self._begin(now_ms)
        self.is_settling = False
        if self._leader:
            self._serve_grown_log()
        return self._settle()

    def synced(self, now_ms: int) -> list[Action]:
        """The log's durable offset has moved."""
        self._begin(now_ms)
        return self._settle()

    def voters_appended(self, offset: int, voters: VoterSet) -> None:
        """A Voters record was found in what was appended, or in the snapshot that was installed."""
        self.voters.add(offset, voters)

    def add_voter(self, voter: Voter, token: Token, now_ms: int) -> list[Action]:
        self._begin(now_ms)
        self._add_voter(voter, token)
        return self._settle()

    def remove_voter(self, key: ReplicaKey, token: Token, now_ms: int) -> list[Action]:
        self._begin(now_ms)
        self._remove_voter(key, token)
        return self._settle()

    def update_voter(self, voter: Voter, token: Token, now_ms: int) -> list[Action]:
        self._begin(now_ms)
        self._update_voter(voter, token)
        return self._settle()

    def resign(self, now_ms: int) -> list[Action]:
        """A leader that is about to stop hands over; anyone else has nothing to do."""
        self._begin(now_ms)
        if self._leader:
            self.become_resigned()
        return self._settle()

    def snapshot_taken(self, now_ms: int) -> list[Action]:
        """The log view has a newer snapshot of its own making."""
        self._begin(now_ms)
        return self._settle()

    def snapshot_installed(self, now_ms: int) -> list[Action]:
        self._begin(now_ms)
        self._snapshot_is_installed()
        return self._settle()

    def describe(self, now_ms: int) -> QuorumView:
        """Only a leader knows how far the others are."""
        observers: tuple[ReplicaView, ...] = ()
        if self._leader:
            others = [key for key in self._leader.progress if not self.voters.latest.is_voter(key)]
            observers = tuple(self._view(key, now_ms) for key in sorted(others, key=lambda key: key.id))
        return QuorumView(
            leader_id=self.leader_id,
            epoch=self.epoch,
            high_watermark=UNKNOWN_OFFSET if self.high_watermark is None else self.high_watermark,
            voters=tuple(self._view(key, now_ms) for key in self.voters.latest.keys),
            observers=observers,
            voter_set=self.voters.latest,
        )

    def _view(self, key: ReplicaKey, now_ms: int) -> ReplicaView:
        if self._leader is None:
            return ReplicaView(key=key)
        if key.id == self.local.id and self.voters.latest.is_voter(self.local):
            return ReplicaView(
                key=key, offset=self.log.end_offset, last_fetch_ms=now_ms, last_caught_up_ms=now_ms
            )
        progress = self._leader.progress.get(key, Progress(heard_ms=-1))
        return ReplicaView(
            key=key,
            offset=progress.offset,
            last_fetch_ms=progress.last_fetch_ms,
            last_caught_up_ms=progress.last_caught_up_ms,
        )

    def _settle(self) -> list[Action]:
        """What may follow from any event: records committed, a voter change done, the next question."""
        if self._leader:
            self.update_leader_high_watermark()
            self._advance_change()
        else:
            self.update_follower_high_watermark()
        if self.role in (Role.FOLLOWER, Role.UNATTACHED):
            self._ask()
        return self._finish()
