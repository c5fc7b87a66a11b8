"""The target assignment of a consumer group, and the safe steps by which a member moves to its part of it.

The target is computed for the latest group epoch. That takes time in proportion to members and partitions. If many
members join at once, the target is computed once for all members that joined during an interval, so a restart of a
whole group costs a few computations.

A member first revokes the partitions that it must not keep, and confirms that. Then it gets the next epoch with those
of its new partitions that no other member holds; the others follow when they are released. A partition is never
assigned to a member while another member holds it.

Kafka believes a member that reports that it does not own what it was assigned a moment ago. But the member may report
that just before it takes the partition. Therefore this coordinator first tells the member to revoke the partition, in
a separate epoch, and the member confirms in this epoch. Kafka revokes in the member's old epoch; then a member that
missed the reply and has not yet taken its assignment looks like a member that has revoked it.
"""

from uuid import UUID

from penstock.groups.consumer.assignors import ConsumerAssignorMember, consumer_assignor
from penstock.groups.consumer.consumer_group_data import (
    REBALANCE_TIMER,
    ConsumerGroupData,
    ConsumerGroupDraft,
    resolve_regular_expressions,
    subscription_hash,
)
from penstock.groups.consumer.consumer_group_records import (
    ConsumerCurrentAssignment,
    ConsumerGroupMember,
    ConsumerGroupRecordType,
    ConsumerSubscription,
)
from penstock.groups.modern_group import (
    NO_PARTITIONS,
    NO_TARGET_EPOCH,
    Assignment,
    MemberState,
    TargetAssignmentEpoch,
    difference,
    overlaps,
    union,
)
from penstock.groups.timers import TimerKey
from penstock.groups.topics import Topic


def target_due_in_ms(state: ConsumerGroupData, interval_ms: int, now_ms: int) -> int:
    """0 if the target is due, also if the clock was set back."""
    age_ms = now_ms - state.target_timestamp_ms
    has_target = state.target_epoch != NO_TARGET_EPOCH
    return interval_ms - age_ms if has_target and 0 <= age_ms < interval_ms else 0


def update_target_assignment(draft: ConsumerGroupDraft, interval_ms: int) -> None:
    """Store each target that has changed, and then the target epoch, which marks the target as complete."""
    state, now_ms = draft.state, draft.operation.now_ms
    if state.epoch <= state.target_epoch or target_due_in_ms(state, interval_ms, now_ms):
        return
    topics = _subscribed_topics(draft)
    ids = {topic.name: topic.id for topic in topics.values()}
    known: dict[frozenset[str], frozenset[UUID]] = {}
    members = {}
    for member_id in sorted(state.members):
        member = state.members[member_id]
        names = state.topics_of(member)
        if names not in known:
            known[names] = frozenset(ids[name] for name in names if name in ids)
        target = state.targets.get(member_id, NO_PARTITIONS)
        members[member_id] = ConsumerAssignorMember(
            known[names], member.subscription.rack_id, target, member.instance_id
        )
    name = state.preferred_assignor
    if name not in draft.operation.settings.consumer_assignors:
        name = draft.operation.settings.consumer_assignors[0]
    assert name is not None
    for member_id, target in consumer_assignor(name)(members, topics).items():
        if target != members[member_id].target or member_id not in state.targets:
            draft.change(ConsumerGroupRecordType.TARGET_ASSIGNMENT_MEMBER, member_id, target)
    draft.change(
        ConsumerGroupRecordType.TARGET_ASSIGNMENT_METADATA, "", TargetAssignmentEpoch(state.epoch, now_ms)
    )


def _subscribed_topics(draft: ConsumerGroupDraft) -> dict[UUID, Topic]:
    found = (draft.operation.topics.get(name) for name in sorted(draft.state.subscribed))
    return {topic.id: topic for topic in found if topic is not None}


