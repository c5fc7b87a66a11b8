"""JoinGroup: who is let in, under which id, and whether that starts a rebalance."""

from dataclasses import replace

from penstock.groups.classic import ClassicGroup
from penstock.groups.member import Member
from penstock.groups.messages import NO_MEMBER_ID, JoinReply, JoinRequest
from penstock.groups.rebalance import (
    answer_waiting,
    dismiss,
    expect_heartbeat,
    joined_members,
    joined_reply,
    prepare,
    rebalance,
    try_complete_join,
)
from penstock.groups.states import State
from penstock.groups.work import Step, Timer, Token
from penstock.protocol.errors import ErrorCode


def join(group: ClassicGroup, request: JoinRequest, token: Token, step: Step, *, new_member_id: str) -> None:
    if not _has_room(group, request, step.settings.size_max):
        _turn_away(group, request, token, step)
    elif not group.supports(request.protocol_type, request.protocols):
        _refuse(request, token, step, ErrorCode.inconsistent_group_protocol)
    elif request.member_id != NO_MEMBER_ID:
        _join_known(group, request, token, step)
    elif request.instance_id is None:
        _join_new_dynamic(group, request, token, step, new_member_id)
    elif (old_id := group.static_id(request.instance_id)) is None:
        _admit(group, request, token, step, new_member_id)
    else:
        _join_returning_static(group, request, token, step, old_id, new_member_id)


def _has_room(group: ClassicGroup, request: JoinRequest, size_max: int) -> bool:
    known = group.members.get(request.member_id or group.static_id(request.instance_id) or NO_MEMBER_ID)
    match group.state:
        case State.PREPARING_REBALANCE:
            # Counted by who is back, so that a group over its limit loses those that come last.
            return (known is not None and known.is_joining) or group.joining_count < size_max
        case State.COMPLETING_REBALANCE | State.STABLE:
            return known is not None or len(group.members) < size_max
        case _:
            return True


def _turn_away(group: ClassicGroup, request: JoinRequest, token: Token, step: Step) -> None:
    step.reply(token, JoinReply(error=ErrorCode.group_max_size_reached))
    if request.member_id != NO_MEMBER_ID:
        dismiss(group, request.member_id, step)
        try_complete_join(group, step)


def _refuse(request: JoinRequest, token: Token, step: Step, error: ErrorCode) -> None:
    step.reply(token, JoinReply(error=error, member_id=request.member_id))


def _join_new_dynamic(
    group: ClassicGroup, request: JoinRequest, token: Token, step: Step, new_member_id: str
) -> None:
    if not request.member_id_required:
        _admit(group, request, token, step, new_member_id)
        return
    if len(group.pending) >= step.settings.size_max:
        _refuse(request, token, step, ErrorCode.group_max_size_reached)
        return
    # The second round makes sure that the id reached its owner: a lost reply leaves no member behind.
    group.pending.add(new_member_id)
    step.schedule_in(Timer("session", group.group_id, new_member_id), request.session_timeout_ms)
    step.reply(token, JoinReply(error=ErrorCode.member_id_required, member_id=new_member_id))


def _join_known(group: ClassicGroup, request: JoinRequest, token: Token, step: Step) -> None:
    if request.member_id in group.pending and request.instance_id is None:
        _admit(group, request, token, step, request.member_id)
        return
    error = group.check_member(request.member_id, request.instance_id)
    if error is not ErrorCode.none:
        _refuse(request, token, step, error)
        return
    member = group.members[request.member_id]
    if _must_rebalance(group, member, request):
        _rejoin(group, member, request, token, step)
        rebalance(group, step)
    else:
        step.reply(token, joined_reply(group, member.member_id))


def _must_rebalance(group: ClassicGroup, member: Member, request: JoinRequest) -> bool:
    if group.state is State.PREPARING_REBALANCE or member.protocols != request.protocols:
        return True
    # The leader rejoins without a change of its own when the topics have changed.
    return group.state is State.STABLE and group.leader == member.member_id


def _admit(group: ClassicGroup, request: JoinRequest, token: Token, step: Step, member_id: str) -> None:
    member = Member.joining(request, member_id)
    group.new_member_arrived = group.is_initial
    group.add(member, request.protocol_type)
    group.park_join(member, token)
    timer = Timer("session", group.group_id, member_id)
    step.schedule_in(timer, step.settings.new_member_join_timeout_ms)
    rebalance(group, step)


def _rejoin(group: ClassicGroup, member: Member, request: JoinRequest, token: Token, step: Step) -> None:
    """A member has one request in flight: an older one that still waits was given up by its sender."""
    answer_waiting(group, member, step, ErrorCode.rebalance_in_progress, member_id=member.member_id)
    group.update(member, request)
    group.park_join(member, token)


def _join_returning_static(
    group: ClassicGroup, request: JoinRequest, token: Token, step: Step, old_id: str, new_id: str
) -> None:
    """The instance is back under a new id: whoever still uses the old one is fenced, whatever the state."""
    old_leader = group.leader
    answer_waiting(group, group.members[old_id], step, ErrorCode.fenced_instance_id, member_id=old_id)
    step.timers.cancel(Timer("session", group.group_id, old_id))
    member = group.replace_static(old_id, new_id)
    group.update(member, request)
    expect_heartbeat(group, member, step)
    if group.state is State.STABLE and group.choose_protocol() == group.protocol:
        _keep_assignment(group, member, request, token, step, old_leader or "")
        return
    if (renamed := group.renamed(old_id, new_id)) is not None:
        # If the shard is lost during this rebalance, the new id must not be the one that is fenced.
        step.store_group(renamed)
    group.park_join(member, token)
    if group.state is State.PREPARING_REBALANCE:
        try_complete_join(group, step)
    else:
        # The leader may be assigning to the old id just now, so everyone must join again.
        prepare(group, step)


def _keep_assignment(
    group: ClassicGroup, member: Member, request: JoinRequest, token: Token, step: Step, old_leader: str
) -> None:
    """No rebalance: the new id takes over the old one's assignment, and that is all that is stored."""
    assignments = {each.member_id: each.assignment for each in group.members.values()}
    step.store_group(group.assigned(assignments, step.now_ms))
    reply = joined_reply(group, member.member_id)
    is_leader = group.leader == member.member_id
    if not request.can_skip_assignment:
        # Older clients would assign anew if they were told that they lead.
        reply = replace(reply, leader=old_leader, members=())
    elif is_leader:
        reply = replace(reply, skip_assignment=True, members=joined_members(group))
    step.reply(token, reply)
