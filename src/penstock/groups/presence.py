"""Heartbeats, departures and silence: how the group learns that a member is there, or no longer."""

from penstock.groups.classic import ClassicGroup
from penstock.groups.messages import NO_MEMBER_ID, HeartbeatRequest, LeaveRequest, LeavingMember
from penstock.groups.rebalance import dismiss, expect_heartbeat, rebalance, try_complete_join
from penstock.groups.states import State
from penstock.groups.work import Step
from penstock.protocol.errors import ErrorCode


def heartbeat(group: ClassicGroup, request: HeartbeatRequest, step: Step) -> ErrorCode:
    error = group.check_member(request.member_id, request.instance_id)
    if error is not ErrorCode.none:
        return error
    if request.generation != group.generation:
        return ErrorCode.illegal_generation
    expect_heartbeat(group, group.members[request.member_id], step)
    return ErrorCode.rebalance_in_progress if group.state is State.PREPARING_REBALANCE else ErrorCode.none


def leave(
    group: ClassicGroup, request: LeaveRequest, step: Step
) -> tuple[tuple[LeavingMember, ErrorCode], ...]:
    size_before = len(group.members)
    results = tuple((member, _leave_one(group, member, step)) for member in request.members)
    if len(group.members) < size_before:
        rebalance(group, step)
    else:
        try_complete_join(group, step)
    return results


def session_timed_out(group: ClassicGroup, member_id: str, step: Step) -> None:
    member = group.members.get(member_id)
    if member is not None and member.needs_no_heartbeat:
        return
    dismiss(group, member_id, step)
    if member is not None:
        rebalance(group, step)
    else:
        try_complete_join(group, step)


def _leave_one(group: ClassicGroup, leaving: LeavingMember, step: Step) -> ErrorCode:
    member_id = leaving.member_id
    if member_id == NO_MEMBER_ID:
        # An operator may remove a static member without knowing its id.
        member_id = group.static_id(leaving.instance_id) or NO_MEMBER_ID
    if member_id not in group.pending:
        error = group.check_member(member_id, leaving.instance_id)
        if error is not ErrorCode.none:
            return error
    dismiss(group, member_id, step)
    return ErrorCode.none
