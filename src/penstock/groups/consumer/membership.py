"""Membership in a consumer group: heartbeat checks, leaving, fencing, and members with the classic protocol.

The requests and replies are independent of the wire version. All checks raise ApiError. A member leaves, leaves
temporarily (static members), or is fenced because its session or rebalance timeout has passed. Members with the
classic protocol join, receive the assignment of the coordinator, and send heartbeats; the coordinator tells them to
rejoin whenever they have to revoke or receive partitions. There are no rounds in which all members rejoin.
"""

from dataclasses import dataclass

from penstock.groups.classic.classic_group import ClassicGroup
from penstock.groups.consumer.consumer_group_data import (
    JOIN_TIMER,
    REBALANCE_TIMER,
    SYNC_TIMER,
    ConsumerGroupData,
    ConsumerGroupDraft,
    compile_topic_regex,
    resolve_regular_expressions,
    schedule_session_timeout,
    subscription_hash,
)
from penstock.groups.consumer.consumer_group_records import (
    ConsumerGroupMember,
    ConsumerGroupRecordType,
    ConsumerSubscription,
)
from penstock.groups.consumer.migration import (
    can_downgrade,
    downgrade_to_classic_group,
    embedded_assignment,
    topic_id_partitions,
    with_classic_metadata,
)
from penstock.groups.consumer.reconciliation import advance_member, replace_static
from penstock.groups.embedded_protocol import (
    CONSUMER_PROTOCOL_TYPE,
    EmbeddedSubscription,
    MalformedConsumerProtocol,
    parse_subscription,
)
from penstock.groups.group import (
    NO_MEMBER_ID,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LeaveResults,
    LeavingMember,
    Operation,
    ReplyToken,
    SyncReply,
    SyncRequest,
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
    to_assignment,
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


def handle_classic_join(
    group: ConsumerGroupData,
    request: JoinRequest,
    token: ReplyToken,
    operation: Operation,
    *,
    new_member_id: str,
) -> None:
    member_id = request.member_id or new_member_id
    try:
        is_known = member_id in group.members or request.instance_id in group.static_ids
        check_group_size(group, is_known, operation)
        embedded = _embedded_subscription(group, request)
        if not request.member_id and request.instance_id is None and request.member_id_required:
            # Nothing is stored yet: the client becomes a member when it joins again with the id.
            raise ApiError(ErrorCode.member_id_required)
        if (last := _last_consumer_member_replaced(group, request, operation)) is not None:
            # The classic group then treats the member as a returning static member.
            state = group.fork()
            state.apply(
                ConsumerGroupRecordType.MEMBER_METADATA,
                last.member_id,
                _subscription(last.subscription, embedded, request),
            )
            downgrade_to_classic_group(state, operation).join(
                request, token, operation, new_member_id=new_member_id
            )
            return
        draft = ConsumerGroupDraft(group, operation)
        member = _joining_member(draft, request, member_id, embedded)
    except ApiError as error:
        operation.reply(token, JoinReply(error=error.code, member_id=member_id))
        return
    subscription = _subscription(member.subscription, embedded, request)
    owned = to_assignment(topic_id_partitions(embedded.owned, operation.topics))
    member = advance_member(draft, member, subscription, owned, holds_nothing_else=True)
    _schedule_sync_timeout(group.group_id, member, operation)
    operation.reply(token, _join_reply(member))


def _embedded_subscription(group: ConsumerGroupData, request: JoinRequest) -> EmbeddedSubscription:
    """Raises ApiError."""
    refusal = ApiError(ErrorCode.inconsistent_group_protocol)
    if request.protocol_type != CONSUMER_PROTOCOL_TYPE or not _supports(group, request):
        raise refusal
    try:
        # Assignments are encoded in the version of a subscription, so every subscription must be readable.
        first, *_ = [parse_subscription(metadata) for _, metadata in request.protocols]
    except MalformedConsumerProtocol:
        raise refusal from None
    return first


def _supports(group: ConsumerGroupData, request: JoinRequest) -> bool:
    """Whether all classic members support one of the request's protocols."""
    names = {name for name, _ in request.protocols}
    if len(names) != len(request.protocols):
        return False
    for member_id, member in group.members.items():
        classic = member.subscription.classic
        if classic is not None and member_id != request.member_id:
            names &= {name for name, _ in classic.protocols}
    return bool(names)


def _joining_member(
    draft: ConsumerGroupDraft, request: JoinRequest, member_id: str, embedded: EmbeddedSubscription
) -> ConsumerGroupMember:
    """Raises ApiError."""
    instance_id = request.instance_id
    if instance_id is None:
        known = draft.state.members.get(member_id)
        if known is None and embedded.owned:
            # The member was fenced and does not know it yet: others may own these partitions, so it must abandon them
            # first.
            raise ApiError(ErrorCode.unknown_member_id)
        return known or ConsumerGroupMember(member_id)
    if request.member_id != NO_MEMBER_ID:
        return require_member(draft.state, member_id, instance_id)
    old = draft.state.static_member(instance_id)
    return ConsumerGroupMember(member_id) if old is None else replace_static(draft, old, member_id)


def _subscription(
    known: ConsumerSubscription, embedded: EmbeddedSubscription, request: JoinRequest
) -> ConsumerSubscription:
    base = known._replace(
        instance_id=request.instance_id,
        client_id=request.client_id,
        client_host=request.client_host,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
    )
    return with_classic_metadata(base, embedded, request.protocols, request.session_timeout_ms)


def _last_consumer_member_replaced(
    group: ConsumerGroupData, request: JoinRequest, operation: Operation
) -> ConsumerGroupMember | None:
    """The static member that returns with the classic protocol, if it was the last one without it."""
    old = None if request.instance_id is None else group.static_member(request.instance_id)
    is_last = old is not None and not old.is_classic and can_downgrade(group, operation, others=1)
    return old if is_last and request.member_id == NO_MEMBER_ID else None


def _schedule_sync_timeout(group_id: str, member: ConsumerGroupMember, operation: Operation) -> None:
    operation.timers.cancel(TimerKey(JOIN_TIMER, group_id, member.member_id))
    schedule_session_timeout(operation, group_id, member, operation.settings.consumer_session_timeout_ms)
    operation.schedule_in(
        TimerKey(SYNC_TIMER, group_id, member.member_id), member.subscription.rebalance_timeout_ms
    )


def _join_reply(member: ConsumerGroupMember) -> JoinReply:
    """The reply has no leader, because the coordinator assigns."""
    classic = member.subscription.classic
    assert classic is not None
    return JoinReply(
        generation=member.current.epoch,
        protocol_type=CONSUMER_PROTOCOL_TYPE,
        protocol=classic.protocols[0][0],
        member_id=member.member_id,
    )


def handle_classic_sync(
    group: ConsumerGroupData, request: SyncRequest, token: ReplyToken, operation: Operation
) -> None:
    try:
        member = _require_classic_member(group, request.member_id, request.instance_id)
        _check_sync(group, member, request, operation)
    except ApiError as error:
        operation.reply(token, SyncReply(error=error.code))
        return
    operation.timers.cancel(TimerKey(SYNC_TIMER, group.group_id, member.member_id))
    schedule_session_timeout(
        operation, group.group_id, member, operation.settings.consumer_session_timeout_ms
    )
    reply = SyncReply(
        protocol_type=request.protocol_type,
        protocol=request.protocol,
        assignment=embedded_assignment(member, member.current.assigned, operation.topics),
    )
    operation.reply(token, reply)


def _check_sync(
    group: ConsumerGroupData, member: ConsumerGroupMember, request: SyncRequest, operation: Operation
) -> None:
    """Raises ApiError."""
    classic = member.subscription.classic
    assert classic is not None
    if request.generation != member.current.epoch:
        raise ApiError(ErrorCode.illegal_generation)
    is_other = request.protocol_type not in (None, CONSUMER_PROTOCOL_TYPE)
    if is_other or request.protocol not in (None, classic.protocols[0][0]):
        raise ApiError(ErrorCode.inconsistent_group_protocol)
    if group.epoch > member.current.epoch and member.current.phase is not MemberState.UNREVOKED:
        _schedule_join_timeout(group, member, operation)
        raise ApiError(ErrorCode.rebalance_in_progress)


def handle_classic_heartbeat(
    group: ConsumerGroupData, request: HeartbeatRequest, operation: Operation
) -> ErrorCode:
    try:
        member = _require_classic_member(group, request.member_id, request.instance_id)
    except ApiError as error:
        return error.code
    current = member.current
    if request.generation != current.epoch:
        return ErrorCode.illegal_generation
    schedule_session_timeout(
        operation, group.group_id, member, operation.settings.consumer_session_timeout_ms
    )
    may_get_more = current.phase is MemberState.UNRELEASED and not group.waits_for_others(member)
    if current.epoch < group.epoch or current.phase is MemberState.UNREVOKED or may_get_more:
        _schedule_join_timeout(group, member, operation)
        return ErrorCode.rebalance_in_progress
    return ErrorCode.none


def _schedule_join_timeout(
    group: ConsumerGroupData, member: ConsumerGroupMember, operation: Operation
) -> None:
    """Start the rebalance timeout when the member is first told to rejoin."""
    timer = TimerKey(JOIN_TIMER, group.group_id, member.member_id)
    if operation.timers.deadline_ms(timer) is None:
        operation.schedule_in(timer, member.subscription.rebalance_timeout_ms)


def _require_classic_member(
    group: ConsumerGroupData, member_id: str, instance_id: str | None
) -> ConsumerGroupMember:
    """Raises ApiError."""
    member = require_member(group, member_id, instance_id)
    if not member.is_classic:
        raise ApiError(ErrorCode.unknown_member_id, f"Member {member_id} does not use the classic protocol.")
    return member


def handle_classic_leave(
    group: ConsumerGroupData, request: LeaveRequest, operation: Operation
) -> LeaveResults:
    """Remove members of both protocols, because an administrator removes them with this request too."""
    draft = ConsumerGroupDraft(group, operation)
    results = tuple((leaving, _remove_leaving(draft, leaving)) for leaving in request.members)
    if any(error is ErrorCode.none for _, error in results):
        continue_without_members(draft)
    return results


def _remove_leaving(draft: ConsumerGroupDraft, leaving: LeavingMember) -> ErrorCode:
    member_id = leaving.member_id
    if member_id == NO_MEMBER_ID and leaving.instance_id is not None:
        # An administrator may remove a static member without knowing its id.
        member_id = draft.state.static_ids.get(leaving.instance_id, NO_MEMBER_ID)
    try:
        draft.remove(require_member(draft.state, member_id, leaving.instance_id).member_id)
    except ApiError as error:
        return error.code
    return ErrorCode.none
