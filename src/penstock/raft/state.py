"""The state of one quorum member, the helpers that all rules share, and role changes.

`RaftState` holds the state and collects the actions of one event. The state of a role is dropped when the role ends.
These are plain classes because every start defines them, and a dataclass takes a hundred times as long to define. The
rules read the log through `LogView`; everything in it is in memory, so a read costs no I/O.
"""

from collections.abc import Callable
from typing import Final, Protocol

from penstock.protocol.errors import ErrorCode
from penstock.raft.actions import (
    Action,
    HighWatermarkAdvanced,
    LeaderChanged,
    SaveElection,
    SendReply,
    SendRequest,
    Token,
)
from penstock.raft.types import (
    EPOCH_IN_REPLY_MAX,
    EPOCH_JUMP_MAX,
    EPOCH_MAX,
    NO_LEADER,
    UNKNOWN_OFFSET,
    Address,
    BeginEpochReply,
    BeginEpochRequest,
    ElectionState,
    EndEpochReply,
    EndEpochRequest,
    FetchReply,
    FetchRequest,
    FetchSnapshotReply,
    OffsetAndEpoch,
    PeerReply,
    ReplicaKey,
    Reply,
    Request,
    Role,
    Timings,
    VoterChangeReply,
    VoteReply,
    VoteRequest,
    VoterHistory,
    VoterSet,
)


class LogView(Protocol):
    @property
    def start_offset(self) -> int: ...

    @property
    def end_offset(self) -> int: ...

    @property
    def durable_offset(self) -> int:
        """Everything below survives a power loss."""

    @property
    def last_epoch(self) -> int:
        """The epoch of the last record; of the snapshot when there is none after it; -1 when there is nothing."""

    @property
    def snapshot(self) -> OffsetAndEpoch | None:
        """The newest snapshot; the log may start at or before its end."""

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        """The largest epoch known up to the asked one, and where it ended; (-1, -1) when that is unknown."""


