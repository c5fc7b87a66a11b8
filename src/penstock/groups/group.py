"""The interface that every kind of group implements, so that one shard can hold them all.

Also here: the requests and replies of the classic protocol and of offset commits, independent of the wire version;
`Operation`, which collects the records, replies and timers of one operation; and `GroupResult`, which an
operation returns.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from penstock.groups.coordinator_records import (
    CommittedOffset,
    GroupMetadataRecord,
    OffsetCommitRecord,
    encode_group_metadata,
    encode_offset_commit,
)
from penstock.groups.group_config import GroupConfig, GroupCoordinatorConfig
from penstock.groups.timers import TimerKey, Timers
from penstock.groups.topics import Topics
from penstock.protocol.errors import ErrorCode
from penstock.protocol.stored_records import KeyValue

#: Sent by a member that has no id yet.
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
    #: Whether a new dynamic member must join a second time, with its assigned id (v4 and newer).
    member_id_required: bool = True
    #: Whether the reply can tell a leader to keep the assignment as it is (v9 and newer).
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


#: One error per member of the request, in the same order.
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
    #: Older clients may request their own retention.
    retention_ms: int | None = None
    #: The error for a commit to a group that does not exist; it depends on the wire version.
    error_if_no_group: ErrorCode = ErrorCode.group_id_not_found
    #: Whether the wire version supports member epochs and their error codes (v9 and newer).
    knows_member_epochs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionError:
    topic: str
    partition: int
    error: ErrorCode = ErrorCode.none


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsReply:
    """The reply to a commit or a deletion of offsets: one error for all partitions, or one per partition."""

    error: ErrorCode = ErrorCode.none
    partitions: tuple[PartitionError, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedOffset:
    """`committed` is None if there is no offset: that is -1 on the wire, never 0."""

    topic: str
    partition: int
    committed: CommittedOffset | None
    #: Not returned, because an open transaction may change the offset.
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


#: An opaque value of the caller, returned with the reply; the group keeps it while a request waits.
ReplyToken = Hashable


class TransactionProducer(NamedTuple):
    id: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """The caller appends the records as one batch, replays them, and sends the replies once they are committed."""

    records: tuple[KeyValue, ...] = ()
    replies: tuple[tuple[ReplyToken, object], ...] = ()
    #: The producer of the transaction that the records belong to; they are replayed as pending.
    producer: TransactionProducer | None = None


class Operation:
    """One operation in progress: its time, its records and replies so far, and the timers that it may set."""

    __slots__ = (
        "_records",
        "_replies",
        "config_of",
        "groups",
        "may_describe",
        "now_ms",
        "settings",
        "timers",
        "topics",
    )

    def __init__(
        self,
        *,
        now_ms: int,
        settings: GroupCoordinatorConfig,
        config_of: Callable[[str], GroupConfig],
        timers: Timers[TimerKey],
        topics: Topics,
        groups: "dict[str, Group]",
        may_describe: Callable[[str], bool] | None = None,
    ) -> None:
        """`may_describe` tells whether the client may know a topic; None if no client has sent the operation."""
        self.now_ms = now_ms
        self.may_describe = may_describe
        self.settings = settings
        self.config_of = config_of
        self.timers = timers
        self.topics = topics
        #: The groups of the shard; an operation that converts a group to another kind replaces it here.
        self.groups = groups
        self._records: list[KeyValue] = []
        self._replies: list[tuple[ReplyToken, object]] = []

    @property
    def has_records(self) -> bool:
        return bool(self._records)

    def reply(self, token: ReplyToken, reply: object) -> None:
        self._replies.append((token, reply))

    def store(self, record: KeyValue) -> None:
        self._records.append(record)

    def store_all(self, records: Iterable[KeyValue]) -> None:
        self._records.extend(records)

    def store_group(self, record: GroupMetadataRecord) -> None:
        self._records.append(encode_group_metadata(record))

    def store_offset(self, record: OffsetCommitRecord) -> None:
        self._records.append(encode_offset_commit(record))

    def schedule_in(self, timer: TimerKey, delay_ms: int) -> None:
        self.timers.schedule(timer, self.now_ms + delay_ms)

    def work(self, producer: TransactionProducer | None = None) -> GroupResult:
        return GroupResult(records=tuple(self._records), replies=tuple(self._replies), producer=producer)


class Group(Protocol):
    """Each kind of group has its own rules. A group that is converted to another kind is replaced in the shard."""

    #: The group type in ListGroups.
    kind: ClassVar[str]
    group_id: str

    @property
    def protocol_name(self) -> str:
        """The protocol type in ListGroups."""

    @property
    def state_name(self) -> str:
        """The name that Kafka prints."""

    @property
    def member_count(self) -> int: ...
    @property
    def is_empty(self) -> bool:
        """Without members, so that the group may be deleted and clients that are not members may commit."""

    @property
    def is_idle(self) -> bool:
        """Empty, and no member is joining: the group is removed when its offsets are gone."""

    @property
    def can_be_replaced(self) -> bool:
        """Whether a group of another kind may take over the name; the offsets stay."""

    @property
    def stored(self) -> object:
        """The durable state, for comparison; None if nothing is stored."""

    # The classic protocol, which members may use also in a group of another kind

    def join(
        self, request: JoinRequest, token: ReplyToken, operation: Operation, *, new_member_id: str
    ) -> None: ...
    def sync(self, request: SyncRequest, token: ReplyToken, operation: Operation) -> None: ...
    def heartbeat(self, request: HeartbeatRequest, operation: Operation) -> ErrorCode: ...
    def leave(self, request: LeaveRequest, operation: Operation) -> LeaveResults: ...
    def described(self) -> DescribedGroup | None:
        """None if the classic protocol cannot describe the group."""

    # Offsets

    def check_commit(
        self, request: CommitRequest, topics: Topics, *, is_transactional: bool = False
    ) -> ErrorCode:
        """`generation` is a classic member's generation, or the member epoch. One invalid offset fails the request."""

    def needs_member_epoch(self, member_id: str) -> bool:
        """Whether this member may commit only with a request version that supports member epochs."""

    def check_fetch(self, member_id: str | None, epoch: int) -> ErrorCode: ...
    def check_offset_deletion(self) -> ErrorCode: ...
    def is_subscribed(self, topic: str) -> bool:
        """Whether a member consumes the topic, or may consume it."""

    def retained_from_ms(self, offset: CommittedOffset) -> int | None:
        """The start of an offset's retention time; None while the offset is in use."""

    # Lifecycle

    def loaded(self, operation: Operation) -> None:
        """Called when all records were replayed: starts the session timeouts of the members."""

    def member_committed(self, member_id: str, operation: Operation) -> None:
        """Called when a member committed offsets."""

    def time_out(self, timer: TimerKey, operation: Operation) -> None:
        """Called when a timer of this group is due; the timer may stem from the group's previous kind."""

    def tombstones(self) -> Iterator[KeyValue]:
        """The tombstones that delete a group without members."""

    def removed(self, timers: Timers[TimerKey]) -> None:
        """Called when the group is no longer in its shard."""
