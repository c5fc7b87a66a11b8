"""The values of the quorum: replicas, voters, elections, control records, timeouts, requests and replies.

Requests and replies are immutable and independent of any wire version.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple
from uuid import UUID

from penstock.protocol.errors import ErrorCode

#: Said where no leader is known.
NO_LEADER: Final = -1
#: Said where no high watermark is known.
UNKNOWN_OFFSET: Final = -1

#: The last epoch that fits into the protocol. Only a sole voter may lead it: nobody can be elected after it.
EPOCH_MAX: Final = 2**31 - 1
#: How far ahead of this node's epoch one may be that another node brings up unasked. A node that was away for longer
#: learns the epoch from the answers to its own questions.
EPOCH_JUMP_MAX: Final = 1000
#: The highest epoch believed because a peer that was asked says so. At an election a second it takes 34 years.
EPOCH_IN_REPLY_MAX: Final = 2**30
#: How far above its log a node resumes when the epoch on its disk cannot be true: it must not vote a second time in
#: an epoch that it has forgotten, and there cannot have been so many elections since its last record.
_EPOCHS_SKIPPED: Final = 1_000_000


class ReplicaKey(NamedTuple):
    """A node and the disk that it keeps its log on: with another disk it is another replica."""

    id: int
    directory: UUID | None = None


class Address(NamedTuple):
    """Where a listener of a node is reached."""

    name: str
    host: str
    port: int


class Voter(NamedTuple):
    key: ReplicaKey
    addresses: tuple[Address, ...] = ()


class OffsetAndEpoch(NamedTuple):
    offset: int
    epoch: int


class ElectionState(NamedTuple):
    """What a node must remember of elections through a crash; `leader_id` is only a hint."""

    epoch: int = 0
    leader_id: int = NO_LEADER
    voted: ReplicaKey | None = None


def plausible_election(election: ElectionState, last_epoch: int) -> ElectionState:
    """The election on disk, or one to resume with where its epoch is none that elections could have reached."""
    if election.epoch <= max(EPOCH_IN_REPLY_MAX, last_epoch + EPOCH_JUMP_MAX):
        return election
    return ElectionState(min(last_epoch + _EPOCHS_SKIPPED, EPOCH_MAX))


class Timings(NamedTuple):
    election_timeout_ms: int = 1000
    fetch_timeout_ms: int = 2000
    backoff_max_ms: int = 1000
    #: How long a leader keeps a fetch that it has nothing to say to.
    fetch_wait_ms: int = 500
    #: How long to wait before a request that failed is sent again.
    retry_ms: int = 50


class Role(Enum):
    UNATTACHED = "unattached"
    PROSPECTIVE = "prospective"
    CANDIDATE = "candidate"
    LEADER = "leader"
    FOLLOWER = "follower"
    RESIGNED = "resigned"


class VoterSet:
    """Who votes, by id. Frozen: a change makes another set."""

    __slots__ = ("_voters",)

    def __init__(self, voters: tuple[Voter, ...] = ()) -> None:
        self._voters = {voter.key.id: voter for voter in sorted(voters, key=lambda voter: voter.key.id)}
        assert len(self._voters) == len(voters), f"two voters with one id: {voters}"

    def __repr__(self) -> str:
        return f"VoterSet({', '.join(str(id) for id in self._voters)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VoterSet) and self._voters == other._voters

    def __hash__(self) -> int:
        return hash(tuple(self._voters.values()))

    def __iter__(self) -> Iterator[Voter]:
        return iter(self._voters.values())

    def __len__(self) -> int:
        return len(self._voters)

    def __contains__(self, id: int) -> bool:
        return id in self._voters

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self._voters)

    @property
    def keys(self) -> tuple[ReplicaKey, ...]:
        return tuple(voter.key for voter in self)

    @property
    def majority(self) -> int:
        return len(self._voters) // 2 + 1

    def get(self, id: int) -> Voter | None:
        return self._voters.get(id)

    def is_voter(self, key: ReplicaKey) -> bool:
        """The same id on another disk is nobody; a voter without a known disk goes by its id."""
        voter = self._voters.get(key.id)
        return voter is not None and voter.key.directory in (None, key.directory)

    def with_voter(self, voter: Voter) -> "VoterSet":
        """Added, or in the place of the one with its id."""
        return VoterSet((*(other for other in self if other.key.id != voter.key.id), voter))

    def without(self, id: int) -> "VoterSet":
        return VoterSet(tuple(voter for voter in self if voter.key.id != id))


class VoterHistory:
    """Voter sets by the offset of their record; the newest counts, committed or not.

    A set at `BEFORE_LOG` was given from outside: the first leader writes it into the log.
    """

    __slots__ = ("_entries",)

    BEFORE_LOG: Final = -1

    def __init__(self, first: VoterSet | None = None) -> None:
        self._entries: list[tuple[int, VoterSet]] = []
        if first is not None:
            self.add(self.BEFORE_LOG, first)

    def __repr__(self) -> str:
        return f"VoterHistory({self._entries})"

    def add(self, offset: int, voters: VoterSet) -> None:
        """A set read from the log or a snapshot; what was said of later offsets is void."""
        self.truncate(offset)
        self._entries.append((offset, voters))

    def truncate(self, offset: int) -> None:
        """The log now ends at `offset`."""
        while self._entries and self._entries[-1][0] >= offset:
            self._entries.pop()

    @property
    def latest(self) -> VoterSet:
        return self._entries[-1][1] if self._entries else VoterSet()

    @property
    def latest_offset(self) -> int:
        return self._entries[-1][0] if self._entries else self.BEFORE_LOG

    def as_of(self, offset: int) -> VoterSet:
        """The set in force for a log that ends at `offset`, which a snapshot up to there must hold."""
        return next((voters for at, voters in reversed(self._entries) if at < offset), VoterSet())


class LeaderChange(NamedTuple):
    """The first record of every epoch."""

    leader_id: int
    voters: tuple[ReplicaKey, ...]
    granting: tuple[ReplicaKey, ...]


class KRaftVersion(NamedTuple):
    version: int = 1


class Voters(NamedTuple):
    voters: VoterSet


ControlRecord = LeaderChange | KRaftVersion | Voters


class ReplicaDescription(NamedTuple):
    """How far a replica has come, as its leader sees it; -1 where that is not known."""

    key: ReplicaKey
    offset: int = UNKNOWN_OFFSET
    last_fetch_ms: int = -1
    last_caught_up_ms: int = -1


class QuorumDescription(NamedTuple):
    leader_id: int
    epoch: int
    high_watermark: int
    voters: tuple[ReplicaDescription, ...]
    observers: tuple[ReplicaDescription, ...]
    voter_set: VoterSet


class VoteRequest(NamedTuple):
    """`epoch` is the one stood for; in a pre-vote, which binds nobody, the one that the asker is in."""

    epoch: int
    candidate: ReplicaKey
    voter: ReplicaKey
    last: OffsetAndEpoch
    pre_vote: bool


class BeginEpochRequest(NamedTuple):
    epoch: int
    leader_id: int
    voter: ReplicaKey
    addresses: tuple[Address, ...] = ()


class EndEpochRequest(NamedTuple):
    """The leader steps down; the successors are those furthest ahead, best first."""

    epoch: int
    leader_id: int
    successors: tuple[ReplicaKey, ...]


class FetchRequest(NamedTuple):
    """Asks for records, and says by its offset what this replica will not lose."""

    epoch: int
    replica: ReplicaKey
    offset: int
    last_epoch: int
    max_wait_ms: int
    #: What the follower knows, -1 when it knows none: a leader that knows better answers at once.
    high_watermark: int = UNKNOWN_OFFSET


class FetchSnapshotRequest(NamedTuple):
    epoch: int
    replica: ReplicaKey
    id: OffsetAndEpoch
    position: int


class VoteReply(NamedTuple):
    epoch: int
    error: ErrorCode = ErrorCode.none
    leader_id: int = NO_LEADER
    leader_addresses: tuple[Address, ...] = ()
    granted: bool = False


class BeginEpochReply(NamedTuple):
    epoch: int
    error: ErrorCode = ErrorCode.none
    leader_id: int = NO_LEADER
    leader_addresses: tuple[Address, ...] = ()


class EndEpochReply(NamedTuple):
    epoch: int
    error: ErrorCode = ErrorCode.none
    leader_id: int = NO_LEADER
    leader_addresses: tuple[Address, ...] = ()


class FetchReply(NamedTuple):
    epoch: int
    error: ErrorCode = ErrorCode.none
    leader_id: int = NO_LEADER
    leader_addresses: tuple[Address, ...] = ()
    high_watermark: int = UNKNOWN_OFFSET
    log_start: int = 0
    #: The asker's history parts from the leader's: the leader's epoch before the parting, and where it ended.
    diverging: OffsetAndEpoch | None = None
    #: What the asker needs is gone from the log: it must fetch this snapshot.
    snapshot: OffsetAndEpoch | None = None
    records: bytes = b""


class FetchSnapshotReply(NamedTuple):
    epoch: int
    id: OffsetAndEpoch
    error: ErrorCode = ErrorCode.none
    leader_id: int = NO_LEADER
    leader_addresses: tuple[Address, ...] = ()
    size: int = 0
    position: int = 0
    data: bytes = b""


class VoterChangeReply(NamedTuple):
    """The answer to a voter change."""

    error: ErrorCode = ErrorCode.none
    message: str | None = None


Request = VoteRequest | BeginEpochRequest | EndEpochRequest | FetchRequest | FetchSnapshotRequest
PeerReply = VoteReply | BeginEpochReply | EndEpochReply | FetchReply | FetchSnapshotReply
Reply = PeerReply | VoterChangeReply
