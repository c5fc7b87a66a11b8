"""The classic protocol in a consumer group: its members join, are given what the coordinator has for them, and beat.

They are told to join again whenever there is something to give up or to get; there are no rounds in which all meet.
"""

from penstock.groups.consumer.checks import check_room, known_member
from penstock.groups.consumer.classic_part import embedded_assignment, places, with_classic_part
from penstock.groups.consumer.departure import go_on_without
from penstock.groups.consumer.draft import JOIN, SYNC, Draft, expect_heartbeat
from penstock.groups.consumer.embedded import EmbeddedSubscription, Malformed, parse_subscription
from penstock.groups.consumer.migration import downgrade, may_downgrade
from penstock.groups.consumer.progress import advance, replace_static
from penstock.groups.consumer.records import Kind
from penstock.groups.consumer.state import GroupState
from penstock.groups.consumer.values import Member, Phase, Subscription, assignment
from penstock.groups.messages import (
    NO_MEMBER_ID,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LeaveResults,
    LeavingMember,
    SyncReply,
    SyncRequest,
)
from penstock.groups.subscription import CONSUMER_PROTOCOL_TYPE
from penstock.groups.work import Step, Timer, Token
from penstock.protocol.errors import ApiError, ErrorCode


def join(group: GroupState, request: JoinRequest, token: Token, step: Step, *, new_member_id: str) -> None:
    member_id = request.member_id or new_member_id
    try:
        has_place = member_id in group.members or request.instance_id in group.static_ids
        check_room(group, has_place, step)
        embedded = _embedded(group, request)
        if not request.member_id and request.instance_id is None and request.member_id_required:
            # Nothing is kept for it: it is a member when it comes back with the id.
            raise ApiError(ErrorCode.member_id_required)
        if (last := _last_to_be_replaced(group, request, step)) is not None:
            # As a classic group it takes the member as one that returns.
            state = group.fork()
            state.apply(
                Kind.SUBSCRIPTION, last.member_id, _subscription(last.subscription, embedded, request)
            )
            downgrade(state, step).join(request, token, step, new_member_id=new_member_id)
            return
        draft = Draft(group, step)
        member = _joining(draft, request, member_id, embedded)
    except ApiError as error:
        step.reply(token, JoinReply(error=error.code, member_id=member_id))
        return
    subscription = _subscription(member.subscription, embedded, request)
    owned = assignment(places(embedded.owned, step.topics))
    member = advance(draft, member, subscription, owned, holds_nothing_else=True)
    _await_sync(group.group_id, member, step)
    step.reply(token, _joined(member))


def _embedded(group: GroupState, request: JoinRequest) -> EmbeddedSubscription:
    """Raises ApiError."""
    refusal = ApiError(ErrorCode.inconsistent_group_protocol)
    if request.protocol_type != CONSUMER_PROTOCOL_TYPE or not _supports(group, request):
        raise refusal
    try:
        # What is written into an assignment depends on every one of them being readable.
        first, *_ = [parse_subscription(metadata) for _, metadata in request.protocols]
    except Malformed:
        raise refusal from None
    return first


def _supports(group: GroupState, request: JoinRequest) -> bool:
    """Some protocol of the request is one that all classic members know."""
    names = {name for name, _ in request.protocols}
    if len(names) != len(request.protocols):
        return False
    for member_id, member in group.members.items():
        classic = member.subscription.classic
        if classic is not None and member_id != request.member_id:
            names &= {name for name, _ in classic.protocols}
    return bool(names)


def _joining(draft: Draft, request: JoinRequest, member_id: str, embedded: EmbeddedSubscription) -> Member:
    """Raises ApiError."""
    instance_id = request.instance_id
    if instance_id is None:
        known = draft.state.members.get(member_id)
        if known is None and embedded.owned:
            # It was fenced and does not know it yet: others may own these partitions, so it must abandon them first.
            raise ApiError(ErrorCode.unknown_member_id)
        return known or Member(member_id)
    if request.member_id != NO_MEMBER_ID:
        return known_member(draft.state, member_id, instance_id)
    old = draft.state.static_member(instance_id)
    return Member(member_id) if old is None else replace_static(draft, old, member_id)


def _subscription(known: Subscription, embedded: EmbeddedSubscription, request: JoinRequest) -> Subscription:
    base = known._replace(
        instance_id=request.instance_id,
        client_id=request.client_id,
        client_host=request.client_host,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
    )
    return with_classic_part(base, embedded, request.protocols, request.session_timeout_ms)


