"""A group in use changes its protocol without losing who has what: classic to consumer, and back.

The first member that joins with the consumer protocol makes it a consumer group, in which the others go on with the
classic protocol. When the last such member has gone, it becomes a classic group again.
"""

from typing import Final
from uuid import UUID

from penstock.groups.classic_kind import Classic
from penstock.groups.consumer.classic_part import embedded_assignment, places, with_classic_part
from penstock.groups.consumer.draft import Draft, cancel_timers, expect_heartbeat
from penstock.groups.consumer.embedded import Malformed, parse_assignment, parse_subscription
from penstock.groups.consumer.records import Kind
from penstock.groups.consumer.state import GroupState
from penstock.groups.consumer.values import (
    Current,
    GroupEpoch,
    Member,
    Phase,
    Subscription,
    TargetEpoch,
    assignment,
)
from penstock.groups.member import Member as ClassicMember
from penstock.groups.rebalance import answer_waiting, prepare
from penstock.groups.records import GroupRecord, StoredGroup, StoredMember
from penstock.groups.subscription import CONSUMER_PROTOCOL_TYPE
from penstock.groups.topics import Topics
from penstock.groups.work import Step
from penstock.protocol.errors import ApiError, ErrorCode

_UPGRADES: Final = ("upgrade", "bidirectional")
_DOWNGRADES: Final = ("downgrade", "bidirectional")


# --- classic to consumer ---


def upgraded(group: Classic, step: Step) -> Draft:
    """Raises ApiError when this group may not be one. Members that wait are sent to join again."""
    settings = step.settings
    is_allowed = (
        settings.consumer_migration_policy in _UPGRADES
        and group.is_consumer_group
        and len(group.members) <= settings.consumer_size_max
    )
    if not is_allowed:
        raise _refusal(group, "is not a consumer group")
    members = _members(group, step.topics)
    for waiting in group.members.values():
        error = ErrorCode.rebalance_in_progress
        answer_waiting(group, waiting, step, error, member_id=waiting.member_id)
    step.store_all(group.tombstones())
    draft = Draft(GroupState(group.group_id), step, is_new=True)
    _install(draft, group.generation, members)
    return draft


def _refusal(group: Classic, why: str) -> ApiError:
    return ApiError(ErrorCode.group_id_not_found, f"Group {group.group_id} {why}.")


def _install(draft: Draft, epoch: int, members: list[Member]) -> None:
    for member in members:
        draft.change(Kind.SUBSCRIPTION, member.member_id, member.subscription)
    draft.change(Kind.GROUP_EPOCH, "", GroupEpoch(epoch))
    for member in members:
        draft.change(Kind.TARGET, member.member_id, member.current.assigned)
    draft.change(Kind.TARGET_EPOCH, "", TargetEpoch(epoch))
    for member in members:
        draft.change(Kind.CURRENT, member.member_id, member.current)
        expect_heartbeat(draft.step, draft.group_id, member, draft.step.settings.consumer_session_timeout_ms)


def _members(group: Classic, topics: Topics) -> list[Member]:
    """Raises ApiError. What was stored last is what members may still have, however far a rebalance has come."""
    stored = (
        {} if group.stored is None else {each.member_id: each.assignment for each in group.stored.members}
    )
    taken: set[tuple[UUID, int]] = set()
    members = []
    for member in group.members.values():
        try:
            has = parse_assignment(stored.get(member.member_id, b""))
            subscription = _subscription(group, member)
        except Malformed:
            why = "cannot be a consumer group because the embedded consumer protocol is malformed"
            raise _refusal(group, why) from None
        # An assignor of the members' own may have given a partition to two of them.
        held = [place for place in places(has, topics) if place not in taken]
        taken.update(held)
        current = Current(group.generation).moved(group.generation, Phase.STABLE, assignment(held))
        members.append(Member(member.member_id, subscription, current))
    return members


def _subscription(group: Classic, member: ClassicMember) -> Subscription:
    """Raises Malformed."""
    protocols = dict(member.protocols)
    metadata = protocols.get(group.protocol or "", next(iter(protocols.values())))
    known = Subscription(
        instance_id=member.instance_id,
        client_id=member.client_id,
        client_host=member.client_host,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
    )
    embedded = parse_subscription(metadata)
    return with_classic_part(known, embedded, member.protocols, member.session_timeout_ms)


# --- consumer to classic ---


def may_downgrade(state: GroupState, step: Step, *, others: int = 0) -> bool:
    """Whether all but so many of those that are left speak the classic protocol, and may have such a group."""
    settings, members = step.settings, state.members
    return (
        bool(members)
        and state.classic_count == len(members) - others
        and settings.consumer_migration_policy in _DOWNGRADES
        and len(members) <= settings.size_max
    )


def downgrade(state: GroupState, step: Step) -> Classic:
    """Everyone is called to join again; until then they keep what they were told.

    No record that the group had something may precede this in the same step, only that it has it no longer: when they
    are replayed the group is a classic one already.
    """
    step.store_all(state.tombstones())
    for member_id in state.members:
        cancel_timers(step.timers, state.group_id, member_id)
    stored = _stored(state, step)
    group = Classic(state.group_id)
    group.install(stored)
    # In the group's place at once: the rebalance that begins here is in no record.
    step.groups[state.group_id] = group
    step.store_group(GroupRecord(group=state.group_id, value=stored))
    group.loaded(step)
    prepare(group, step)
    return group


def _stored(state: GroupState, step: Step) -> StoredGroup:
    protocol = _protocol(state)
    return StoredGroup(
        protocol_type=CONSUMER_PROTOCOL_TYPE,
        generation=state.epoch,
        protocol=protocol,
        leader=next(iter(state.members)),
        state_timestamp_ms=step.now_ms,
        members=tuple(_stored_member(member, protocol, step.topics) for member in state.members.values()),
    )


def _protocol(state: GroupState) -> str:
    """The first that all support: members were let in only if there is one."""
    parts = [member.subscription.classic for member in state.members.values()]
    names = [{name for name, _ in part.protocols} for part in parts if part is not None]
    first = parts[0]
    assert first is not None
    return next(name for name, _ in first.protocols if all(name in each for each in names))


def _stored_member(member: Member, protocol: str, topics: Topics) -> StoredMember:
    subscription = member.subscription
    assert subscription.classic is not None
    return StoredMember(
        member_id=member.member_id,
        instance_id=subscription.instance_id,
        client_id=subscription.client_id,
        client_host=subscription.client_host,
        rebalance_timeout_ms=subscription.rebalance_timeout_ms,
        session_timeout_ms=subscription.classic.session_timeout_ms,
        subscription=dict(subscription.classic.protocols)[protocol],
        assignment=embedded_assignment(member, member.current.assigned, topics),
    )
