"""A share group as one kind of group in the shard: its data, and its messages.

Only records change the data, in the same way whether they are decided, replayed or loaded. Messages are independent of
the wire version.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Self
from uuid import UUID

from penstock.groups.group import CommitRequest, Operation
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.modern_group import (
    NO_PARTITIONS,
    NO_TARGET_EPOCH,
    Assignment,
    GroupDraft,
    GroupEpoch,
    GroupRecordCodec,
    ModernHeartbeatReply,
    SubscribedGroup,
    metadata_hash,
    put_or_remove,
    require_group,
)
from penstock.groups.share.share_group_records import (
    NO_STATE_PARTITIONS,
    SHARE_GROUP_CODEC,
    ShareCurrentAssignment,
    ShareGroupMember,
    ShareGroupRecordType,
    ShareSubscription,
    StatePartitionMetadata,
)
from penstock.groups.timers import TimerKey
from penstock.groups.topics import Topics
from penstock.protocol.errors import ErrorCode

NO_TOPIC_NAMES: Final[Mapping[UUID, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareHeartbeatRequest:
    """None means that a field has not changed since the last heartbeat."""

    group_id: str
    member_id: str
    member_epoch: int
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topic_names: tuple[str, ...] | None = None
    #: The current settings of the group.
    session_timeout_ms: int
    heartbeat_interval_ms: int


class PendingStateChanges(NamedTuple):
    """What remains to be done at the share coordinator before the group can read; deletions come first."""

    #: The group epoch at the decision. States are initialized with it, which distinguishes them from older states.
    epoch: int
    delete: Assignment = NO_PARTITIONS
    initialize: Assignment = NO_PARTITIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareHeartbeatReply(ModernHeartbeatReply):
    #: None if it has not changed since the last reply.
    assigned: Assignment | None = None
    upkeep: PendingStateChanges | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedShareMember:
    member_id: str
    rack_id: str | None
    member_epoch: int
    client_id: str
    client_host: str
    topic_names: tuple[str, ...]
    assigned: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedShareGroup:
    group_id: str
    state: str
    epoch: int
    target_epoch: int
    assignor: str
    members: tuple[DescribedShareMember, ...] = ()


#: Start offsets by topic name and partition.
StartOffsets = Mapping[str, Mapping[int, int]]


class AlterShareOffsetsReply(NamedTuple):
    """The states of `partitions` may now be initialized again with `epoch`; other requested partitions do not exist."""

    error: ErrorCode = ErrorCode.none
    message: str | None = None
    epoch: int = 0
    partitions: Assignment = NO_PARTITIONS
    #: A state that is still being deleted cannot be initialized: complete the deletion and retry.
    waits_for_deletion: bool = False


class DeleteShareOffsetsReply(NamedTuple):
    """Delete the states of `partitions` unless they were initialized after `epoch`. Other partitions have no state."""

    error: ErrorCode = ErrorCode.none
    message: str | None = None
    epoch: int = 0
    partitions: Assignment = NO_PARTITIONS
    names: Mapping[UUID, str] = NO_TOPIC_NAMES


SESSION_TIMER: Final = "share session"
SIMPLE_ASSIGNOR: Final = "simple"


class ShareGroup(SubscribedGroup):
    __slots__ = ("states",)

    kind: ClassVar[str] = "share"
    codec: ClassVar[GroupRecordCodec[Any]] = SHARE_GROUP_CODEC
    member_timers: ClassVar[tuple[str, ...]] = (SESSION_TIMER,)
    members: dict[str, ShareGroupMember]

    def __init__(self, group_id: str) -> None:
        super().__init__(group_id)
        self.states: StatePartitionMetadata = NO_STATE_PARTITIONS

    def fork(self) -> Self:
        copy = super().fork()
        copy.states = self.states
        return copy

    @property
    def subscribed(self) -> frozenset[str]:
        if self._subscribed is None:
            subscriptions = {member.subscription.topic_names for member in self.members.values()}
            self._subscribed = frozenset().union(*subscriptions)
        return self._subscribed

    def _other_records(self) -> Iterable[tuple[ShareGroupRecordType, str]]:
        return ((ShareGroupRecordType.STATE_PARTITION_METADATA, ""),)

    # Changes

    def apply(self, kind: ShareGroupRecordType, name: str, value: Any) -> None:
        match kind:
            case ShareGroupRecordType.GROUP_METADATA:
                self.epoch, self.metadata_hash = value or GroupEpoch(0)
            case ShareGroupRecordType.TARGET_ASSIGNMENT_METADATA:
                self.target_epoch = NO_TARGET_EPOCH if value is None else value
            case ShareGroupRecordType.TARGET_ASSIGNMENT_MEMBER:
                put_or_remove(self.targets, name, value)
            case ShareGroupRecordType.MEMBER_METADATA:
                self._subscribe(name, value)
            case ShareGroupRecordType.CURRENT_MEMBER_ASSIGNMENT:
                self._set_current(name, value)
            case ShareGroupRecordType.STATE_PARTITION_METADATA:
                self.states = NO_STATE_PARTITIONS if value is None else value
                # The next check of the topics finds partitions that now lack a state.
                self.topics_version = None

    def _subscribe(self, member_id: str, subscription: ShareSubscription | None) -> None:
        self._subscribed = None
        if subscription is None:
            self.members.pop(member_id, None)
        else:
            member = self.members.get(member_id) or ShareGroupMember(member_id)
            self.members[member_id] = member._replace(subscription=subscription)

    def _set_current(self, member_id: str, current: ShareCurrentAssignment | None) -> None:
        """After compaction the log may have a member's assignment before its subscription."""
        member = self.members.get(member_id)
        if current is not None:
            self.members[member_id] = (member or ShareGroupMember(member_id))._replace(current=current)
        elif member is not None:
            self.members[member_id] = member._replace(current=ShareCurrentAssignment())

    # Properties

    @property
    def state_name(self) -> str:
        return "Stable" if self.members else "Empty"

    @property
    def is_empty(self) -> bool:
        """The state of the share partitions must be deleted before the group can be."""
        return not self.members and self.states.is_empty

    @property
    def is_idle(self) -> bool:
        """Never: the group's offsets are in the state of its share partitions, and do not expire."""
        return False

    @property
    def stored(self) -> tuple[object, ...]:
        return (*super().stored, self.states)

    def description(self) -> DescribedShareGroup:
        return DescribedShareGroup(
            group_id=self.group_id,
            state=self.state_name,
            epoch=self.epoch,
            target_epoch=self.target_epoch,
            assignor=SIMPLE_ASSIGNOR,
            members=tuple(_described_member(member) for member in self.members.values()),
        )

    # Committed offsets, which share groups do not have

    def check_commit(
        self, request: CommitRequest, topics: Topics, *, is_transactional: bool = False
    ) -> ErrorCode:
        return ErrorCode.group_id_not_found

    def needs_member_epoch(self, member_id: str) -> bool:
        return False

    def check_fetch(self, member_id: str | None, epoch: int) -> ErrorCode:
        return ErrorCode.group_id_not_found

    def check_offset_deletion(self) -> ErrorCode:
        return ErrorCode.group_id_not_found

    def is_subscribed(self, topic: str) -> bool:
        return topic in self.subscribed

    # Lifecycle

    def loaded(self, operation: Operation) -> None:
        timeout_ms = operation.config_of(self.group_id).share_session_timeout_ms
        for member_id in self.members:
            operation.schedule_in(session_timer(self.group_id, member_id), timeout_ms)

    def time_out(self, timer: TimerKey, operation: Operation) -> None:
        member = self.members.get(timer.member_id)
        if member is not None and timer.kind == SESSION_TIMER:
            fence_member(self, member, operation)


