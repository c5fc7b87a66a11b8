"""From one generation to the next: gather the members, then tell them of the new generation."""

from penstock.groups.classic import ClassicGroup
from penstock.groups.member import Member
from penstock.groups.messages import NO_MEMBER_ID, JoinedMember, JoinReply, SyncReply
from penstock.groups.states import State
from penstock.groups.work import Step, Timer
from penstock.protocol.errors import ErrorCode


def rebalance(group: ClassicGroup, step: Step) -> None:
    """Something changed: begin to gather the members, or go on if that was all that was missing."""
    if group.can_rebalance:
        prepare(group, step)
    else:
        try_complete_join(group, step)


def prepare(group: ClassicGroup, step: Step) -> None:
    if group.state is State.COMPLETING_REBALANCE:
        _send_back_syncing(group, step)
    group.unsynced.clear()
    step.timers.cancel(Timer("sync", group.group_id))
    was_empty = group.state is State.EMPTY
    group.move(State.PREPARING_REBALANCE)
    if was_empty:
        _await_first_members(group, step)
    elif group.all_joined:
        complete_join(group, step)
    else:
        step.schedule_in(Timer("join", group.group_id), group.rebalance_timeout_ms)


def try_complete_join(group: ClassicGroup, step: Step) -> None:
    """Before everyone is there: wait. The first rebalance of a group waits for its delay in any case."""
    if group.state is State.PREPARING_REBALANCE and not group.is_initial and group.all_joined:
        complete_join(group, step)


def join_timed_out(group: ClassicGroup, step: Step) -> None:
    if group.is_initial and group.new_member_arrived and group.initial_remaining_ms > 0:
        _extend_initial_delay(group, step)
    else:
        complete_join(group, step)


def complete_join(group: ClassicGroup, step: Step) -> None:
    """Whoever is here makes the next generation. Static members keep their place until their session ends."""
    assert group.state is State.PREPARING_REBALANCE
    step.timers.cancel(Timer("join", group.group_id))
    for member in [m for m in group.members.values() if not m.is_joining and not m.is_static]:
        dismiss(group, member.member_id, step)
    if not group.members:
        step.store_group(group.emptied(step.now_ms))
    elif not group.elect_joined_leader():
        step.schedule_in(Timer("join", group.group_id), group.rebalance_timeout_ms)
    else:
        _begin_generation(group, step)


def sync_timed_out(group: ClassicGroup, step: Step) -> None:
    """Members that never asked for their assignment are gone."""
    if not group.unsynced:
        return
    for member_id in sorted(group.unsynced):
        dismiss(group, member_id, step)
    prepare(group, step)


def synced(group: ClassicGroup, member_id: str, step: Step) -> None:
    group.unsynced.discard(member_id)
    if not group.unsynced:
        step.timers.cancel(Timer("sync", group.group_id))


def dismiss(
    group: ClassicGroup, member_id: str, step: Step, error: ErrorCode = ErrorCode.unknown_member_id
) -> Member | None:
    """Take a member (or an id that was only given out) from the group; if it is waiting, it is told why."""
    step.timers.cancel(Timer("session", group.group_id, member_id))
    member = group.members.get(member_id)
    if member is not None:
        answer_waiting(group, member, step, error, member_id=NO_MEMBER_ID)
    return group.remove(member_id)


def answer_waiting(
    group: ClassicGroup, member: Member, step: Step, error: ErrorCode, *, member_id: str
) -> None:
    if (join_token := group.take_join(member)) is not None:
        step.reply(join_token, JoinReply(error=error, member_id=member_id))
    if member.sync_token is not None:
        step.reply(member.sync_token, SyncReply(error=error))
        member.sync_token = None


def expect_heartbeat(group: ClassicGroup, member: Member, step: Step) -> None:
    step.schedule_in(Timer("session", group.group_id, member.member_id), member.session_timeout_ms)


def joined_reply(group: ClassicGroup, member_id: str) -> JoinReply:
    """The current generation, as this member is to see it: only the leader learns who the others are."""
    assert group.leader is not None
    return JoinReply(
        generation=group.generation,
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        leader=group.leader,
        member_id=member_id,
        members=joined_members(group) if group.leader == member_id else (),
    )


def joined_members(group: ClassicGroup) -> tuple[JoinedMember, ...]:
    assert group.protocol is not None
    return tuple(
        JoinedMember(
            member_id=member.member_id,
            instance_id=member.instance_id,
            metadata=member.metadata(group.protocol),
        )
        for member in group.members.values()
    )


def _begin_generation(group: ClassicGroup, step: Step) -> None:
    group.begin_generation()
    for member in group.members.values():
        if (token := group.take_join(member)) is not None:
            step.reply(token, joined_reply(group, member.member_id))
        member.is_new = False
        expect_heartbeat(group, member, step)
    step.schedule_in(Timer("sync", group.group_id), group.rebalance_timeout_ms)


def _await_first_members(group: ClassicGroup, step: Step) -> None:
    delay_ms = step.settings.initial_rebalance_delay_ms
    group.is_initial = True
    group.new_member_arrived = False
    group.initial_remaining_ms = max(group.rebalance_timeout_ms - delay_ms, 0)
    step.schedule_in(Timer("join", group.group_id), delay_ms)


def _extend_initial_delay(group: ClassicGroup, step: Step) -> None:
    delay_ms = min(step.settings.initial_rebalance_delay_ms, group.initial_remaining_ms)
    group.new_member_arrived = False
    group.initial_remaining_ms -= delay_ms
    step.schedule_in(Timer("join", group.group_id), delay_ms)


def _send_back_syncing(group: ClassicGroup, step: Step) -> None:
    """The assignment that they wait for will not come: they must join again."""
    for member in group.members.values():
        member.assignment = b""
        if member.sync_token is not None:
            step.reply(member.sync_token, SyncReply(error=ErrorCode.rebalance_in_progress))
            member.sync_token = None
            expect_heartbeat(group, member, step)
