"""The target assignment: who is to have what, worked out anew for every epoch of the group."""

from uuid import UUID

from penstock.groups.consumer.assignor import Candidate, assignor
from penstock.groups.consumer.draft import Draft
from penstock.groups.consumer.records import Kind
from penstock.groups.consumer.values import NOTHING
from penstock.groups.topics import Topic


def update_target(draft: Draft) -> None:
    """Records for those whose target has changed, and one that says that it is complete."""
    state = draft.state
    if state.epoch <= state.target_epoch:
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
    draft.change(Kind.TARGET_EPOCH, "", state.epoch)


def _topics(draft: Draft) -> dict[UUID, Topic]:
    found = (draft.step.topics.get(name) for name in sorted(draft.state.subscribed))
    return {topic.id: topic for topic in found if topic is not None}
