"""The target assignment: who is to have what, worked out anew for the group's last epoch.

That takes time in proportion to members and partitions. Where many join at once it is not done for each of them, but
for all that came during an interval, so that a whole group that restarts costs a few targets.
"""

from uuid import UUID

from penstock.groups.consumer.assignor import Candidate, assignor
from penstock.groups.consumer.draft import Draft
from penstock.groups.consumer.records import Kind
from penstock.groups.consumer.state import GroupState
from penstock.groups.consumer.values import NO_TARGET, NOTHING, TargetEpoch
from penstock.groups.topics import Topic


def target_due_in_ms(state: GroupState, interval_ms: int, now_ms: int) -> int:
    """0 when it is time, too if the clock has been set back."""
    age_ms = now_ms - state.target_timestamp_ms
    has_target = state.target_epoch != NO_TARGET
    return interval_ms - age_ms if has_target and 0 <= age_ms < interval_ms else 0


def update_target(draft: Draft, interval_ms: int) -> None:
    """Records for those whose target has changed, and one that says that it is complete."""
    state, now_ms = draft.state, draft.step.now_ms
    if state.epoch <= state.target_epoch or target_due_in_ms(state, interval_ms, now_ms):
        return
    topics = _topics(draft)
    ids = {topic.name: topic.id for topic in topics.values()}
    known: dict[frozenset[str], frozenset[UUID]] = {}
    members = {}
    for member_id in sorted(state.members):
        member = state.members[member_id]
        names = state.topics_of(member)
        if names not in known:
            known[names] = frozenset(ids[name] for name in names if name in ids)
        target = state.targets.get(member_id, NOTHING)
        members[member_id] = Candidate(known[names], member.subscription.rack_id, target, member.instance_id)
    name = state.preferred_assignor
    if name not in draft.step.settings.consumer_assignors:
        name = draft.step.settings.consumer_assignors[0]
    assert name is not None
    for member_id, target in assignor(name)(members, topics).items():
        if target != members[member_id].target or member_id not in state.targets:
            draft.change(Kind.TARGET, member_id, target)
    draft.change(Kind.TARGET_EPOCH, "", TargetEpoch(state.epoch, now_ms))


def _topics(draft: Draft) -> dict[UUID, Topic]:
    found = (draft.step.topics.get(name) for name in sorted(draft.state.subscribed))
    return {topic.id: topic for topic in found if topic is not None}
