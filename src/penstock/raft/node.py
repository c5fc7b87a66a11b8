"""One member of the quorum, voter or observer: it takes events and returns actions.

`RaftNode` is the state with one method per event. The rules are functions of that state: `roles` (role changes),
`election`, `follower` and `leader`.
"""

from penstock.raft import election, follower, leader, roles
from penstock.raft.actions import Action, SendRequest, Token
from penstock.raft.state import RaftState, ReplicaProgress
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


class RaftNode(RaftState):
    """The driver carries out the actions of one call before it makes the next; see actions.py."""

    def start(self, now_ms: int) -> list[Action]:
        """A sole voter becomes leader at once."""
        self.begin_event(now_ms)
        self.reported_leader = (self.leader_id, self.epoch)
        if self.is_electable and not election.needs_pre_vote(self):
            election.start_campaign(self)
        else:
            # A pre-vote does no harm, so the first one may come sooner than the later ones.
            delay_ms = self.timings.retry_ms + self.draw(max(1, self.timings.election_timeout_ms // 2))
            roles.become_unattached(self, self.epoch, deadline_ms=self.now_ms + delay_ms)
            self._start_with_last_leader()
        return self._complete_event()

    def _start_with_last_leader(self) -> None:
        ids = [key.id for key in self.other_voters]
        if self._last_known_leader in ids:
            self.pending_fetch.next_peer = ids.index(self._last_known_leader)

    def tick(self, now_ms: int) -> list[Action]:
        """Time has passed. The driver calls this at `next_deadline_ms`."""
        self.begin_event(now_ms)
        if self.leader:
            leader.tick_leader(self)
        elif self.campaign:
            election.tick_campaign(self, self.campaign)
        if self.deadline_ms is not None and self.deadline_ms <= self.now_ms:
            follower.deadline_passed(self)
        return self._complete_event()

    def next_deadline_ms(self) -> int | None:
        deadlines = [self.deadline_ms, self.pending_fetch.retry_ms]
        if self.leader:
            deadlines += leader.leader_deadlines_ms(self)
            deadlines.append(self.leader.change.deadline_ms if self.leader.change else None)
        if self.campaign and not self.campaign.is_lost:
            deadlines += self.campaign.retries_ms.values()
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def received(self, request: Request, token: Token, now_ms: int) -> list[Action]:
        self.begin_event(now_ms)
        match request:
            case FetchRequest():
                leader.fetch_received(self, request, token)
            case FetchSnapshotRequest():
                leader.snapshot_fetch_received(self, request, token)
            case VoteRequest():
                election.vote_received(self, request, token)
            case BeginEpochRequest():
                follower.begin_epoch_received(self, request, token)
            case EndEpochRequest():
                follower.end_epoch_received(self, request, token)
        return self._complete_event()

    def answered(
        self, sent: SendRequest, reply: PeerReply | None, now_ms: int, *, refused: bool = False
    ) -> list[Action]:
        """`reply` is None if there was none; `refused` if the peer's host closed or refused the connection."""
        self.begin_event(now_ms)
        if reply is not None and not self.is_plausible_reply(reply):
            reply = None
        if reply is not None:
            roles.learn(self, reply)
        match sent.request:
            case FetchRequest():
                assert reply is None or isinstance(reply, FetchReply)
                follower.fetch_answered(self, sent, reply, is_refused=refused)
            case FetchSnapshotRequest():
                assert reply is None or isinstance(reply, FetchSnapshotReply)
                follower.snapshot_answered(self, sent, reply, is_refused=refused)
            case VoteRequest():
                assert reply is None or isinstance(reply, VoteReply)
                election.vote_answered(self, sent, reply, is_refused=refused)
        return self._complete_event()

    def appended(self, now_ms: int) -> list[Action]:
        """The end of the log has moved, or the append failed and the node fetches the records again."""
        self.begin_event(now_ms)
        self.is_append_pending = False
        if self.leader:
            leader.serve_delayed_fetches(self)
        return self._complete_event()

    def synced(self, now_ms: int) -> list[Action]:
        """The durable offset of the log has moved."""
        self.begin_event(now_ms)
        return self._complete_event()

    def voters_appended(self, offset: int, voters: VoterSet) -> None:
        """The appended records or the installed snapshot contain a Voters record."""
        self.voters.add(offset, voters)

    def add_voter(self, voter: Voter, token: Token, now_ms: int) -> list[Action]:
        self.begin_event(now_ms)
        leader.add_voter(self, voter, token)
        return self._complete_event()

    def remove_voter(self, key: ReplicaKey, token: Token, now_ms: int) -> list[Action]:
        self.begin_event(now_ms)
        leader.remove_voter(self, key, token)
        return self._complete_event()

    def update_voter(self, voter: Voter, token: Token, now_ms: int) -> list[Action]:
        self.begin_event(now_ms)
        leader.update_voter(self, voter, token)
        return self._complete_event()

    def resign(self, now_ms: int) -> list[Action]:
        """A leader that is about to stop hands over. Other nodes do nothing."""
        self.begin_event(now_ms)
        if self.leader:
            roles.become_resigned(self)
        return self._complete_event()

    def snapshot_taken(self, now_ms: int) -> list[Action]:
        """This node has written a newer snapshot."""
        self.begin_event(now_ms)
        return self._complete_event()

    def snapshot_installed(self, now_ms: int) -> list[Action]:
        self.begin_event(now_ms)
        follower.snapshot_installed(self)
        return self._complete_event()

    def describe(self, now_ms: int) -> QuorumDescription:
        """Only the leader knows the progress of other replicas."""
        observers: tuple[ReplicaDescription, ...] = ()
        if self.leader:
            others = [key for key in self.leader.progress if not self.voters.latest.is_voter(key)]
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
        if self.leader is None:
            return ReplicaDescription(key=key)
        if key.id == self.local.id and self.voters.latest.is_voter(self.local):
            return ReplicaDescription(
                key=key, offset=self.log.end_offset, last_fetch_ms=now_ms, last_caught_up_ms=now_ms
            )
        progress = self.leader.progress.get(key, ReplicaProgress(heard_ms=-1))
        return ReplicaDescription(
            key=key,
            offset=progress.offset,
            last_fetch_ms=progress.last_fetch_ms,
            last_caught_up_ms=progress.last_caught_up_ms,
        )

    def _complete_event(self) -> list[Action]:
        """Advance the high watermark and the voter change, and send the next fetch."""
        if self.leader:
            leader.update_leader_high_watermark(self)
            leader.advance_change(self)
        else:
            follower.update_follower_high_watermark(self)
        if self.role in (Role.FOLLOWER, Role.UNATTACHED):
            follower.send_next_fetch(self)
        return self.take_actions()