class ShareGroupDraft(GroupDraft[ShareGroup]):
    __slots__ = ()

    def begin_epoch(self, metadata_hash: int | None = None) -> None:
        if metadata_hash is None:
            metadata_hash = self.state.metadata_hash
        self.change(ShareGroupRecordType.GROUP_METADATA, "", GroupEpoch(self.state.epoch + 1, metadata_hash))

    def change_states(self, states: StatePartitionMetadata) -> None:
        if states != self.state.states:
            self.change(
                ShareGroupRecordType.STATE_PARTITION_METADATA, "", None if states.is_empty else states
            )


def session_timer(group_id: str, member_id: str) -> TimerKey:
    return TimerKey(SESSION_TIMER, group_id, member_id)


def _described_member(member: ShareGroupMember) -> DescribedShareMember:
    subscription = member.subscription
    return DescribedShareMember(
        member_id=member.member_id,
        rack_id=subscription.rack_id,
        member_epoch=member.current.epoch,
        client_id=subscription.client_id,
        client_host=subscription.client_host,
        topic_names=subscription.topic_names,
        assigned=member.current.assigned,
    )


def describe_share_group(shard: GroupCoordinatorShard, group_id: str) -> DescribedShareGroup:
    """Raises ApiError."""
    return require_group(shard, group_id, ShareGroup).description()


def fence_member(group: ShareGroup, member: ShareGroupMember, operation: Operation) -> None:
    """Remove the member. Other members get its partitions with their next heartbeats."""
    draft = ShareGroupDraft(group, operation)
    draft.remove(member.member_id)
    draft.begin_epoch(metadata_hash(draft.state.subscribed, operation.topics))
