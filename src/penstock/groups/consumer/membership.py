"""Membership in a consumer group: heartbeat checks, static members, leaving and fencing.

The requests and replies are independent of the wire version. All checks raise ApiError. A member leaves, leaves
temporarily (static members), or is fenced because its session or rebalance timeout has passed. A static member that
comes back gets a new member id and keeps its assignment.
"""

from dataclasses import dataclass

from penstock.groups.classic.classic_group import ClassicGroup
from penstock.groups.consumer.consumer_group_data import (
    REBALANCE_TIMER,
    ConsumerGroupData,
    ConsumerGroupDraft,
    compile_topic_regex,
    resolve_regular_expressions,
    subscription_hash,
)
from penstock.groups.consumer.consumer_group_records import (
    ConsumerGroupMember,
    ConsumerGroupRecordType,
)
from penstock.groups.consumer.migration import (
    can_downgrade,
    downgrade_to_classic_group,
)
from penstock.groups.group import (
    Operation,
)
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.modern_group import (
    JOIN_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_STATIC_MEMBER_EPOCH,
    NO_PARTITIONS,
    Assignment,
    MemberState,
    ModernHeartbeatReply,
    invalid_request,
    is_within,
    refuse_blank,
    union,
)
from penstock.groups.timers import TimerKey
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.stored_records import can_store


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerHeartbeatRequest:
    """None (or -1) means that a field has not changed since the last heartbeat."""

    group_id: str
    member_id: str
    member_epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topic_names: tuple[str, ...] | None = None
    topic_regex: str | None = None
    assignor: str | None = None
    owned: Assignment | None = None
    #: The current settings of the group.
    session_timeout_ms: int
    heartbeat_interval_ms: int
    assignment_interval_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerHeartbeatReply(ModernHeartbeatReply):
    #: None if it has not changed since the last reply.
    assigned: Assignment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedConsumerMember:
    member_id: str
    instance_id: str | None
    rack_id: str | None
    member_epoch: int
    client_id: str
    client_host: str
    topic_names: tuple[str, ...]
    topic_regex: str | None
    assigned: Assignment
    target: Assignment
    is_classic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedConsumerGroup:
    group_id: str
    state: str
    epoch: int
    target_epoch: int
    assignor: str
    members: tuple[DescribedConsumerMember, ...] = ()


def check_heartbeat_request(request: ConsumerHeartbeatRequest, settings: GroupCoordinatorConfig) -> None:
    refuse_blank(
        GroupId=request.group_id,
        MemberId=request.member_id,
        InstanceId=request.instance_id,
        RackId=request.rack_id,
    )
    if request.member_epoch == JOIN_GROUP_MEMBER_EPOCH:
        _check_join_request(request)
    elif request.member_epoch == LEAVE_GROUP_STATIC_MEMBER_EPOCH and request.instance_id is None:
        raise invalid_request("InstanceId can't be null.")
    elif request.member_epoch < LEAVE_GROUP_STATIC_MEMBER_EPOCH:
        raise invalid_request("MemberEpoch is invalid.")
    names = request.topic_names or ()
    texts = (request.instance_id, request.rack_id, request.client_id, request.topic_regex, *names)
    if not can_store(request.group_id, request.member_id, *(text for text in texts if text is not None)):
        raise invalid_request("A name is too long to be stored.")
    if request.assignor is not None and request.assignor not in settings.consumer_assignors:
        supported = ", ".join(settings.consumer_assignors)
        message = f"ServerAssignor {request.assignor} is not supported. Supported assignors: {supported}."
        raise ApiError(ErrorCode.unsupported_assignor, message)
    if request.topic_regex and request.member_epoch not in (
        LEAVE_GROUP_MEMBER_EPOCH,
        LEAVE_GROUP_STATIC_MEMBER_EPOCH,
    ):
        compile_topic_regex(request.topic_regex)


def _check_join_request(request: ConsumerHeartbeatRequest) -> None:
    if request.rebalance_timeout_ms == -1:
        raise invalid_request("RebalanceTimeoutMs must be provided in first request.")
    if request.owned is None or request.owned:
        raise invalid_request("TopicPartitions must be empty when (re-)joining.")
    if request.topic_names is None and request.topic_regex is None:
        raise invalid_request(
            "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining."
        )


def check_group_size(group: ConsumerGroupData | ClassicGroup, is_known: bool, operation: Operation) -> None:
    """A static member that returns under another id counts as known."""
    size_max = operation.settings.consumer_size_max
    if len(group.members) >= size_max and not is_known:
        message = f"The consumer group has reached its maximum capacity of {size_max} members."
        raise ApiError(ErrorCode.group_max_size_reached, message)


