"""ConsumerGroupHeartbeat: the only request of a member of a consumer group.

In order: the member joins or changes its subscription, the group starts a new epoch if necessary, the coordinator
computes the target assignment for that epoch, and the member takes its next step towards its part of the target.
"""

from penstock.groups.classic.classic_group import ClassicGroup
from penstock.groups.consumer.consumer_group import ConsumerGroup
from penstock.groups.consumer.consumer_group_data import (
    ConsumerGroupData,
    ConsumerGroupDraft,
    schedule_session_timeout,
)
from penstock.groups.consumer.consumer_group_records import ConsumerGroupMember, ConsumerSubscription
from penstock.groups.consumer.membership import (
    ConsumerHeartbeatReply,
    ConsumerHeartbeatRequest,
    check_group_size,
    check_heartbeat_request,
    check_member_epoch,
    join_static_member,
    leave_group,
    require_member,
)
from penstock.groups.consumer.migration import upgrade_to_consumer_group
from penstock.groups.consumer.reconciliation import advance_member, target_due_in_ms
from penstock.groups.group import GroupResult, Operation, ReplyToken
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.modern_group import (
    JOIN_GROUP_MEMBER_EPOCH,
    Assignment,
    require_group,
    run_operation,
)
from penstock.protocol.errors import ApiError, ErrorCode


def consumer_group_heartbeat(
    shard: GroupCoordinatorShard, request: ConsumerHeartbeatRequest, token: ReplyToken, *, now_ms: int
) -> GroupResult:
    def decide(operation: Operation) -> ConsumerHeartbeatReply:
        check_heartbeat_request(request, shard.settings)
        if request.member_epoch < JOIN_GROUP_MEMBER_EPOCH:
            return leave_group(require_group(shard, request.group_id, ConsumerGroup), request, operation)
        return _process_heartbeat(_draft_for(shard, request, operation), request)

    return run_operation(shard, token, now_ms, decide, ConsumerHeartbeatReply)


def _draft_for(
    shard: GroupCoordinatorShard, request: ConsumerHeartbeatRequest, operation: Operation
) -> ConsumerGroupDraft:
    """The group of the heartbeat. A joining member creates it, or converts it to a consumer group."""
    group = shard.groups.get(request.group_id)
    if isinstance(group, ConsumerGroup):
        is_known = request.member_id in group.members or request.instance_id in group.static_ids
        check_group_size(group, is_known, operation)
        return ConsumerGroupDraft(group, operation)
    if request.member_epoch != JOIN_GROUP_MEMBER_EPOCH:
        require_group(shard, request.group_id, ConsumerGroup)
    if group is None or group.can_be_replaced:
        if group is not None and group.stored is not None:
            operation.store_all(group.tombstones())
        return ConsumerGroupDraft(ConsumerGroupData(request.group_id), operation, is_new=True)
    if not isinstance(group, ClassicGroup):
        raise ApiError(ErrorCode.group_id_not_found, f"Group {request.group_id} is not a consumer group.")
    # Checked before the conversion, which replies to the members that wait in the group.
    is_known = request.member_id in group.members or group.static_id(request.instance_id) is not None
    check_group_size(group, is_known, operation)
    return upgrade_to_consumer_group(group, operation)


def _process_heartbeat(
    draft: ConsumerGroupDraft, request: ConsumerHeartbeatRequest
) -> ConsumerHeartbeatReply:
    member = _member_of_request(draft, request)
    before = member.current
    subscription = _updated_subscription(member.subscription, request)
    is_retry = request.member_epoch not in (JOIN_GROUP_MEMBER_EPOCH, before.epoch)
    member = advance_member(
        draft,
        member,
        subscription,
        # A member that missed the last reply may not own the partitions to revoke yet, but be about to take them.
        None if is_retry else _reported_partitions(draft.state, member, request),
        holds_nothing_else=request.member_epoch == JOIN_GROUP_MEMBER_EPOCH,
        target_interval_ms=request.assignment_interval_ms,
    )
    if request.owned is not None:
        draft.state.reported[member.member_id] = request.owned
    schedule_session_timeout(draft.operation, draft.group_id, member, request.session_timeout_ms)
    sends_assignment = is_retry or _is_full_request(request) or before.assigned != member.current.assigned
    return ConsumerHeartbeatReply(
        member_id=member.member_id,
        member_epoch=member.current.epoch,
        heartbeat_interval_ms=_next_heartbeat_ms(draft, request),
        assigned=member.current.assigned if sends_assignment else None,
    )


def _reported_partitions(
    state: ConsumerGroupData, member: ConsumerGroupMember, request: ConsumerHeartbeatRequest
) -> Assignment | None:
    """A member that owns exactly its assignment has nothing to revoke and does not report it again."""
    if request.owned is not None:
        return request.owned
    reported = state.reported.get(member.member_id)
    return reported if reported == member.current.assigned else None


def _next_heartbeat_ms(draft: ConsumerGroupDraft, request: ConsumerHeartbeatRequest) -> int:
    """A member that waits for a postponed target comes back when the target is due."""
    state, interval_ms = draft.state, request.heartbeat_interval_ms
    if state.epoch == state.target_epoch:
        return interval_ms
    due_in_ms = target_due_in_ms(state, request.assignment_interval_ms, draft.operation.now_ms)
    return min(interval_ms, due_in_ms)


def _is_full_request(request: ConsumerHeartbeatRequest) -> bool:
    """A member that joins, or that may have missed a reply, sends all its fields."""
    subscribes = request.topic_names is not None or request.topic_regex is not None
    is_full = request.rebalance_timeout_ms != -1 and subscribes and request.owned is not None
    return request.member_epoch == JOIN_GROUP_MEMBER_EPOCH or is_full


def _member_of_request(draft: ConsumerGroupDraft, request: ConsumerHeartbeatRequest) -> ConsumerGroupMember:
    joins = request.member_epoch == JOIN_GROUP_MEMBER_EPOCH
    if request.instance_id is not None and joins:
        return join_static_member(draft, request.member_id, request.instance_id)
    if joins and request.member_id not in draft.state.members:
        return ConsumerGroupMember(request.member_id)
    member = require_member(draft.state, request.member_id, request.instance_id)
    check_member_epoch(member, request.member_epoch, request.owned)
    return member


def _updated_subscription(
    known: ConsumerSubscription, request: ConsumerHeartbeatRequest
) -> ConsumerSubscription:
    """Fields that the request omits keep their value."""
    names, timeout_ms = request.topic_names, request.rebalance_timeout_ms
    return ConsumerSubscription(
        instance_id=known.instance_id if request.instance_id is None else request.instance_id,
        rack_id=known.rack_id if request.rack_id is None else request.rack_id,
        client_id=request.client_id,
        client_host=request.client_host,
        topic_names=known.topic_names if names is None else tuple(sorted(set(names))),
        topic_regex=known.topic_regex if request.topic_regex is None else request.topic_regex,
        rebalance_timeout_ms=known.rebalance_timeout_ms if timeout_ms == -1 else timeout_ms,
        assignor=known.assignor if request.assignor is None else request.assignor,
    )
