"""The values of the quorum: replicas, voters, elections, control records, timeouts, requests and replies.

Requests and replies are immutable and independent of any wire version.
"""

from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple
from uuid import UUID

from penstock.protocol.errors import ErrorCode

#: The leader is not known.
NO_LEADER: Final = -1
#: The high watermark is not known.
UNKNOWN_OFFSET: Final = -1

#: The last epoch that the protocol can carry. Only a sole voter may lead it, because no election can follow it.
EPOCH_MAX: Final = 2**31 - 1
#: How far the epoch of a request may be ahead of this node's epoch. A node that was away for longer learns the epoch
#: from replies to its own requests.
EPOCH_JUMP_MAX: Final = 1000
#: The highest epoch accepted from a reply. At one election per second it is reached after 34 years.
EPOCH_IN_REPLY_MAX: Final = 2**30
#: How far above the last epoch of its log a node resumes when the stored epoch is not plausible. It must not vote twice
#: in an epoch that it has forgotten, and there cannot have been this many elections since its last record.
_EPOCHS_SKIPPED: Final = 1_000_000


class ReplicaKey(NamedTuple):
    """A node and its log directory: the same node with another directory is another replica."""

    id: int
    directory: UUID | None = None


class Address(NamedTuple):
    """The address of one listener."""

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
    """The election state that a node stores on disk; `leader_id` is only a hint."""

    epoch: int = 0
    leader_id: int = NO_LEADER
    voted: ReplicaKey | None = None


def plausible_election(election: ElectionState, last_epoch: int) -> ElectionState:
    """The stored election state, or a replacement if elections cannot have reached its epoch."""
    if election.epoch <= max(EPOCH_IN_REPLY_MAX, last_epoch + EPOCH_JUMP_MAX):
        return election
    return ElectionState(min(last_epoch + _EPOCHS_SKIPPED, EPOCH_MAX))


class Timings(NamedTuple):
    election_timeout_ms: int = 1000
    fetch_timeout_ms: int = 2000
    backoff_max_ms: int = 1000
    #: How long a leader delays a fetch when it has no new records.
    fetch_wait_ms: int = 500
    #: How long a node waits before it sends a failed request again.
    retry_ms: int = 50


class Role(Enum):
    UNATTACHED = "unattached"
    PROSPECTIVE = "prospective"
    CANDIDATE = "candidate"
    LEADER = "leader"
    FOLLOWER = "follower"
    RESIGNED = "resigned"


class VoterSet:
    """The voters by id. Immutable."""

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
        """The directories must match too, unless the voter's directory is not known."""
        voter = self._voters.get(key.id)
        return voter is not None and voter.key.directory in (None, key.directory)

    def with_voter(self, voter: Voter) -> "VoterSet":
        """Adds the voter, or replaces the one with the same id."""
        return VoterSet((*(other for other in self if other.key.id != voter.key.id), voter))

    def without(self, id: int) -> "VoterSet":
        return VoterSet(tuple(voter for voter in self if voter.key.id != id))


class VoterHistory:
    """Voter sets by the offset of their record. The newest is in force, committed or not.

    A set at `BEFORE_LOG` is not in the log yet: the first leader appends it.
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
        """Add a set from the log or a snapshot, and drop the sets at later offsets."""
        self.truncate(offset)
        self._entries.append((offset, voters))

    def truncate(self, offset: int) -> None:
        """Drop the sets at `offset` and above."""
        while self._entries and self._entries[-1][0] >= offset:
            self._entries.pop()

    @property
    def latest(self) -> VoterSet:
        return self._entries[-1][1] if self._entries else VoterSet()

    @property
    def latest_offset(self) -> int:
        return self._entries[-1][0] if self._entries else self.BEFORE_LOG

    def as_of(self, offset: int) -> VoterSet:
        """The set in force for a log that ends at `offset`; a snapshot up to there must contain it."""
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
    """The leader's view of a replica; -1 where the leader does not know."""

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
    """`epoch` is the epoch to lead; in a pre-vote, which does not bind, the candidate's current epoch."""

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
    """The leader steps down. `successors` are the other voters, those furthest ahead first."""

    epoch: int
    leader_id: int
    successors: tuple[ReplicaKey, ...]


class FetchRequest(NamedTuple):
    """`offset` also tells the leader that the replica has made everything before it durable."""

    epoch: int
    replica: ReplicaKey
    offset: int
    last_epoch: int
    max_wait_ms: int
    #: The follower's high watermark, or -1. A leader with a higher one replies at once.
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
    #: The logs diverge: the leader's last epoch before the divergence and the end offset of that epoch.
    diverging: OffsetAndEpoch | None = None
    #: The log no longer has the requested records: the replica must fetch this snapshot.
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
    """The reply to AddRaftVoter, RemoveRaftVoter and UpdateRaftVoter."""

    error: ErrorCode = ErrorCode.none
    message: str | None = None


Request = VoteRequest | BeginEpochRequest | EndEpochRequest | FetchRequest | FetchSnapshotRequest
PeerReply = VoteReply | BeginEpochReply | EndEpochReply | FetchReply | FetchSnapshotReply
Reply = PeerReply | VoterChangeReply
