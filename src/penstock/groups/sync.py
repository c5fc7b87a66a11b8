"""SyncGroup: the leader hands in the assignment, everyone receives their part of it."""

from penstock.groups.classic import ClassicGroup
from penstock.groups.messages import SyncReply, SyncRequest
from penstock.groups.rebalance import expect_heartbeat, synced
from penstock.groups.states import State
from penstock.groups.work import Step, Token
from penstock.protocol.errors import ErrorCode


def sync(group: ClassicGroup, request: SyncRequest, token: Token, step: Step) -> None:
    error = _check(group, request)
    if error is not ErrorCode.none:
        step.reply(token, SyncReply(error=error))
    elif group.state is State.COMPLETING_REBALANCE:
        _await_assignment(group, request, token, step)
    else:
        assert group.state is State.STABLE
        synced(group, request.member_id, step)
        step.reply(token, _assigned(group, group.members[request.member_id].assignment))


def _check(group: ClassicGroup, request: SyncRequest) -> ErrorCode:
    if group.state is State.EMPTY:
        return ErrorCode.unknown_member_id
    error = group.check_member(request.member_id, request.instance_id)
    if error is not ErrorCode.none:
        return error
    if request.generation != group.generation:
        return ErrorCode.illegal_generation
    if _differs(request.protocol_type, group.protocol_type) or _differs(request.protocol, group.protocol):
        return ErrorCode.inconsistent_group_protocol
    return ErrorCode.rebalance_in_progress if group.state is State.PREPARING_REBALANCE else ErrorCode.none


def _differs(named: str | None, current: str | None) -> bool:
    """Older clients name none."""
    return named is not None and current is not None and named != current


def _await_assignment(group: ClassicGroup, request: SyncRequest, token: Token, step: Step) -> None:
    member = group.members[request.member_id]
    if member.sync_token is not None:
        step.reply(member.sync_token, SyncReply(error=ErrorCode.rebalance_in_progress))
    member.sync_token = token
    synced(group, member.member_id, step)
    if group.leader == member.member_id:
        _accept_assignment(group, dict(request.assignments), step)


def _accept_assignment(group: ClassicGroup, assignments: dict[str, bytes], step: Step) -> None:
    step.store_group(group.assigned(assignments, step.now_ms))
    for member in group.members.values():
        if member.sync_token is not None:
            step.reply(member.sync_token, _assigned(group, assignments.get(member.member_id, b"")))
            member.sync_token = None
            expect_heartbeat(group, member, step)


def _assigned(group: ClassicGroup, assignment: bytes) -> SyncReply:
    return SyncReply(protocol_type=group.protocol_type, protocol=group.protocol, assignment=assignment)
