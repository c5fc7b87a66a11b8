"""The state of one quorum member.

`RaftState` holds the state and collects the actions of one event. It drops the state of a role when the role ends.
These are plain classes because every start defines them, and a dataclass takes a hundred times as long to define. The
rules read the log through `LogView`, which is in memory, so a read costs no I/O.
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
        """The epoch of the last record, or of the snapshot if no record follows it, or -1 in an empty log."""

    @property
    def snapshot(self) -> OffsetAndEpoch | None:
        """The newest snapshot. The log starts at its end or before it."""

    def end_offset_for(self, epoch: int) -> tuple[int, int]:
        """The largest known epoch up to `epoch` and its end offset; (-1, -1) if there is none."""


class _RoleState:
    __slots__: tuple[str, ...] = ()

    def __repr__(self) -> str:
        values = (f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({', '.join(values)})"


class SnapshotDownload(_RoleState):
    """A snapshot that this node fetches, and the position of the next piece."""

    __slots__ = ("id", "position")

    def __init__(self, *, id: OffsetAndEpoch) -> None:
        self.id = id
        self.position = 0


class FollowerState(_RoleState):
    __slots__ = (
        "download",
        "is_heard",
        "is_suspect",
        "leader_addresses",
        "leader_high_watermark",
        "leader_id",
        "refusals",
        "since_ms",
        "steady_ms",
    )

    def __init__(
        self, *, leader_id: int, leader_addresses: tuple[Address, ...], since_ms: int, is_heard: bool
    ) -> None:
        self.leader_id = leader_id
        self.leader_addresses = leader_addresses
        #: Since when the leader has been heard without a break.
        self.steady_ms = since_ms
        #: When the leader itself was last heard, or when the node became its follower. The timeout starts here.
        self.since_ms = since_ms
        #: Whether the leader itself was heard. A leader known only from other peers does not prevent an election.
        self.is_heard = is_heard
        #: The leader's host refused a connection: it may be dead, so this node grants pre-votes.
        self.is_suspect = False
        #: How often it refused since it was last heard. Each refusal makes the next campaign wait longer.
        self.refusals = 0
        self.leader_high_watermark = UNKNOWN_OFFSET
        self.download: SnapshotDownload | None = None


class Campaign(_RoleState):
    """A vote in progress, among the voters at its start."""

    __slots__ = ("fallback", "granted", "is_lost", "is_pre_vote", "refused", "retries_ms", "voters")

    def __init__(self, *, is_pre_vote: bool, voters: VoterSet, fallback: FollowerState | None = None) -> None:
        self.is_pre_vote = is_pre_vote
        self.voters = voters
        self.granted: set[int] = set()
        self.refused: set[int] = set()
        #: When to send a failed request again, by voter id.
        self.retries_ms: dict[int, int] = {}
        self.is_lost = False
        #: The leader to follow again if a pre-vote shows that others still hear it.
        self.fallback = fallback

    @property
    def is_won(self) -> bool:
        return len(self.granted) >= self.voters.majority

    @property
    def is_hopeless(self) -> bool:
        return len(self.voters) - len(self.refused) < self.voters.majority


class ReplicaProgress(_RoleState):
    """How far one replica has fetched."""

    __slots__ = ("end_at_last_fetch", "heard_ms", "last_caught_up_ms", "last_fetch_ms", "offset")

    def __init__(self, *, heard_ms: int) -> None:
        self.offset = UNKNOWN_OFFSET
        #: When it was last heard, or when the leader began to wait for it.
        self.heard_ms = heard_ms
        self.last_fetch_ms = -1
        self.last_caught_up_ms = -1
        #: The leader's log end at the last fetch. A replica that has reached it was caught up at that fetch.
        self.end_at_last_fetch = -1


class DelayedQuorumFetch(_RoleState):
    __slots__ = ("deadline_ms", "request", "token")

    def __init__(self, *, request: FetchRequest, token: Token, deadline_ms: int) -> None:
        self.request = request
        self.token = token
        self.deadline_ms = deadline_ms


class VoterChange(_RoleState):
    """The one voter change in progress: a new voter catches up first, then the Voters record is committed."""

    __slots__ = ("catch_up_offset", "deadline_ms", "new_voter", "offset", "token", "voters")

    def __init__(
        self,
        *,
        voters: VoterSet,
        token: Token,
        new_voter: ReplicaKey | None = None,
        catch_up_offset: int = 0,
        deadline_ms: int | None = None,
    ) -> None:
        self.voters = voters
        self.token = token
        self.new_voter = new_voter
        self.catch_up_offset = catch_up_offset
        #: When the new voter must have caught up.
        self.deadline_ms = deadline_ms
        #: The offset of its Voters record, once it is appended.
        self.offset: int | None = None


class LeaderState(_RoleState):
    __slots__ = (
        "announce_ms",
        "change",
        "delayed_fetches",
        "epoch_start_offset",
        "progress",
        "since_ms",
        "steady_ms",
    )

    def __init__(self, *, since_ms: int, epoch_start_offset: int) -> None:
        self.since_ms = since_ms
        #: Since when no voter has been silent for as long as a fetch timeout.
        self.steady_ms = since_ms
        self.epoch_start_offset = epoch_start_offset
        self.progress: dict[ReplicaKey, ReplicaProgress] = {}
        self.delayed_fetches: dict[ReplicaKey, DelayedQuorumFetch] = {}
        #: When to send BeginQuorumEpoch again, by voter id.
        self.announce_ms: dict[int, int] = {}
        self.change: VoterChange | None = None


class PendingFetch(_RoleState):
    """The one fetch in flight, and when to fetch again after a failure."""

    __slots__ = ("next_peer", "retry_ms", "sent")

    def __init__(self, *, next_peer: int = 0) -> None:
        self.sent: SendRequest | None = None
        self.retry_ms: int | None = None
        #: The next peer to ask, in the rotation over voters and bootstrap servers, when the leader is not known.
        self.next_peer = next_peer


#: Each election without a winner doubles the election timeout, at most this many times. Without it, no campaign would
#: end where replies take longer than a campaign lasts.
ELECTION_DOUBLINGS_MAX: Final = 3
#: After this many epochs in a row without a steady leader, each further epoch doubles the timeouts. Without it, leaders
#: on overloaded machines would be deposed before they can do any work.
UNSTEADY_EPOCHS_ALLOWED: Final = 2
TIMEOUT_DOUBLINGS_MAX: Final = 2
#: A leader is steady once it has been heard for this many timeouts without a silence as long as one timeout.
STEADY_TIMEOUTS: Final = 10


class CommittedRecordsLost(Exception):
    """The leader lacks records that are committed here. The node must stop."""


class RaftState:
    """The state that the rule functions read and change, and the actions that they add."""

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
        # The stored leader id is only a hint: that node may no longer lead.
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
        #: Epochs that have begun since the last steady leader.
        self.unsteady_epochs = 0
        #: The last epoch that its own leader has declared over.
        self.ended_epoch = -1
        #: An append, truncation or snapshot was returned as an action, and the log has not changed yet.
        self.is_append_pending = False
        self.follower: FollowerState | None = None
        self.campaign: Campaign | None = None
        self.leader: LeaderState | None = None
        self._actions: list[Action] = []
        #: Requests that were not answered when this node stopped being the leader.
        self.abandoned: list[tuple[Request, Token]] = []
        self._saved = election
        self.reported_leader = (NO_LEADER, -1)
        self._last_known_leader = election.leader_id

    def __repr__(self) -> str:
        leader = f" of {self.leader_id}" if self.follower else ""
        return (
            f"<RaftNode {self.local.id} {self.role.value}{leader} epoch={self.epoch} "
            f"log={self.log.start_offset}..{self.log.end_offset} high_watermark={self.high_watermark} "
            f"{self.voters.latest}>"
        )

    @property
    def epoch(self) -> int:
        return self.election.epoch

    @property
    def leader_id(self) -> int:
        if self.leader:
            return self.local.id
        return self.follower.leader_id if self.follower else NO_LEADER

    @property
    def leader_addresses(self) -> tuple[Address, ...]:
        if self.leader:
            return self.addresses
        return self.follower.leader_addresses if self.follower else ()

    @property
    def epoch_start_offset(self) -> int:
        assert self.leader, "only a leader's epoch has a known start"
        return self.leader.epoch_start_offset

    @property
    def is_voter(self) -> bool:
        return self.voters.latest.is_voter(self.local)

    @property
    def is_electable(self) -> bool:
        if self.epoch >= EPOCH_MAX and self.voters.latest.keys != (self.local,):
            return False
        return self.is_controller and (self.is_voter or self.may_still_be_voter())

    def is_plausible_epoch(self, epoch: int) -> bool:
        """Whether a voter could have reached this epoch, which a peer named in a request."""
        return 0 <= epoch < EPOCH_MAX and epoch <= self.epoch + EPOCH_JUMP_MAX

    def is_plausible_reply(self, reply: PeerReply) -> bool:
        """Whether elections could have reached the epoch of this reply."""
        return reply.epoch <= max(EPOCH_IN_REPLY_MAX, self.epoch + EPOCH_JUMP_MAX) and reply.epoch < EPOCH_MAX

    def may_still_be_voter(self) -> bool:
        """This node was removed, but the other voters may lack that record and then cannot win against its log."""
        return any(voters.is_voter(self.local) for voters in self.possible_voter_sets()[1:])

    def possible_voter_sets(self) -> tuple[VoterSet, ...]:
        """The latest voter set, and the one before it while the latest is not committed."""
        latest, offset = self.voters.latest, self.voters.latest_offset
        return (latest,) if self.is_committed(offset) else (latest, self.voters.as_of(offset))

    def is_committed(self, offset: int) -> bool:
        return self.high_watermark is not None and offset < self.high_watermark

    @property
    def other_voters(self) -> tuple[ReplicaKey, ...]:
        return tuple(key for key in self.voters.latest.keys if key.id != self.local.id)

    @property
    def last(self) -> OffsetAndEpoch:
        return OffsetAndEpoch(self.log.end_offset, self.log.last_epoch)

    # Actions
    def begin_event(self, now_ms: int) -> None:
        self.now_ms = max(now_ms, self.now_ms)
        assert not self._actions

    def take_actions(self) -> list[Action]:
        """All actions of one event. LeaderChanged comes last, after the others have been carried out."""
        self._save_election_first()
        for request, token in self.abandoned:
            self.send_leader_reply(request, token, ErrorCode.not_leader_or_follower)
        self.abandoned.clear()
        leader_and_epoch = (self.leader_id, self.epoch)
        if leader_and_epoch != self.reported_leader:
            self.reported_leader = leader_and_epoch
            self._actions.append(LeaderChanged(*leader_and_epoch))
        actions, self._actions = self._actions, []
        return actions

    def add_action(self, action: Action) -> None:
        self._save_election_first()
        self._actions.append(action)

    def _save_election_first(self) -> None:
        """The epoch and the vote are durable before any other action is carried out."""
        if (self.election.epoch, self.election.voted) != (self._saved.epoch, self._saved.voted):
            self._saved = self.election
            self._actions.append(SaveElection(self.election))

    def send(self, to: int | None, request: Request) -> SendRequest:
        send = SendRequest(to, request)
        self.add_action(send)
        return send

    def send_reply(self, token: Token, reply: Reply) -> None:
        self.add_action(SendReply(token, reply))

    def send_leader_reply(self, request: Request, token: Token, error: ErrorCode) -> None:
        self.send_reply(token, self.leader_reply(request, error))

    def leader_reply(self, request: Request, error: ErrorCode = ErrorCode.none) -> PeerReply:
        """A reply that names the leader and carries no data."""
        leader_id, addresses, epoch = self.leader_id, self.leader_addresses, self.epoch
        if isinstance(request, VoteRequest):
            return VoteReply(error=error, epoch=epoch, leader_id=leader_id, leader_addresses=addresses)
        if isinstance(request, BeginEpochRequest):
            return BeginEpochReply(error=error, epoch=epoch, leader_id=leader_id, leader_addresses=addresses)
        if isinstance(request, EndEpochRequest):
            return EndEpochReply(error=error, epoch=epoch, leader_id=leader_id, leader_addresses=addresses)
        if isinstance(request, FetchRequest):
            return self.fetch_reply(error)
        return FetchSnapshotReply(
            error=error,
            epoch=epoch,
            leader_id=leader_id,
            leader_addresses=addresses,
            id=request.id,
            position=request.position,
        )

    def fetch_reply(
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

    # Timeouts
    def random_election_timeout_ms(self) -> int:
        doublings = min(max(self.elections_failed, self._timeout_doublings), ELECTION_DOUBLINGS_MAX)
        timeout_ms = self.timings.election_timeout_ms << doublings
        return timeout_ms + self.draw(timeout_ms)

    @property
    def fetch_timeout_ms(self) -> int:
        """How long a leader may be silent, and how long a leader may be without a majority."""
        return self.timings.fetch_timeout_ms << self._timeout_doublings

    @property
    def _timeout_doublings(self) -> int:
        return min(max(self.unsteady_epochs - UNSTEADY_EPOCHS_ALLOWED, 0), TIMEOUT_DOUBLINGS_MAX)

    def steady_since(self, since_ms: int, heard_ms: int) -> int:
        """The new start of the steady time, now that a peer that was last heard at `heard_ms` is heard again."""
        timeout_ms = self.timings.fetch_timeout_ms
        if self.now_ms - heard_ms >= timeout_ms:
            return self.now_ms
        if self.now_ms - since_ms >= STEADY_TIMEOUTS * timeout_ms:
            self.unsteady_epochs = 0
        return since_ms

    def follower_deadline_ms(self) -> int:
        """Random, so that followers that lose their leader together do not all campaign together."""
        timeout_ms = self.fetch_timeout_ms
        return self.now_ms + timeout_ms + self.draw(max(1, timeout_ms // 10))

    def short_deadline_ms(self, refusals: int = 0) -> int:
        """A short random delay, so that two voters do not campaign at once."""
        delay_ms = 1 + self.draw(max(1, self.timings.election_timeout_ms // 10))
        return self.now_ms + delay_ms + refusals * (self.timings.retry_ms << min(refusals, 4))

    def raise_high_watermark(self, offset: int) -> None:
        if self.high_watermark is None or offset > self.high_watermark:
            self.high_watermark = offset
            self.add_action(HighWatermarkAdvanced(offset))
