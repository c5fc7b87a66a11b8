"""What a node keeps in mind while it has a role. Gone, all of it, when the role is.

Plain classes, because every start makes them and a dataclass takes a hundred times as long to make.
"""

from penstock.raft.actions import Send, Token
from penstock.raft.messages import FetchRequest
from penstock.raft.values import (
    UNKNOWN_OFFSET,
    Address,
    OffsetAndEpoch,
    ReplicaKey,
    VoterSet,
)


class _State:
    __slots__: tuple[str, ...] = ()

    def __repr__(self) -> str:
        values = (f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({', '.join(values)})"


class Download(_State):
    """A snapshot on its way here, and how much of it has come."""

    __slots__ = ("id", "position")

    def __init__(self, *, id: OffsetAndEpoch) -> None:
        self.id = id
        self.position = 0


class Follower(_State):
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
        self.download: Download | None = None


class Campaign(_State):
    """A vote under way; the voters are those of its beginning."""

    __slots__ = ("fallback", "granted", "is_lost", "is_pre_vote", "refused", "retries_ms", "voters")

    def __init__(self, *, is_pre_vote: bool, voters: VoterSet, fallback: Follower | None = None) -> None:
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


class Progress(_State):
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


class ParkedFetch(_State):
    __slots__ = ("deadline_ms", "request", "token")

    def __init__(self, *, request: FetchRequest, token: Token, deadline_ms: int) -> None:
        self.request = request
        self.token = token
        self.deadline_ms = deadline_ms


class VoterChange(_State):
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


class Leader(_State):
    __slots__ = ("announce_ms", "change", "epoch_start_offset", "parked", "progress", "since_ms", "steady_ms")

    def __init__(self, *, since_ms: int, epoch_start_offset: int) -> None:
        self.since_ms = since_ms
        #: Since when no voter has fallen silent for long and come back.
        self.steady_ms = since_ms
        self.epoch_start_offset = epoch_start_offset
        self.progress: dict[ReplicaKey, Progress] = {}
        self.parked: dict[ReplicaKey, ParkedFetch] = {}
        #: When to tell a voter again who leads, by its id.
        self.announce_ms: dict[int, int] = {}
        self.change: VoterChange | None = None


class Question(_State):
    """The one fetch that is under way, and when to ask again after a failure."""

    __slots__ = ("retry_ms", "sent", "turn")

    def __init__(self, *, turn: int = 0) -> None:
        self.sent: Send | None = None
        self.retry_ms: int | None = None
        #: Where in the rotation over voters and bootstrap servers a node without a leader asks next.
        self.turn = turn
