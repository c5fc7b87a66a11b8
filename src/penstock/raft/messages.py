"""What the members of a quorum say to each other, free of any wire version. Inert values."""

from typing import NamedTuple

from penstock.protocol.errors import ErrorCode
from penstock.raft.values import NOBODY, UNKNOWN_OFFSET, Address, OffsetAndEpoch, ReplicaKey


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
    leader_id: int = NOBODY
    leader_addresses: tuple[Address, ...] = ()
    granted: bool = False


class BeginEpochReply(NamedTuple):
    epoch: int
    error: ErrorCode = ErrorCode.none
    leader_id: int = NOBODY
    leader_addresses: tuple[Address, ...] = ()


class EndEpochReply(NamedTuple):
    epoch: int
    error: ErrorCode = ErrorCode.none
    leader_id: int = NOBODY
    leader_addresses: tuple[Address, ...] = ()


class FetchReply(NamedTuple):
    epoch: int
    error: ErrorCode = ErrorCode.none
    leader_id: int = NOBODY
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
    leader_id: int = NOBODY
    leader_addresses: tuple[Address, ...] = ()
    size: int = 0
    position: int = 0
    data: bytes = b""


class VoterReply(NamedTuple):
    """The answer to a voter change."""

    error: ErrorCode = ErrorCode.none
    message: str | None = None


Request = VoteRequest | BeginEpochRequest | EndEpochRequest | FetchRequest | FetchSnapshotRequest
PeerReply = VoteReply | BeginEpochReply | EndEpochReply | FetchReply | FetchSnapshotReply
Reply = PeerReply | VoterReply
