"""ConsumerGroupHeartbeat: one request for everything that a member of a consumer group says and hears.

In order: the member joins or changes its subscription, the group begins a new epoch if that matters, the target is
worked out for it, and the member takes its next step towards its part of the target.
"""

from penstock.groups.classic_kind import Classic
from penstock.groups.consumer.checks import check_epoch, check_request, check_room, known_member
from penstock.groups.consumer.departure import leave
from penstock.groups.consumer.draft import Draft, expect_heartbeat
from penstock.groups.consumer.group import ConsumerGroup
from penstock.groups.consumer.messages import ConsumerHeartbeat, ConsumerHeartbeatReply
from penstock.groups.consumer.migration import upgraded
from penstock.groups.consumer.progress import advance, replace_static
from penstock.groups.consumer.state import GroupState
from penstock.groups.consumer.target import target_due_in_ms
from penstock.groups.consumer.values import AWAY, JOINING, Assignment, Member, Subscription
from penstock.groups.shard import GroupShard
from penstock.groups.work import Step, Token, Work
from penstock.protocol.errors import ApiError, ErrorCode


def heartbeat(shard: GroupShard, request: ConsumerHeartbeat, token: Token, *, now_ms: int) -> Work:
    step = shard.step(now_ms)
    try:
        check_request(request, shard.settings)
        if request.member_epoch < JOINING:
            reply = leave(_existing(shard, request.group_id), request, step)
        else:
            reply = _beat(_open(shard, request, step), request)
    except ApiError as error:
        # What was noted before it was found out is not to be written.
        refusal = ConsumerHeartbeatReply(error=error.code, message=error.message)
        return Work(replies=((token, refusal),))
    step.reply(token, reply)
    return step.work()


def _existing(shard: GroupShard, group_id: str) -> ConsumerGroup:
    group = shard.groups.get(group_id)
    if not isinstance(group, ConsumerGroup):
        raise ApiError(ErrorCode.group_id_not_found, f"Consumer group {group_id} not found.")
    return group


def _open(shard: GroupShard, request: ConsumerHeartbeat, step: Step) -> Draft:
    """The group to beat in: it is made, or made a consumer group, for a member that joins."""
    group = shard.groups.get(request.group_id)
    if isinstance(group, ConsumerGroup):
        has_place = request.member_id in group.members or request.instance_id in group.static_ids
        check_room(group, has_place, step)
        return Draft(group, step)
    if request.member_epoch != JOINING:
        _existing(shard, request.group_id)
    if group is None or group.gives_way:
        if group is not None and group.stored is not None:
            step.store_all(group.tombstones())
        return Draft(GroupState(request.group_id), step, is_new=True)
    if not isinstance(group, Classic):
        raise ApiError(ErrorCode.group_id_not_found, f"Group {request.group_id} is not a consumer group.")
    # Before it is changed: who waits in it is answered only if this is taken.
    has_place = request.member_id in group.members or group.static_id(request.instance_id) is not None
    check_room(group, has_place, step)
    return upgraded(group, step)


def _beat(draft: Draft, request: ConsumerHeartbeat) -> ConsumerHeartbeatReply:
    member = _sender(draft, request)
    before = member.current
    subscription = _subscription(member.subscription, request)
    is_retry = request.member_epoch not in (JOINING, before.epoch)
    member = advance(
        draft,
        member,
        subscription,
        # A member that missed the last reply may own nothing of what it is to revoke, and be about to take it.
        None if is_retry else _owned(draft.state, member, request),
        holds_nothing_else=request.member_epoch == JOINING,
        target_interval_ms=request.assignment_interval_ms,
    )
    if request.owned is not None:
        draft.state.reported[member.member_id] = request.owned
    expect_heartbeat(draft.step, draft.group_id, member, request.session_timeout_ms)
    is_told = is_retry or _wants_all(request) or before.assigned != member.current.assigned
    return ConsumerHeartbeatReply(
        member_id=member.member_id,
        member_epoch=member.current.epoch,
        heartbeat_interval_ms=_next_beat_in_ms(draft, request),
        assigned=member.current.assigned if is_told else None,
    )


def _owned(state: GroupState, member: Member, request: ConsumerHeartbeat) -> Assignment | None:
    """A member that already owns just what it is assigned has nothing to revoke, and reports no change."""
    if request.owned is not None:
        return request.owned
    reported = state.reported.get(member.member_id)
    return reported if reported == member.current.assigned else None


def _next_beat_in_ms(draft: Draft, request: ConsumerHeartbeat) -> int:
    """Who waits for a target that is put off comes back when it is due."""
    state, interval_ms = draft.state, request.heartbeat_interval_ms
    if state.epoch == state.target_epoch:
        return interval_ms
    due_in_ms = target_due_in_ms(state, request.assignment_interval_ms, draft.step.now_ms)
    return min(interval_ms, due_in_ms)


def _wants_all(request: ConsumerHeartbeat) -> bool:
    """A member that joins, or is not sure what was heard of its last requests, sends everything that it has."""
    subscribes = request.topic_names is not None or request.topic_regex is not None
    is_full = request.rebalance_timeout_ms != -1 and subscribes and request.owned is not None
    return request.member_epoch == JOINING or is_full


def _sender(draft: Draft, request: ConsumerHeartbeat) -> Member:
    joins = request.member_epoch == JOINING
    if request.instance_id is not None and joins:
        return _joining_static(draft, request.member_id, request.instance_id)
    if joins and request.member_id not in draft.state.members:
        return Member(request.member_id)
    member = known_member(draft.state, request.member_id, request.instance_id)
    check_epoch(member, request.member_epoch, request.owned)
    return member


def _joining_static(draft: Draft, member_id: str, instance_id: str) -> Member:
    old = draft.state.static_member(instance_id)
    if old is None:
        return draft.state.members.get(member_id) or Member(member_id)
    if old.member_id == member_id:
        return old
    if old.current.epoch != AWAY and not old.is_classic:
        message = (
            f"Static member {member_id} with instance id {instance_id} cannot join the group because the instance id "
            f"is owned by {old.member_id} member."
        )
        raise ApiError(ErrorCode.unreleased_instance_id, message)
    return replace_static(draft, old, member_id)


def _subscription(known: Subscription, request: ConsumerHeartbeat) -> Subscription:
    """What is not said is as it was."""
    names, timeout_ms = request.topic_names, request.rebalance_timeout_ms
    return Subscription(
        instance_id=known.instance_id if request.instance_id is None else request.instance_id,
        rack_id=known.rack_id if request.rack_id is None else request.rack_id,
        client_id=request.client_id,
        client_host=request.client_host,
        topic_names=known.topic_names if names is None else tuple(sorted(set(names))),
        topic_regex=known.topic_regex if request.topic_regex is None else request.topic_regex,
        rebalance_timeout_ms=known.rebalance_timeout_ms if timeout_ms == -1 else timeout_ms,
        assignor=known.assignor if request.assignor is None else request.assignor,
    )
