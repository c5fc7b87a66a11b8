"""The common part of consumer, share and streams groups, which Kafka calls modern groups: the coordinator assigns.

Records: each record belongs to the whole group or to something in it that has a name. Keys start with an int16 record
type, values with their version, which is 0 for all of them.

Drafts: during an operation each change is a record, and later decisions of the operation see it at once. The group
itself changes when the records are replayed. Until then the draft works on a copy, made with the first record, so an
operation that changes nothing is cheap.
"""

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Any, ClassVar, Final, Generic, NamedTuple, Self, TypeVar
from uuid import UUID

from kio.static.primitive import i32, i64

from penstock.groups.coordinator_records import CommittedOffset
from penstock.groups.group import (
    CommitRequest,
    DescribedGroup,
    Group,
    GroupResult,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LeaveResults,
    Operation,
    ReplyToken,
    SyncReply,
    SyncRequest,
)
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.timers import TimerKey, Timers
from penstock.groups.topics import Topics
from penstock.protocol import stored_records
from penstock.protocol.errors import ApiError, ErrorCode

# ruff: noqa: RUF009 - kafka_field() is dataclasses.field()

#: Partitions by topic. Immutable by convention; topics without partitions are omitted.
Assignment = Mapping[UUID, frozenset[int]]
NO_PARTITIONS: Final[Assignment] = {}

#: The member epochs of a heartbeat that joins, leaves, or (static members) leaves temporarily.
JOIN_GROUP_MEMBER_EPOCH: Final = 0
LEAVE_GROUP_MEMBER_EPOCH: Final = -1
LEAVE_GROUP_STATIC_MEMBER_EPOCH: Final = -2
#: The epoch of a group that has no target assignment yet.
NO_TARGET_EPOCH: Final = -1


class MemberState(IntEnum):
    """The progress of a member towards its target assignment, numbered as Kafka stores it."""

    STABLE = 0
    #: The member must revoke partitions before it gets the next epoch.
    UNREVOKED = 1
    #: The member waits for partitions that other members have not released.
    UNRELEASED = 2


class GroupEpoch(NamedTuple):
    epoch: int
    #: A hash of the subscribed topics at this epoch.
    metadata_hash: int = 0


class TargetAssignmentEpoch(NamedTuple):
    """The group epoch for which the target was last computed, and when."""

    epoch: int = NO_TARGET_EPOCH
    timestamp_ms: int = 0


def to_assignment(partitions: Iterable[tuple[UUID, int]]) -> Assignment:
    found: dict[UUID, list[int]] = {}
    for topic_id, partition in partitions:
        found.setdefault(topic_id, []).append(partition)
    return {topic_id: frozenset(numbers) for topic_id, numbers in found.items()}


def overlaps(one: Assignment, other: Assignment) -> bool:
    return any(not partitions.isdisjoint(other.get(topic_id, ())) for topic_id, partitions in one.items())


def is_within(part: Assignment, whole: Assignment) -> bool:
    return all(partitions <= whole.get(topic_id, frozenset()) for topic_id, partitions in part.items())


def difference(whole: Assignment, part: Assignment) -> Assignment:
    left = {topic_id: partitions - part.get(topic_id, frozenset()) for topic_id, partitions in whole.items()}
    return {topic_id: partitions for topic_id, partitions in left.items() if partitions}


