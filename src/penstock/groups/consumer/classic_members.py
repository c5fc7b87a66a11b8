"""Members of a consumer group that speak the classic protocol.

They join, receive the assignment of the coordinator, and send heartbeats; the coordinator tells them to rejoin whenever
they have to revoke or receive partitions. There are no rounds in which all members rejoin.
"""

from penstock.groups.consumer.consumer_group_data import (
    JOIN_TIMER,
    SYNC_TIMER,
    ConsumerGroupData,
    ConsumerGroupDraft,
    schedule_session_timeout,
)
from penstock.groups.consumer.consumer_group_records import (
    ConsumerGroupMember,
    ConsumerGroupRecordType,
    ConsumerSubscription,
)
from penstock.groups.consumer.membership import (
    check_group_size,
    continue_without_members,
    replace_static,
    require_member,
)
from penstock.groups.consumer.migration import (
    can_downgrade,
    downgrade_to_classic_group,
    embedded_assignment,
    topic_id_partitions,
    with_classic_metadata,
)
from penstock.groups.consumer.reconciliation import advance_member
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
from penstock.groups.modern_group import (
    MemberState,
    to_assignment,
)
from penstock.groups.timers import TimerKey
from penstock.protocol.errors import ApiError, ErrorCode


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
