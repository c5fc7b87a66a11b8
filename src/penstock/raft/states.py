"""What a node keeps in mind while it has a role. Gone, all of it, when the role is."""

from dataclasses import dataclass, field

from penstock.raft.actions import Send, Token
from penstock.raft.messages import FetchRequest
from penstock.raft.values import (
    UNKNOWN_OFFSET,
    Address,
    OffsetAndEpoch,
    ReplicaKey,
    VoterSet,
)


@dataclass(slots=True, kw_only=True)
class Download:
    """A snapshot on its way here, and how much of it has come."""

    id: OffsetAndEpoch
    position: int = 0


@dataclass(slots=True, kw_only=True)
class Follower:
    leader_id: int
    leader_addresses: tuple[Address, ...]
    #: When the leader itself was last heard, or this began: elections wait from here.
    since_ms: int
    #: Whether the leader itself was heard: a third party's word does not speak against an election.
    is_heard: bool
    #: The leader's host refused us: it may be dead, so others may stand.
    is_suspect: bool = False
    #: How often it did so since it was last heard: each time, others are asked later.
    doubts: int = 0
    leader_high_watermark: int = UNKNOWN_OFFSET
    download: Download | None = None


@dataclass(slots=True, kw_only=True)
class Campaign:
    """A vote under way; the voters are those of its beginning."""

    is_pre_vote: bool
    voters: VoterSet
    granted: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    #: Requests that failed and when to send them again, by voter.
    retries_ms: dict[int, int] = field(default_factory=dict)
    is_lost: bool = False
    #: Whom to follow again when a pre-vote shows that others still hear it.
    fallback: Follower | None = None

    @property
    def is_won(self) -> bool:
        return len(self.granted) >= self.voters.majority

    @property
    def is_hopeless(self) -> bool:
        return len(self.voters) - len(self.refused) < self.voters.majority


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far one replica has come, as its fetches told."""

    offset: int = UNKNOWN_OFFSET
    #: When it was last heard, or when its silence began to count.
    heard_ms: int
    last_fetch_ms: int = -1
    last_caught_up_ms: int = -1
    #: The leader's end at the last fetch: who has reached it by the next was caught up at the last.
    end_at_last_fetch: int = -1


@dataclass(slots=True, kw_only=True)
class ParkedFetch:
    request: FetchRequest
    token: Token
    deadline_ms: int


@dataclass(slots=True, kw_only=True)
class VoterChange:
    """The one change under way: first the newcomer catches up, then its record is committed."""

    voters: VoterSet
    token: Token
    newcomer: ReplicaKey | None = None
    catch_up_offset: int = 0
    #: Until when the newcomer may take to catch up.
    deadline_ms: int | None = None
    #: Where its record was appended.
    offset: int | None = None


@dataclass(slots=True, kw_only=True)
class Leader:
    since_ms: int
    epoch_start_offset: int
    progress: dict[ReplicaKey, Progress] = field(default_factory=dict)
    parked: dict[ReplicaKey, ParkedFetch] = field(default_factory=dict)
    #: When to tell a voter again who leads, by its id.
    announce_ms: dict[int, int] = field(default_factory=dict)
    change: VoterChange | None = None


@dataclass(slots=True, kw_only=True)
class Question:
    """The one fetch that is under way, and when to ask again after a failure."""

    sent: Send | None = None
    retry_ms: int | None = None
    #: Where in the rotation over voters and bootstrap servers a node without a leader asks next.
    turn: int = 0