def check_member_epoch(member: ConsumerGroupMember, epoch: int, owned: Assignment | None) -> None:
    """A member one epoch behind missed the last reply, and gets it again if it owns no partitions of other members."""
    current = member.current
    if epoch in (JOIN_GROUP_MEMBER_EPOCH, current.epoch):
        return
    has_own = owned is not None and is_within(owned, union(current.assigned, current.revoking))
    is_retry = epoch == current.previous_epoch and has_own
    if epoch > current.epoch or not is_retry:
        than = "greater" if epoch > current.epoch else "smaller"
        message = (
            f"The consumer group member has a {than} member epoch ({epoch}) than the one known by the group "
            f"coordinator ({current.epoch}). The member must abandon all its partitions and rejoin."
        )
        raise ApiError(ErrorCode.fenced_member_epoch, message)


def require_member(state: ConsumerGroupData, member_id: str, instance_id: str | None) -> ConsumerGroupMember:
    member = state.members.get(member_id) if instance_id is None else state.static_member(instance_id)
    if member is None:
        what = f"Member {member_id}" if instance_id is None else f"Instance id {instance_id}"
        message = f"{what} is not a member of group {state.group_id}."
        raise ApiError(ErrorCode.unknown_member_id, message)
    if member.member_id != member_id:
        message = f"Static member {member_id} with instance id {instance_id} was fenced by member {member.member_id}."
        raise ApiError(ErrorCode.fenced_instance_id, message)
    return member


def join_static_member(draft: ConsumerGroupDraft, member_id: str, instance_id: str) -> ConsumerGroupMember:
    old = draft.state.static_member(instance_id)
    if old is None:
        return draft.state.members.get(member_id) or ConsumerGroupMember(member_id)
    if old.member_id == member_id:
        return old
    if old.current.epoch != LEAVE_GROUP_STATIC_MEMBER_EPOCH and not old.is_classic:
        message = (
            f"Static member {member_id} with instance id {instance_id} cannot join the group because the instance id "
            f"is owned by {old.member_id} member."
        )
        raise ApiError(ErrorCode.unreleased_instance_id, message)
    return replace_static(draft, old, member_id)


def replace_static(
    draft: ConsumerGroupDraft, old: ConsumerGroupMember, member_id: str
) -> ConsumerGroupMember:
    """Give the static member another id; it keeps its assignment. Requests with the old id are fenced."""
    target = draft.state.targets.get(old.member_id)
    draft.remove(old.member_id)
    draft.change(ConsumerGroupRecordType.MEMBER_METADATA, member_id, old.subscription)
    if target is not None:
        draft.change(ConsumerGroupRecordType.TARGET_ASSIGNMENT_MEMBER, member_id, target)
    new = draft.state.members[member_id]
    return draft.tell(
        new, old.current._replace(epoch=JOIN_GROUP_MEMBER_EPOCH, previous_epoch=JOIN_GROUP_MEMBER_EPOCH)
    )


def leave_group(
    group: ConsumerGroupData, request: ConsumerHeartbeatRequest, operation: Operation
) -> ConsumerHeartbeatReply:
    """Raises ApiError."""
    member = require_member(group, request.member_id, request.instance_id)
    if request.member_epoch == LEAVE_GROUP_STATIC_MEMBER_EPOCH:
        # The assignment stays reserved until the session ends; revocations are complete, because the member is gone.
        away = member.current._replace(
            epoch=LEAVE_GROUP_STATIC_MEMBER_EPOCH, phase=MemberState.STABLE, revoking=NO_PARTITIONS
        )
        ConsumerGroupDraft(group, operation).tell(member, away)
        operation.timers.cancel(TimerKey(REBALANCE_TIMER, group.group_id, member.member_id))
    else:
        fence_member(group, member, operation)
    return ConsumerHeartbeatReply(member_id=request.member_id, member_epoch=request.member_epoch)


def fence_member(group: ConsumerGroupData, member: ConsumerGroupMember, operation: Operation) -> None:
    """Remove the member; its partitions are free from now on."""
    draft = ConsumerGroupDraft(group, operation)
    draft.remove(member.member_id)
    continue_without_members(draft)


def continue_without_members(draft: ConsumerGroupDraft) -> None:
    """Convert the group to a classic group if only members with the classic protocol remain.

    Otherwise start a new epoch; the next heartbeat computes the target assignment.
    """
    if can_downgrade(draft.state, draft.operation):
        downgrade_to_classic_group(draft.state, draft.operation)
        return
    resolve_regular_expressions(draft)
    draft.begin_epoch(subscription_hash(draft))
