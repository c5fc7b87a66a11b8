"""Which share partitions a group needs, and what is still to be done so that it has them."""

from uuid import UUID

from penstock.groups.consumer.values import Assignment
from penstock.groups.share.draft import Draft
from penstock.groups.share.messages import Upkeep
from penstock.groups.share.state import GroupState
from penstock.groups.topics import Topics


def refresh_states(draft: Draft) -> None:
    """What is subscribed to and has no state is to get one; topics that are gone have taken theirs with them."""
    topics = draft.step.topics
    states = draft.state.states
    gone = frozenset(topic_id for topic_id in states.names if topics.by_id(topic_id) is None)
    if gone:
        states = states.forget(gone)
    missing: dict[UUID, frozenset[int]] = {}
    names: dict[UUID, str] = {}
    for name in sorted(draft.state.subscribed):
        topic = topics.get(name)
        if topic is None or topic.id in states.deleting:
            continue
        places = topic.every_partition - states.of_topic(topic.id)
        if places:
            missing[topic.id], names[topic.id] = places, name
    if missing:
        states = states.initialize(missing, names)
    draft.change_states(states)


def upkeep_of(state: GroupState, topics: Topics) -> Upkeep | None:
    """All that is not done, whoever may have begun with it already: doing it twice is harmless."""
    states = state.states
    if not states.initializing and not states.deleting:
        return None
    return Upkeep(state.epoch, every_place(states.deleting, topics), states.initializing)


def every_place(topic_ids: frozenset[UUID], topics: Topics) -> Assignment:
    """Of a topic whose state is being deleted, it is not stored which partitions had one."""
    return {
        topic_id: frozenset() if (topic := topics.by_id(topic_id)) is None else topic.every_partition
        for topic_id in sorted(topic_ids)
    }
