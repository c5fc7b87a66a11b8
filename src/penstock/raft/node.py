"""One member of the quorum, voter or observer: it takes events and returns the actions to carry out."""

from penstock.raft.actions import Action, SendRequest, Token
from penstock.raft.follower import SnapshotRules
from penstock.raft.state import ReplicaProgress
from penstock.raft.types import (
    UNKNOWN_OFFSET,
    BeginEpochRequest,
    EndEpochRequest,
    FetchReply,
    FetchRequest,
    FetchSnapshotReply,
    FetchSnapshotRequest,
    PeerReply,
    QuorumDescription,
    ReplicaDescription,
    ReplicaKey,
    Request,
    Role,
    Voter,
    VoteReply,
    VoteRequest,
    VoterSet,
)


class RaftNode(SnapshotRules):
    """Every method that returns actions expects them to be carried out before the next call; see actions.py."""

    def start(self, now_ms: int) -> list[Action]:
        """Begin; a sole voter leads at once."""
        self._begin_event(now_ms)
        self._reported_leader = (self.leader_id, self.epoch)
        if self.is_electable and not self.needs_pre_vote():
            self.start_campaign()
        else:
            # A pre-vote disturbs nobody, so the first need not wait as long as the next.
            delay_ms = self.timings.retry_ms + self.draw(max(1, self.timings.election_timeout_ms // 2))
            self.become_unattached(self.epoch, deadline_ms=self.now_ms + delay_ms)
            self._start_with_last_leader()
        return self._complete_event()

    def _start_with_last_leader(self) -> None:
        ids = [key.id for key in self.other_voters]
        if self._last_known_leader in ids:
            self.pending_fetch.turn = ids.index(self._last_known_leader)

    def tick(self, now_ms: int) -> list[Action]:
        """Time has passed; due at `next_deadline_ms`."""
        self._begin_event(now_ms)
        if self._leader:
            self._tick_leader()
        elif self._campaign:
            self._tick_campaign(self._campaign)
        if self.deadline_ms is not None and self.deadline_ms <= self.now_ms:
            self._deadline_passed()
        return self._complete_event()

    def next_deadline_ms(self) -> int | None:
        deadlines = [self.deadline_ms, self.pending_fetch.retry_ms]
        if self._leader:
            deadlines += self._leader_deadlines_ms()
            deadlines.append(self._leader.change.deadline_ms if self._leader.change else None)
        if self._campaign and not self._campaign.is_lost:
            deadlines += self._campaign.retries_ms.values()
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def received(self, request: Request, token: Token, now_ms: int) -> list[Action]:
        self._begin_event(now_ms)
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
        return self._complete_event()

    def answered(
        self, sent: SendRequest, reply: PeerReply | None, now_ms: int, *, refused: bool = False
    ) -> list[Action]:
        """None: there was no answer; refused: the peer's host closed or refused the connection."""
        self._begin_event(now_ms)
        if reply is not None and not self.is_plausible_reply(reply):
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
        return self._complete_event()

    def appended(self, now_ms: int) -> list[Action]:
        """The log's end has moved; or could not, and the records will be asked for again."""
        self._begin_event(now_ms)
        self.is_append_pending = False
        if self._leader:
            self._serve_delayed_fetches()
        return self._complete_event()

    def synced(self, now_ms: int) -> list[Action]:
        """The log's durable offset has moved."""
        self._begin_event(now_ms)
        return self._complete_event()

    def voters_appended(self, offset: int, voters: VoterSet) -> None:
        """A Voters record was found in what was appended, or in the snapshot that was installed."""
        self.voters.add(offset, voters)

    def add_voter(self, voter: Voter, token: Token, now_ms: int) -> list[Action]:
        self._begin_event(now_ms)
        self._add_voter(voter, token)
        return self._complete_event()

    def remove_voter(self, key: ReplicaKey, token: Token, now_ms: int) -> list[Action]:
        self._begin_event(now_ms)
        self._remove_voter(key, token)
        return self._complete_event()

    def update_voter(self, voter: Voter, token: Token, now_ms: int) -> list[Action]:
        self._begin_event(now_ms)
        self._update_voter(voter, token)
        return self._complete_event()

    def resign(self, now_ms: int) -> list[Action]:
        """A leader that is about to stop hands over; anyone else has nothing to do."""
        self._begin_event(now_ms)
        if self._leader:
            self.become_resigned()
        return self._complete_event()

    def snapshot_taken(self, now_ms: int) -> list[Action]:
        """The log view has a newer snapshot of its own making."""
        self._begin_event(now_ms)
        return self._complete_event()

    def snapshot_installed(self, now_ms: int) -> list[Action]:
        self._begin_event(now_ms)
        self._snapshot_is_installed()
        return self._complete_event()

    def describe(self, now_ms: int) -> QuorumDescription:
        """Only a leader knows how far the others are."""
        observers: tuple[ReplicaDescription, ...] = ()
        if self._leader:
            others = [key for key in self._leader.progress if not self.voters.latest.is_voter(key)]
            observers = tuple(self._view(key, now_ms) for key in sorted(others, key=lambda key: key.id))
        return QuorumDescription(
            leader_id=self.leader_id,
            epoch=self.epoch,
            high_watermark=UNKNOWN_OFFSET if self.high_watermark is None else self.high_watermark,
            voters=tuple(self._view(key, now_ms) for key in self.voters.latest.keys),
            observers=observers,
            voter_set=self.voters.latest,
        )

    def _view(self, key: ReplicaKey, now_ms: int) -> ReplicaDescription:
        if self._leader is None:
            return ReplicaDescription(key=key)
        if key.id == self.local.id and self.voters.latest.is_voter(self.local):
            return ReplicaDescription(
                key=key, offset=self.log.end_offset, last_fetch_ms=now_ms, last_caught_up_ms=now_ms
            )
        progress = self._leader.progress.get(key, ReplicaProgress(heard_ms=-1))
        return ReplicaDescription(
            key=key,
            offset=progress.offset,
            last_fetch_ms=progress.last_fetch_ms,
            last_caught_up_ms=progress.last_caught_up_ms,
        )

    def _complete_event(self) -> list[Action]:
        """What may follow from any event: records committed, a voter change done, the next question."""
        if self._leader:
            self.update_leader_high_watermark()
            self._advance_change()
        else:
            self.update_follower_high_watermark()
        if self.role in (Role.FOLLOWER, Role.UNATTACHED):
            self._send_next_fetch()
        return self._take_actions()