def _last_to_be_replaced(group: GroupState, request: JoinRequest, step: Step) -> Member | None:
    """The static member that comes back with the classic protocol, if it was the last without it."""
    old = None if request.instance_id is None else group.static_member(request.instance_id)
    is_last = old is not None and not old.is_classic and may_downgrade(group, step, others=1)
    return old if is_last and request.member_id == NO_MEMBER_ID else None


def _await_sync(group_id: str, member: Member, step: Step) -> None:
    step.timers.cancel(Timer(JOIN, group_id, member.member_id))
    expect_heartbeat(step, group_id, member, step.settings.consumer_session_timeout_ms)
    step.schedule_in(Timer(SYNC, group_id, member.member_id), member.subscription.rebalance_timeout_ms)


def _joined(member: Member) -> JoinReply:
    """Nobody leads: the coordinator assigns."""
    classic = member.subscription.classic
    assert classic is not None
    return JoinReply(
        generation=member.current.epoch,
        protocol_type=CONSUMER_PROTOCOL_TYPE,
        protocol=classic.protocols[0][0],
        member_id=member.member_id,
    )


def sync(group: GroupState, request: SyncRequest, token: Token, step: Step) -> None:
    try:
        member = _classic_member(group, request.member_id, request.instance_id)
        _check_sync(group, member, request, step)
    except ApiError as error:
        step.reply(token, SyncReply(error=error.code))
        return
    step.timers.cancel(Timer(SYNC, group.group_id, member.member_id))
    expect_heartbeat(step, group.group_id, member, step.settings.consumer_session_timeout_ms)
    reply = SyncReply(
        protocol_type=request.protocol_type,
        protocol=request.protocol,
        assignment=embedded_assignment(member, member.current.assigned, step.topics),
    )
    step.reply(token, reply)


def _check_sync(group: GroupState, member: Member, request: SyncRequest, step: Step) -> None:
    """Raises ApiError."""
    classic = member.subscription.classic
    assert classic is not None
    if request.generation != member.current.epoch:
        raise ApiError(ErrorCode.illegal_generation)
    is_other = request.protocol_type not in (None, CONSUMER_PROTOCOL_TYPE)
    if is_other or request.protocol not in (None, classic.protocols[0][0]):
        raise ApiError(ErrorCode.inconsistent_group_protocol)
    if group.epoch > member.current.epoch and member.current.phase is not Phase.UNREVOKED:
        _await_join(group, member, step)
        raise ApiError(ErrorCode.rebalance_in_progress)


def heartbeat(group: GroupState, request: HeartbeatRequest, step: Step) -> ErrorCode:
    try:
        member = _classic_member(group, request.member_id, request.instance_id)
    except ApiError as error:
        return error.code
    current = member.current
    if request.generation != current.epoch:
        return ErrorCode.illegal_generation
    expect_heartbeat(step, group.group_id, member, step.settings.consumer_session_timeout_ms)
    may_get_more = current.phase is Phase.UNRELEASED and not group.waits_for_others(member)
    if current.epoch < group.epoch or current.phase is Phase.UNREVOKED or may_get_more:
        _await_join(group, member, step)
        return ErrorCode.rebalance_in_progress
    return ErrorCode.none


def _await_join(group: GroupState, member: Member, step: Step) -> None:
    """It was called; it has its rebalance timeout from the first call."""
    timer = Timer(JOIN, group.group_id, member.member_id)
    if step.timers.deadline_ms(timer) is None:
        step.schedule_in(timer, member.subscription.rebalance_timeout_ms)


def _classic_member(group: GroupState, member_id: str, instance_id: str | None) -> Member:
    """Raises ApiError."""
    member = known_member(group, member_id, instance_id)
    if not member.is_classic:
        raise ApiError(ErrorCode.unknown_member_id, f"Member {member_id} does not use the classic protocol.")
    return member


def leave(group: GroupState, request: LeaveRequest, step: Step) -> LeaveResults:
    """Members of either protocol: an administrator removes them with the same request that classic members leave by."""
    draft = Draft(group, step)
    results = tuple((leaving, _leave_one(draft, leaving)) for leaving in request.members)
    if any(error is ErrorCode.none for _, error in results):
        go_on_without(draft)
    return results


def _leave_one(draft: Draft, leaving: LeavingMember) -> ErrorCode:
    member_id = leaving.member_id
    if member_id == NO_MEMBER_ID and leaving.instance_id is not None:
        # An administrator may remove a static member without knowing its id.
        member_id = draft.state.static_ids.get(leaving.instance_id, NO_MEMBER_ID)
    try:
        draft.remove(known_member(draft.state, member_id, leaving.instance_id))
    except ApiError as error:
        return error.code
    return ErrorCode.none