def reconcile(
    state: ConsumerGroupData,
    member: ConsumerGroupMember,
    target: Assignment,
    owned: Assignment | None,
    *,
    holds_nothing_else: bool,
) -> ConsumerCurrentAssignment:
    """`owned` is what the member reports as owned in its current epoch; None if it reports nothing.

    If `holds_nothing_else` is true, the report is also a promise: the member joins, and will take no partition of an
    earlier assignment.
    """
    current = member.current
    if current.is_settled(state.target_epoch):
        return current
    if current.phase is MemberState.UNREVOKED and (owned is None or overlaps(owned, current.revoking)):
        return current
    kept = {
        topic_id: partitions & target.get(topic_id, frozenset())
        for topic_id, partitions in current.assigned.items()
    }
    kept = {topic_id: partitions for topic_id, partitions in kept.items() if partitions}
    revoking = difference(current.assigned, kept)
    if revoking and not (holds_nothing_else and owned is not None and not overlaps(owned, revoking)):
        return current.moved(current.epoch + 1, MemberState.UNREVOKED, kept, revoking)
    return _advance_to_target_epoch(state, member, kept, target)


def _advance_to_target_epoch(
    state: ConsumerGroupData, member: ConsumerGroupMember, kept: Assignment, target: Assignment
) -> ConsumerCurrentAssignment:
    """Move the member to the target epoch, with all partitions of its target that are free."""
    wanted = difference(target, kept)
    free = {
        topic_id: frozenset(
            partition for partition in partitions if state.is_free(topic_id, partition, member.member_id)
        )
        for topic_id, partitions in wanted.items()
    }
    free = {topic_id: partitions for topic_id, partitions in free.items() if partitions}
    phase = MemberState.STABLE if free == wanted else MemberState.UNRELEASED
    return member.current.moved(state.target_epoch, phase, union(kept, free))


def advance_member(
    draft: ConsumerGroupDraft,
    member: ConsumerGroupMember,
    subscription: ConsumerSubscription,
    owned: Assignment | None,
    *,
    holds_nothing_else: bool,
    target_interval_ms: int = 0,
) -> ConsumerGroupMember:
    """Update the subscription, the target and the assignment of `member`, which may be new. Return the new member."""
    old = member.subscription
    is_new = member.member_id not in draft.state.members
    if subscription != old or is_new:
        draft.change(ConsumerGroupRecordType.MEMBER_METADATA, member.member_id, subscription)
    is_other = (subscription.topic_names, subscription.topic_regex) != (old.topic_names, old.topic_regex)
    refresh_subscribed_topics(draft, begins_epoch=is_other or is_new)
    # A member that changes its subscription must not get partitions that it no longer wants.
    resubscribes = is_other and bool(old.topic_names or old.topic_regex)
    update_target_assignment(draft, 0 if resubscribes else target_interval_ms)
    return _reconcile_member(draft, member.member_id, owned, holds_nothing_else=holds_nothing_else)


def refresh_subscribed_topics(draft: ConsumerGroupDraft, *, begins_epoch: bool) -> None:
    """Check the topics again if they or the subscriptions may have changed since the last check."""
    if draft.topics_unchanged and not begins_epoch:
        return
    resolve_regular_expressions(draft)
    number = subscription_hash(draft)
    if begins_epoch or number != draft.state.metadata_hash:
        draft.begin_epoch(number)
    operation = draft.operation
    if operation.may_describe is not None or not operation.settings.hides_topics:
        draft.mark_topics_seen()


def _reconcile_member(
    draft: ConsumerGroupDraft, member_id: str, owned: Assignment | None, *, holds_nothing_else: bool
) -> ConsumerGroupMember:
    state = draft.state
    member = state.members[member_id]
    if member.current.is_settled(state.target_epoch):
        return member
    target = state.targets.get(member_id, NO_PARTITIONS)
    current = reconcile(state, member, target, owned, holds_nothing_else=holds_nothing_else)
    if current == member.current:
        return member
    if not member.is_classic:
        timer = TimerKey(REBALANCE_TIMER, draft.group_id, member_id)
        if current.phase is MemberState.UNREVOKED:
            draft.operation.schedule_in(timer, member.subscription.rebalance_timeout_ms)
        else:
            draft.operation.timers.cancel(timer)
    return draft.tell(member, current)