class _RoleState:
    __slots__: tuple[str, ...] = ()

    def __repr__(self) -> str:
        values = (f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({', '.join(values)})"


class SnapshotDownload(_RoleState):
    """A snapshot on its way here, and how much of it has come."""

    __slots__ = ("id", "position")

    def __init__(self, *, id: OffsetAndEpoch) -> None:
        self.id = id
        self.position = 0


class FollowerState(_RoleState):
    __slots__ = (
        "doubts",
        "download",
        "is_heard",
        "is_suspect",
        "leader_addresses",
        "leader_high_watermark",
        "leader_id",
        "since_ms",
        "steady_ms",
    )

    def __init__(
        self, *, leader_id: int, leader_addresses: tuple[Address, ...], since_ms: int, is_heard: bool
    ) -> None:
        self.leader_id = leader_id
        self.leader_addresses = leader_addresses
        #: Since when it has been heard without a break.
        self.steady_ms = since_ms
        #: When the leader itself was last heard, or this began: elections wait from here.
        self.since_ms = since_ms
        #: Whether the leader itself was heard: a third party's word does not speak against an election.
        self.is_heard = is_heard
        #: The leader's host refused us: it may be dead, so others may stand.
        self.is_suspect = False
        #: How often it did so since it was last heard: each time, others are asked later.
        self.doubts = 0
        self.leader_high_watermark = UNKNOWN_OFFSET
        self.download: SnapshotDownload | None = None


class Campaign(_RoleState):
    """A vote under way; the voters are those of its beginning."""

    __slots__ = ("fallback", "granted", "is_lost", "is_pre_vote", "refused", "retries_ms", "voters")

    def __init__(self, *, is_pre_vote: bool, voters: VoterSet, fallback: FollowerState | None = None) -> None:
        self.is_pre_vote = is_pre_vote
        self.voters = voters
        self.granted: set[int] = set()
        self.refused: set[int] = set()
        #: Requests that failed and when to send them again, by voter.
        self.retries_ms: dict[int, int] = {}
        self.is_lost = False
        #: Whom to follow again when a pre-vote shows that others still hear it.
        self.fallback = fallback

    @property
    def is_won(self) -> bool:
        return len(self.granted) >= self.voters.majority

    @property
    def is_hopeless(self) -> bool:
        return len(self.voters) - len(self.refused) < self.voters.majority


class ReplicaProgress(_RoleState):
    """How far one replica has come, as its fetches told."""

    __slots__ = ("end_at_last_fetch", "heard_ms", "last_caught_up_ms", "last_fetch_ms", "offset")

    def __init__(self, *, heard_ms: int) -> None:
        self.offset = UNKNOWN_OFFSET
        #: When it was last heard, or when its silence began to count.
        self.heard_ms = heard_ms
        self.last_fetch_ms = -1
        self.last_caught_up_ms = -1
        #: The leader's end at the last fetch: who has reached it by the next was caught up at the last.
        self.end_at_last_fetch = -1


class DelayedQuorumFetch(_RoleState):
    __slots__ = ("deadline_ms", "request", "token")

    def __init__(self, *, request: FetchRequest, token: Token, deadline_ms: int) -> None:
        self.request = request
        self.token = token
        self.deadline_ms = deadline_ms


class VoterChange(_RoleState):
    """The one change under way: first the newcomer catches up, then its record is committed."""

    __slots__ = ("catch_up_offset", "deadline_ms", "newcomer", "offset", "token", "voters")

    def __init__(
        self,
        *,
        voters: VoterSet,
        token: Token,
        newcomer: ReplicaKey | None = None,
        catch_up_offset: int = 0,
        deadline_ms: int | None = None,
    ) -> None:
        self.voters = voters
        self.token = token
        self.newcomer = newcomer
        self.catch_up_offset = catch_up_offset
        #: Until when the newcomer may take to catch up.
        self.deadline_ms = deadline_ms
        #: Where its record was appended.
        self.offset: int | None = None


class LeaderState(_RoleState):
    __slots__ = ("announce_ms", "change", "epoch_start_offset", "parked", "progress", "since_ms", "steady_ms")

    def __init__(self, *, since_ms: int, epoch_start_offset: int) -> None:
        self.since_ms = since_ms
        #: Since when no voter has fallen silent for long and come back.
        self.steady_ms = since_ms
        self.epoch_start_offset = epoch_start_offset
        self.progress: dict[ReplicaKey, ReplicaProgress] = {}
        self.parked: dict[ReplicaKey, DelayedQuorumFetch] = {}
        #: When to tell a voter again who leads, by its id.
        self.announce_ms: dict[int, int] = {}
        self.change: VoterChange | None = None


class PendingFetch(_RoleState):
    """The one fetch that is under way, and when to ask again after a failure."""

    __slots__ = ("retry_ms", "sent", "turn")

    def __init__(self, *, turn: int = 0) -> None:
        self.sent: SendRequest | None = None
        self.retry_ms: int | None = None
        #: Where in the rotation over voters and bootstrap servers a node without a leader asks next.
        self.turn = turn


#: Each election that nobody wins doubles the time until the next, up to this often: where answers take longer than a
#: campaign lasts, no campaign would ever end.
ELECTION_DOUBLINGS_MAX: Final = 3
#: So many epochs may follow each other before timeouts are taken for too short. Each one more doubles them: on machines
#: without a processor to spare, leaders would otherwise be deposed faster than they can do anything.
UNSTEADY_EPOCHS_ALLOWED: Final = 2
TIMEOUT_DOUBLINGS_MAX: Final = 2
#: A leader ends the row when it is heard for this many timeouts without a silence as long as one of them.
STEADY_TIMEOUTS: Final = 10


class CommittedRecordsLost(Exception):
    """The leader's history lacks what was committed here: this node must not go on with it."""


class RaftState:
    """State and plumbing. The rules are the classes built on it, one topic each, up to RaftNode."""

    def __init__(
        self,
        *,
        local: ReplicaKey,
        is_controller: bool,
        addresses: tuple[Address, ...],
        log: LogView,
        election: ElectionState,
        voters: VoterHistory,
        timings: Timings,
        draw: Callable[[int], int],
    ) -> None:
        """`draw(n)` gives a random number from 0 to n - 1."""
        self.local = local
        self.is_controller = is_controller
        self.addresses = addresses
        self.log = log
        # Who led before this run does not lead now because of it.
        self.election = ElectionState(max(election.epoch, log.last_epoch), NO_LEADER, election.voted)
        if self.election.epoch != election.epoch:
            self.election = ElectionState(self.election.epoch)
        self.voters = voters
        self.timings = timings
        self.draw = draw
        self.role = Role.UNATTACHED
        self.high_watermark: int | None = log.snapshot.offset if log.snapshot else None
        self.now_ms = 0
        self.deadline_ms: int | None = None
        self.pending_fetch = PendingFetch()
        #: Campaigns that ran out of time since a leader was last heard.
        self.elections_failed = 0
        #: Epochs that have begun since there was a steady leader.
        self.unsteady_epochs = 0
        #: The last epoch of which its leader itself said that it is over.
        self.ended_epoch = -1
        #: A change of the log was handed out, and the log view has not moved yet.
        self.is_append_pending = False
        self._follower: FollowerState | None = None
        self._campaign: Campaign | None = None
        self._leader: LeaderState | None = None
        self._actions: list[Action] = []
        #: Requests that a leader had not answered when it ceased to be one.
        self._abandoned: list[tuple[Request, Token]] = []
        self._saved = election
        self._reported_leader = (NO_LEADER, -1)
        self._last_known_leader = election.leader_id

    def __repr__(self) -> str:
        leader = f" of {self.leader_id}" if self._follower else ""
        return (
            f"<RaftNode {self.local.id} {self.role.value}{leader} epoch={self.epoch} "
            f"log={self.log.start_offset}..{self.log.end_offset} high_watermark={self.high_watermark} "
            f"{self.voters.latest}>"
        )

    # What others may ask

    @property
    def epoch(self) -> int:
        return self.election.epoch

    @property
    def leader_id(self) -> int:
        if self._leader:
            return self.local.id
        return self._follower.leader_id if self._follower else NO_LEADER

    @property
    def leader_addresses(self) -> tuple[Address, ...]:
        if self._leader:
            return self.addresses
        return self._follower.leader_addresses if self._follower else ()

    @property
    def epoch_start_offset(self) -> int:
        assert self._leader, "only a leader's epoch has a known start"
        return self._leader.epoch_start_offset

    @property
    def is_voter(self) -> bool:
        return self.voters.latest.is_voter(self.local)

    @property
    def is_electable(self) -> bool:
        if self.epoch >= EPOCH_MAX and self.voters.latest.keys != (self.local,):
            return False
        return self.is_controller and (self.is_voter or self.may_still_be_voter())

    def is_plausible_epoch(self, epoch: int) -> bool:
        """Whether an epoch that another node brings up unasked is one that a voter could have."""
        return 0 <= epoch < EPOCH_MAX and epoch <= self.epoch + EPOCH_JUMP_MAX

    def is_plausible_reply(self, reply: PeerReply) -> bool:
        """Whether the answer of a peer that was asked names an epoch that elections could have reached."""
        return reply.epoch <= max(EPOCH_IN_REPLY_MAX, self.epoch + EPOCH_JUMP_MAX) and reply.epoch < EPOCH_MAX

    def may_still_be_voter(self) -> bool:
        """Voted out, but the others may lack that record, and then cannot elect anyone against our longer log."""
        return any(voters.is_voter(self.local) for voters in self.possible_voter_sets()[1:])

    def possible_voter_sets(self) -> tuple[VoterSet, ...]:
        """The latest voter set, and the one before it for as long as the latest may still be lost."""
        latest, offset = self.voters.latest, self.voters.latest_offset
        return (latest,) if self._is_committed(offset) else (latest, self.voters.as_of(offset))

    def _is_committed(self, offset: int) -> bool:
        return self.high_watermark is not None and offset < self.high_watermark

    @property
    def other_voters(self) -> tuple[ReplicaKey, ...]:
        return tuple(key for key in self.voters.latest.keys if key.id != self.local.id)

    @property
    def last(self) -> OffsetAndEpoch:
        return OffsetAndEpoch(self.log.end_offset, self.log.last_epoch)

    # The pad

    def _begin_event(self, now_ms: int) -> None:
        self.now_ms = max(now_ms, self.now_ms)
        assert not self._actions

    def _take_actions(self) -> list[Action]:
        """All work of one event; who leads now is told last, when the rest of it has been done."""
        self._save_election_first()
        for request, token in self._abandoned:
            self._send_leader_reply(request, token, ErrorCode.not_leader_or_follower)
        self._abandoned.clear()
        leader_and_epoch = (self.leader_id, self.epoch)
        if leader_and_epoch != self._reported_leader:
            self._reported_leader = leader_and_epoch
            self._actions.append(LeaderChanged(*leader_and_epoch))
        actions, self._actions = self._actions, []
        return actions

    def _add_action(self, action: Action) -> None:
        self._save_election_first()
        self._actions.append(action)

    def _save_election_first(self) -> None:
        """Nothing leaves before the epoch and the vote that it rests on are durable."""
        if (self.election.epoch, self.election.voted) != (self._saved.epoch, self._saved.voted):
            self._saved = self.election
            self._actions.append(SaveElection(self.election))

    def _send(self, to: int | None, request: Request) -> SendRequest:
        send = SendRequest(to, request)
        self._add_action(send)
        return send

    def _send_reply(self, token: Token, reply: Reply) -> None:
        self._add_action(SendReply(token, reply))

    def _send_leader_reply(self, request: Request, token: Token, error: ErrorCode) -> None:
        self._send_reply(token, self._leader_reply(request, error))

    def _leader_reply(self, request: Request, error: ErrorCode = ErrorCode.none) -> PeerReply:
        """A reply that says who leads, and nothing else."""
        leader_id, addresses, epoch = self.leader_id, self.leader_addresses, self.epoch
        if isinstance(request, VoteRequest):
            return VoteReply(error=error, epoch=epoch, leader_id=leader_id, leader_addresses=addresses)
        if isinstance(request, BeginEpochRequest):
            return BeginEpochReply(error=error, epoch=epoch, leader_id=leader_id, leader_addresses=addresses)
        if isinstance(request, EndEpochRequest):
            return EndEpochReply(error=error, epoch=epoch, leader_id=leader_id, leader_addresses=addresses)
        if isinstance(request, FetchRequest):
            return self._fetch_reply(error)
        return FetchSnapshotReply(
            error=error,
            epoch=epoch,
            leader_id=leader_id,
            leader_addresses=addresses,
            id=request.id,
            position=request.position,
        )

    def _fetch_reply(
        self,
        error: ErrorCode = ErrorCode.none,
        *,
        diverging: OffsetAndEpoch | None = None,
        snapshot: OffsetAndEpoch | None = None,
    ) -> FetchReply:
        return FetchReply(
            error=error,
            epoch=self.epoch,
            leader_id=self.leader_id,
            leader_addresses=self.leader_addresses,
            high_watermark=UNKNOWN_OFFSET if self.high_watermark is None else self.high_watermark,
            log_start=self.log.start_offset,
            diverging=diverging,
            snapshot=snapshot,
        )

    # Times

    def _random_election_timeout_ms(self) -> int:
        doublings = min(max(self.elections_failed, self._timeout_doublings), ELECTION_DOUBLINGS_MAX)
        timeout_ms = self.timings.election_timeout_ms << doublings
        return timeout_ms + self.draw(timeout_ms)

    @property
    def fetch_timeout_ms(self) -> int:
        """How long a leader, or a leader's majority, may be silent."""
        return self.timings.fetch_timeout_ms << self._timeout_doublings

    @property
    def _timeout_doublings(self) -> int:
        return min(max(self.unsteady_epochs - UNSTEADY_EPOCHS_ALLOWED, 0), TIMEOUT_DOUBLINGS_MAX)

    def _steady_since(self, since_ms: int, heard_ms: int) -> int:
        """Since when there has been no silence, now that a peer is heard which was last heard at `heard_ms`."""
        timeout_ms = self.timings.fetch_timeout_ms
        if self.now_ms - heard_ms >= timeout_ms:
            return self.now_ms
        if self.now_ms - since_ms >= STEADY_TIMEOUTS * timeout_ms:
            self.unsteady_epochs = 0
        return since_ms

    def _follower_deadline_ms(self) -> int:
        """Followers that lost their leader at the same moment do not all stand at the same moment."""
        timeout_ms = self.fetch_timeout_ms
        return self.now_ms + timeout_ms + self.draw(max(1, timeout_ms // 10))

    def _short_deadline_ms(self, doubts: int = 0) -> int:
        """Little enough to matter to nobody, random enough that two do not stand at once."""
        delay_ms = 1 + self.draw(max(1, self.timings.election_timeout_ms // 10))
        return self.now_ms + delay_ms + doubts * (self.timings.retry_ms << min(doubts, 4))

    # The high watermark, which only ever rises

    def _raise_high_watermark(self, offset: int) -> None:
        if self.high_watermark is None or offset > self.high_watermark:
            self.high_watermark = offset
            self._add_action(HighWatermarkAdvanced(offset))


class RoleRules(RaftState):
    def become_unattached(self, epoch: int, *, deadline_ms: int | None = None) -> None:
        """Nobody is known to lead. A voter stands when its patience ends; everyone asks around meanwhile."""
        self._enter_epoch(epoch)
        self._leave_role(Role.UNATTACHED)
        self.deadline_ms = deadline_ms or self.now_ms + self._random_election_timeout_ms()

    def become_follower(
        self, epoch: int, leader_id: int, addresses: tuple[Address, ...], *, is_heard: bool
    ) -> None:
        assert leader_id not in (NO_LEADER, self.local.id), leader_id
        self._enter_epoch(epoch)
        self.election = self.election._replace(leader_id=leader_id)
        self._leave_role(Role.FOLLOWER)
        self._follower = FollowerState(
            leader_id=leader_id, leader_addresses=addresses, since_ms=self.now_ms, is_heard=is_heard
        )
        self.deadline_ms = self._follower_deadline_ms()

    def become_resigned(self) -> None:
        """Out of office for the rest of this epoch; those furthest ahead are asked to take over."""
        assert self._leader
        successors = self.successors(self._leader)
        self.ended_epoch = self.epoch
        self._leave_role(Role.RESIGNED)
        for voter in self.other_voters:
            request = EndEpochRequest(epoch=self.epoch, leader_id=self.local.id, successors=successors)
            self._send(voter.id, request)
        self.deadline_ms = self.now_ms + self._random_election_timeout_ms()

    def successors(self, leader: LeaderState) -> tuple[ReplicaKey, ...]:
        def behind(key: ReplicaKey) -> int:
            progress = leader.progress.get(key)
            return -progress.offset if progress else 1

        return tuple(sorted(self.other_voters, key=behind))

    def _enter_epoch(self, epoch: int) -> None:
        assert epoch >= self.epoch, f"epochs never go back: {epoch} after {self.epoch}"
        if epoch > self.epoch:
            self.unsteady_epochs += 1
            self.election = ElectionState(epoch)

    def _leave_role(self, role: Role) -> None:
        leader, self._leader = self._leader, None
        self.role, self._follower, self._campaign, self.deadline_ms = role, None, None, None
        self.pending_fetch = PendingFetch(turn=self.pending_fetch.turn)
        if leader:
            self._leave_leadership(leader)

    def _leave_leadership(self, leader: LeaderState) -> None:
        """Whoever waits for this leader is told that it is none; what they asked for may still come true."""
        self._abandoned += [(parked.request, parked.token) for parked in leader.parked.values()]
        if leader.change:
            reply = VoterChangeReply(error=ErrorCode.not_leader_or_follower, message="leadership was lost")
            self._send_reply(leader.change.token, reply)

    def _campaign_accepts_leader(self, reply: VoteReply) -> bool:
        """Who stands because it lost its leader, and who would let it, need not be told of that leader."""
        left = self._campaign.fallback if self._campaign else None
        return not reply.granted and (left is None or left.leader_id != reply.leader_id)

    # What every message may teach: a newer epoch, or its leader

    def _learn(self, reply: PeerReply) -> None:
        if reply.epoch > self.epoch:
            self._learn_epoch(reply)
        elif not isinstance(reply, VoteReply) or self._campaign_accepts_leader(reply):
            self._learn_leader(reply)

    def _learn_leader(self, reply: PeerReply) -> None:
        """The word of a third party."""
        if reply.epoch == self.epoch and self._seeks_leader and self._can_follow(reply.leader_id):
            self.become_follower(reply.epoch, reply.leader_id, reply.leader_addresses, is_heard=False)

    def _learn_epoch(self, reply: PeerReply) -> None:
        if self._can_follow(reply.leader_id):
            self.become_follower(reply.epoch, reply.leader_id, reply.leader_addresses, is_heard=False)
        else:
            self.become_unattached(reply.epoch)

    def _can_follow(self, leader_id: int) -> bool:
        """An earlier life of this node, with another disk, may have led: nobody follows itself."""
        return leader_id > NO_LEADER and leader_id != self.local.id

    @property
    def _seeks_leader(self) -> bool:
        """Not one of an epoch that is over, though some may not have heard of that yet."""
        is_free = self.role in (Role.UNATTACHED, Role.PROSPECTIVE, Role.CANDIDATE)
        return is_free and self.epoch != self.ended_epoch
