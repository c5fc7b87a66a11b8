"""What members ask of a group and what they are told, free of any wire version."""

from dataclasses import dataclass

from penstock.groups.records import CommittedOffset
from penstock.protocol.errors import ErrorCode

#: What a member says before it was given an id.
NO_MEMBER_ID = ""
NO_GENERATION = -1

Protocols = tuple[tuple[str, bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    group_id: str
    member_id: str
    instance_id: str | None = None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: Protocols
    #: Whether a new dynamic member must join a second time, with the id that it was given (v4 and newer).
    member_id_required: bool = True
    #: Whether a leader may be told to leave the assignment as it is (v9 and newer).
    can_skip_assignment: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedMember:
    member_id: str
    instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinReply:
    error: ErrorCode = ErrorCode.none
    generation: int = NO_GENERATION
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    skip_assignment: bool = False
    member_id: str = NO_MEMBER_ID
    members: tuple[JoinedMember, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRequest:
    group_id: str
    generation: int
    member_id: str
    instance_id: str | None = None
    protocol_type: str | None = None
    protocol: str | None = None
    assignments: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReply:
    error: ErrorCode = ErrorCode.none
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatRequest:
    group_id: str
    generation: int
    member_id: str
    instance_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    error: ErrorCode = ErrorCode.none


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavingMember:
    member_id: str
    instance_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequest:
    group_id: str
    members: tuple[LeavingMember, ...]


#: One error per member of the request, in its order.
LeaveResults = tuple[tuple[LeavingMember, ErrorCode], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveReply:
    error: ErrorCode = ErrorCode.none
    members: LeaveResults = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetToCommit:
    topic: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    group_id: str
    member_id: str = NO_MEMBER_ID
    generation: int = NO_GENERATION
    instance_id: str | None = None
    offsets: tuple[OffsetToCommit, ...]
    #: Older clients may ask for their own retention.
    retention_ms: int | None = None
    #: What a commit to a group that does not exist is answered with: it depends on the wire version.
    error_if_no_group: ErrorCode = ErrorCode.group_id_not_found
    #: Whether the wire version can carry a member's epoch and what may be wrong with it (v9 and newer).
    knows_member_epochs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionError:
    topic: str
    partition: int
    error: ErrorCode = ErrorCode.none


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsReply:
    """The answer to a commit or a deletion of offsets: one error for all, or one per partition."""

    error: ErrorCode = ErrorCode.none
    partitions: tuple[PartitionError, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedOffset:
    """`committed` is None where there is no offset: that is -1 on the wire, never 0."""

    topic: str
    partition: int
    committed: CommittedOffset | None
    #: Not told, because an open transaction may change it.
    is_unstable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedGroup:
    group_id: str
    protocol_type: str
    state: str
    kind: str = "classic"


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedMember:
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedGroup:
    group_id: str
    state: str
    protocol_type: str = ""
    protocol: str = ""
    members: tuple[DescribedMember, ...] = ()
