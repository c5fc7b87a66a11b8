"""From what a member has to what it is to have, one safe step at a time.

A member first lets go of what it must not keep, and says so; then it is given the next epoch, with those of its new
partitions that nobody holds; the others follow as they are let go of. A partition is never told to a member while
another one holds it.

Kafka takes a member's word that it does not own what it was assigned a moment ago. A member may say so while it is
about to take it, so here it is first told to revoke it, in an epoch of its own, and confirms that in this epoch.
Kafka revokes in the member's old epoch; then a member that missed the reply and has not yet taken its assignment looks
like one that has revoked it.
"""

from penstock.groups.consumer.state import GroupState
from penstock.groups.consumer.values import (
    Assignment,
    Current,
    Member,
    Phase,
    overlap,
    union,
    without,
)


def reconcile(
    state: GroupState,
    member: Member,
    target: Assignment,
    owned: Assignment | None,
    *,
    holds_nothing_else: bool,
) -> Current:
    """`owned` is what the member says it has, knowing its current epoch; None when it says nothing.

    `holds_nothing_else` is true where that is a promise too: it joins, and will take nothing that it was told before.
    """
    current = member.current
    if current.is_settled(state.target_epoch):
        return current
    if current.phase is Phase.UNREVOKED and (owned is None or overlap(owned, current.revoking)):
        return current
    kept = {
        topic_id: partitions & target.get(topic_id, frozenset())
        for topic_id, partitions in current.assigned.items()
    }
    kept = {topic_id: partitions for topic_id, partitions in kept.items() if partitions}
    revoking = without(current.assigned, kept)
    if revoking and not (holds_nothing_else and owned is not None and not overlap(owned, revoking)):
        return current.moved(current.epoch + 1, Phase.UNREVOKED, kept, revoking)
    return _advance(state, member, kept, target)


def _advance(state: GroupState, member: Member, kept: Assignment, target: Assignment) -> Current:
    """To the target's epoch, with everything in it that is free."""
    wanted = without(target, kept)
    free = {
        topic_id: frozenset(
            partition for partition in partitions if state.is_free(topic_id, partition, member.member_id)
        )
        for topic_id, partitions in wanted.items()
    }
    free = {topic_id: partitions for topic_id, partitions in free.items() if partitions}
    phase = Phase.STABLE if free == wanted else Phase.UNRELEASED
    return member.current.moved(state.target_epoch, phase, union(kept, free))