def union(one: Assignment, other: Assignment) -> Assignment:
    return {
        topic_id: one.get(topic_id, frozenset()) | other.get(topic_id, frozenset())
        for topic_id in {**one, **other}
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernHeartbeatReply:
    """What the replies to the heartbeats of all three kinds have."""

    error: ErrorCode = ErrorCode.none
    message: str | None = None
    member_id: str | None = None
    member_epoch: int = 0
    heartbeat_interval_ms: int = 0


# Records


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey(stored_records.KeySchema):
    """The key of a record that belongs to the whole group."""

    group_id: str = stored_records.kafka_field("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedKey(stored_records.KeySchema):
    """The key of a record that belongs to a member or to a regular expression."""

    group_id: str = stored_records.kafka_field("string")
    name: str = stored_records.kafka_field("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAssignmentMetadataValue(stored_records.RecordSchema):
    assignment_epoch: i32 = stored_records.kafka_field("int32")
    assignment_timestamp: i64 = stored_records.kafka_field("int64", tag=0, default=i64(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPartitionsPart(stored_records.NestedSchema):
    topic_id: UUID | None = stored_records.kafka_field("uuid")
    partitions: tuple[i32, ...] = stored_records.kafka_field("int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAssignmentMemberValue(stored_records.RecordSchema):
    topic_partitions: tuple[TopicPartitionsPart, ...]


def epoch_entity(schema: Any, value: GroupEpoch) -> Any:
    return schema(epoch=value.epoch, metadata_hash=value.metadata_hash)


def epoch_of(entity: Any) -> GroupEpoch:
    return GroupEpoch(entity.epoch, entity.metadata_hash)


def target_entity(value: Assignment) -> Any:
    return TargetAssignmentMemberValue(topic_partitions=partition_parts(value))


def target_of(entity: Any) -> Assignment:
    return assignment_of(entity.topic_partitions)


def partition_parts(value: Assignment) -> tuple[Any, ...]:
    return tuple(
        TopicPartitionsPart(topic_id=topic_id, partitions=tuple(sorted(partitions)))
        for topic_id, partitions in value.items()
    )


def assignment_of(parts: tuple[Any, ...]) -> Assignment:
    return {part.topic_id: frozenset(part.partitions) for part in parts}


_VERSION: Final = 0

RecordTypeT = TypeVar("RecordTypeT", bound=IntEnum)


class ModernGroupRecord(NamedTuple, Generic[RecordTypeT]):
    """`value` is None for a tombstone; otherwise its type depends on `kind`."""

    kind: RecordTypeT
    group_id: str
    #: A member id or a regular expression; empty if the record belongs to the whole group.
    name: str
    value: Any


class GroupRecordCodec(Generic[RecordTypeT]):
    """Encodes and decodes the records of one kind of group."""

    def __init__(
        self,
        kinds: type[RecordTypeT],
        *,
        of_group: Collection[RecordTypeT],
        entities: Mapping[RecordTypeT, Any],
        parsers: Mapping[RecordTypeT, tuple[Any, Any]],
    ) -> None:
        """`entities` convert a value to an entity, `parsers` (with the schema) an entity to a value.

        Record types without a parser are no longer written, and are ignored.
        """
        self.kinds: Any = kinds
        self._of_group = frozenset(of_group)
        self._entities, self._parsers = entities, parsers

    def encode(self, record: ModernGroupRecord[RecordTypeT]) -> stored_records.KeyValue:
        kind = record.kind
        if kind in self._of_group:
            key: Any = GroupKey(group_id=record.group_id)
        else:
            key = NamedKey(group_id=record.group_id, name=record.name)
        value = (
            None
            if record.value is None
            else stored_records.encode_entity(_VERSION, self._entities[kind](record.value))
        )
        return stored_records.encode_entity(kind, key), value

    def decode(self, key: bytes, value: bytes | None) -> ModernGroupRecord[RecordTypeT]:
        kind = self.kinds(stored_records.key_type(key))
        is_of_group = kind in self._of_group
        parsed = stored_records.decode_entity(GroupKey if is_of_group else NamedKey, key)
        name = "" if is_of_group else parsed.name
        return ModernGroupRecord(
            kind, parsed.group_id, name, None if value is None else self._parse(kind, value)
        )

    def _parse(self, kind: RecordTypeT, value: bytes) -> Any:
        if kind not in self._parsers:
            return None
        if stored_records.value_version(value) != _VERSION:
            raise stored_records.UnknownVersion(
                f"{kind.name} record of version {stored_records.value_version(value)}"
            )
        schema, parse = self._parsers[kind]
        return parse(stored_records.decode_entity(schema, value))


# Groups


class ModernGroup:
    """The state that all three kinds have, and the methods of `Group` that do not depend on the kind.

    Only records change the state, in the same way whether they are decided, replayed or loaded. The classic protocol is
    refused; only consumer groups accept members that use it.
    """

    __slots__ = ("group_id", "members", "targets", "topics_version")

    kind: ClassVar[str]
    codec: ClassVar[GroupRecordCodec[Any]]
    #: The kinds of timers that a member has.
    member_timers: ClassVar[tuple[str, ...]]

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.members: dict[str, Any] = {}
        self.targets: dict[str, Any] = {}
        #: The version of the topics at the last check. Not stored, so a coordinator that loads the group checks again.
        self.topics_version: int | None = None

    def fork(self) -> Self:
        """A copy to which an operation applies its records before they are replayed."""
        raise NotImplementedError

    def apply(self, kind: Any, name: str, value: Any) -> None:
        """Apply a record. Deleting something that does not exist is harmless, because tombstones stay in the log."""
        raise NotImplementedError

    def record_of(self, kind: Any, name: str, value: Any) -> stored_records.KeyValue:
        """The record of a change; the value None deletes."""
        return self.codec.encode(ModernGroupRecord(kind, self.group_id, name, value))

    def tombstones(self) -> Iterator[stored_records.KeyValue]:
        """The tombstones that delete all records of the group."""
        kinds = self.codec.kinds
        for kind in (kinds.CURRENT_MEMBER_ASSIGNMENT, kinds.TARGET_ASSIGNMENT_MEMBER):
            for member_id in self.members:
                yield self.record_of(kind, member_id, None)
        yield self.record_of(kinds.TARGET_ASSIGNMENT_METADATA, "", None)
        for member_id in self.members:
            yield self.record_of(kinds.MEMBER_METADATA, member_id, None)
        for kind, name in self._other_records():
            yield self.record_of(kind, name, None)
        yield self.record_of(kinds.GROUP_METADATA, "", None)

    def _other_records(self) -> Iterable[tuple[Any, str]]:
        """The type and the name of each record that only this kind of group has."""
        return ()

    @property
    def protocol_name(self) -> str:
        return self.kind

    @property
    def member_count(self) -> int:
        return len(self.members)

    @property
    def is_empty(self) -> bool:
        return not self.members

    @property
    def is_idle(self) -> bool:
        return not self.members

    @property
    def can_be_replaced(self) -> bool:
        return False

    # The classic protocol

    def join(
        self, request: JoinRequest, token: ReplyToken, operation: Operation, *, new_member_id: str
    ) -> None:
        error = ErrorCode.inconsistent_group_protocol
        operation.reply(token, JoinReply(error=error, member_id=request.member_id))

    def sync(self, request: SyncRequest, token: ReplyToken, operation: Operation) -> None:
        operation.reply(token, SyncReply(error=ErrorCode.unknown_member_id))

    def heartbeat(self, request: HeartbeatRequest, operation: Operation) -> ErrorCode:
        return ErrorCode.unknown_member_id

    def leave(self, request: LeaveRequest, operation: Operation) -> LeaveResults:
        return tuple((member, ErrorCode.unknown_member_id) for member in request.members)

    def described(self) -> DescribedGroup | None:
        return None

    # Offsets

    def is_commit_without_member(self, request: CommitRequest, *, is_transactional: bool) -> bool:
        """Whether a client that is not a member may commit."""
        if request.generation >= 0:
            return False
        if self.is_empty:
            return True
        # Older transactional producers do not send the member for which they commit.
        return is_transactional and not request.member_id and request.instance_id is None

    def check_offset_deletion(self) -> ErrorCode:
        return ErrorCode.none

    def retained_from_ms(self, offset: CommittedOffset) -> int | None:
        return offset.commit_timestamp_ms

    # Lifecycle

    def member_committed(self, member_id: str, operation: Operation) -> None:
        """Do nothing: only heartbeats extend the session."""

    def cancel_member_timers(self, timers: Timers[TimerKey], member_id: str) -> None:
        for kind in self.member_timers:
            timers.cancel(TimerKey(kind, self.group_id, member_id))

    def removed(self, timers: Timers[TimerKey]) -> None:
        for member_id in self.members:
            self.cancel_member_timers(timers, member_id)


class SubscribedGroup(ModernGroup):
    """The state that consumer and share groups have: members subscribe to topics and are assigned partitions."""

    __slots__ = ("_subscribed", "epoch", "metadata_hash", "target_epoch")

    targets: dict[str, Assignment]

    def __init__(self, group_id: str) -> None:
        super().__init__(group_id)
        self.epoch = 0
        self.metadata_hash = 0
        self.target_epoch = NO_TARGET_EPOCH
        #: All topics that members subscribe to; None until they are computed again.
        self._subscribed: frozenset[str] | None = None

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.group_id} epoch={self.epoch} target={self.target_epoch}"
            f" members={list(self.members.values())}>"
        )

    def fork(self) -> Self:
        copy = type(self)(self.group_id)
        copy.epoch, copy.metadata_hash, copy.target_epoch = self.epoch, self.metadata_hash, self.target_epoch
        copy.members, copy.targets = dict(self.members), dict(self.targets)
        copy._subscribed, copy.topics_version = self._subscribed, self.topics_version
        return copy

    @property
    def stored(self) -> tuple[object, ...]:
        return (self.epoch, self.metadata_hash, self.target_epoch, dict(self.members), dict(self.targets))


def put_or_remove(values: dict[str, Any], name: str, value: Any) -> None:
    """Apply a record to one of the dictionaries of a group."""
    if value is None:
        values.pop(name, None)
    else:
        values[name] = value


ModernGroupT = TypeVar("ModernGroupT", bound=ModernGroup)


class GroupDraft(Generic[ModernGroupT]):
    __slots__ = ("_is_copy", "_origin", "group_id", "operation", "state")

    def __init__(self, state: ModernGroupT, operation: Operation, *, is_new: bool = False) -> None:
        """`is_new` is true for a state that is in no shard yet, so that it needs no copy."""
        self.group_id = state.group_id
        self.state = state
        self.operation = operation
        self._origin = state
        self._is_copy = is_new

    def change(self, kind: Any, name: str, value: Any) -> None:
        if not self._is_copy:
            self.state, self._is_copy = self.state.fork(), True
        self.state.apply(kind, name, value)
        self.operation.store(self.state.record_of(kind, name, value))

    def remove(self, member_id: str) -> None:
        kinds = self.state.codec.kinds
        for kind in (kinds.CURRENT_MEMBER_ASSIGNMENT, kinds.TARGET_ASSIGNMENT_MEMBER, kinds.MEMBER_METADATA):
            self.change(kind, member_id, None)
        self.state.cancel_member_timers(self.operation.timers, member_id)

    @property
    def topics_unchanged(self) -> bool:
        """Whether the topics are unchanged since the last check for this group."""
        return self._origin.topics_version == self.operation.topics.version

    def mark_topics_seen(self) -> None:
        self._origin.topics_version = self.state.topics_version = self.operation.topics.version


def require_group(
    shard: GroupCoordinatorShard, group_id: str, group_class: type[ModernGroupT]
) -> ModernGroupT:
    """Raises ApiError."""
    group: Group | None = shard.groups.get(group_id)
    if isinstance(group, group_class):
        return group
    flaw = "not found" if group is None else f"is not a {group_class.kind} group"
    raise ApiError(ErrorCode.group_id_not_found, f"Group {group_id} {flaw}.")


def require_member(group: ModernGroup, member_id: str) -> Any:
    """Raises ApiError."""
    member = group.members.get(member_id)
    if member is None:
        message = f"Member {member_id} is not a member of group {group.group_id}."
        raise ApiError(ErrorCode.unknown_member_id, message)
    return member


def check_group_size(group: ModernGroup, size_max: int) -> None:
    """Raises ApiError if the group cannot take another member."""
    if len(group.members) >= size_max:
        message = f"The {group.kind} group has reached its maximum capacity of {size_max} members."
        raise ApiError(ErrorCode.group_max_size_reached, message)


def invalid_request(message: str) -> ApiError:
    return ApiError(ErrorCode.invalid_request, message)


def refuse_blank(**texts: str | None) -> None:
    """Raises ApiError for a text that is present but blank."""
    for name, text in texts.items():
        if text is not None and not text.strip():
            raise invalid_request(f"{name} can't be empty.")


def run_operation(
    shard: GroupCoordinatorShard,
    token: ReplyToken,
    now_ms: int,
    decide: Callable[[Operation], object],
    refuse: Callable[..., object],
) -> GroupResult:
    """Reply with the result of `decide`. If it raises ApiError, reply with `refuse` and discard its records."""
    operation = shard.operation(now_ms)
    try:
        operation.reply(token, decide(operation))
    except ApiError as error:
        return GroupResult(replies=((token, refuse(error=error.code, message=error.message)),))
    return operation.work()


def replay_modern_group(
    group_class: Any, shard: GroupCoordinatorShard, key: bytes, value: bytes | None
) -> None:
    """The tombstone of the group's metadata is the last record of a group."""
    record = group_class.codec.decode(key, value)
    group: Any = shard.groups.get(record.group_id)
    if not isinstance(group, group_class):
        if record.value is None:
            # A tombstone of the group's previous kind, or of a group that no longer exists.
            return
        if group is not None:
            shard.drop(group)
        group = shard.groups[record.group_id] = group_class(record.group_id)
    group.apply(record.kind, record.name, record.value)
    if record.value is None and record.kind is group_class.codec.kinds.GROUP_METADATA:
        shard.drop(group)


_INT64: Final = struct.Struct(">q")
_INT32: Final = struct.Struct(">i")


def metadata_hash(names: Iterable[str], topics: Topics) -> int:
    """A hash of the topics that exist; 0 if there are none."""
    known = [topic for name in sorted(names) if (topic := topics.get(name)) is not None]
    if not known:
        return 0
    digest = blake2b(digest_size=_INT64.size)
    for topic in known:
        digest.update(topic.name.encode())
        digest.update(topic.id.bytes + _INT32.pack(topic.partition_count))
        digest.update(";".join(",".join(sorted(racks)) for racks in topic.racks).encode())
    (number,) = _INT64.unpack(digest.digest())
    return int(number)
