"""What administrators do to the positions of a share group, and what the share coordinator has done for it.

The state itself is kept by the share coordinator. Here it is decided what happens to it, and noted how far that is, so
that whoever coordinates the group next goes on with it.
"""

from collections.abc import Iterable
from uuid import UUID

from penstock.groups.consumer.values import NOTHING, Assignment, union
from penstock.groups.shard import GroupShard
from penstock.groups.share.draft import Draft
from penstock.groups.share.group import ShareGroup, existing
from penstock.groups.share.messages import AlterReply, DeleteReply, StartOffsets, Upkeep
from penstock.groups.share.places import every_place, upkeep_of
from penstock.groups.share.state import GroupState
from penstock.groups.work import Step, Token, Work
from penstock.protocol.errors import ApiError, ErrorCode

# What the share coordinator has done


def initialized(shard: GroupShard, group_id: str, places: Assignment, token: Token, *, now_ms: int) -> Work:
    """These have a state now: a new epoch spreads them over the members."""
    step, group = shard.step(now_ms), shard.groups.get(group_id)
    if isinstance(group, ShareGroup):
        states = group.states.initialization_done(places)
        if states != group.states:
            draft = Draft(group, step)
            draft.change_states(states)
            draft.begin_epoch()
    step.reply(token, None)
    return step.work()


def deleted(
    shard: GroupShard, group_id: str, topic_ids: Iterable[UUID], token: Token, *, now_ms: int
) -> Work:
    """No partition of these topics has a state any more. One that is begun from now on has a later epoch than that."""
    step, group = shard.step(now_ms), shard.groups.get(group_id)
    if isinstance(group, ShareGroup):
        states = group.states.deletion_done(topic_ids)
        if states != group.states:
            draft = Draft(group, step)
            draft.change_states(states)
            draft.begin_epoch()
    step.reply(token, None)
    return step.work()


# What administrators ask for


def begin_alter(
    shard: GroupShard, group_id: str, offsets: StartOffsets, token: Token, *, now_ms: int
) -> Work:
    """Answered with an AlterReply. A group that does not exist is made."""
    step = shard.step(now_ms)
    try:
        reply = _alter(_to_alter(shard, group_id, step), offsets)
    except ApiError as error:
        return Work(replies=((token, AlterReply(error=error.code, message=error.message)),))
    step.reply(token, reply)
    return step.work()


def _to_alter(shard: GroupShard, group_id: str, step: Step) -> Draft:
    if group_id not in shard.groups:
        return Draft(GroupState(group_id), step, is_new=True)
    return Draft(_unused(shard, group_id), step)


def _unused(shard: GroupShard, group_id: str) -> ShareGroup:
    group = existing(shard, group_id)
    if group.members:
        raise ApiError(ErrorCode.non_empty_group, f"Group {group_id} is not empty.")
    return group


def _alter(draft: Draft, offsets: StartOffsets) -> AlterReply:
    topics, states = draft.step.topics, draft.state.states
    places: dict[UUID, frozenset[int]] = {}
    names: dict[UUID, str] = {}
    for name, by_partition in offsets.items():
        topic = topics.get(name)
        known = frozenset() if topic is None else topic.every_partition.intersection(by_partition)
        if topic is not None and known:
            places[topic.id], names[topic.id] = known, name
    if not places:
        return AlterReply()
    if not states.deleting.isdisjoint(places):
        return AlterReply(waits_for_deletion=True)
    draft.change_states(states.initialize(places, names))
    # States are begun anew with it, so that who still has the old one is told apart.
    draft.begin_epoch()
    return AlterReply(epoch=draft.state.epoch, places=places)


def begin_delete(
    shard: GroupShard, group_id: str, topic_names: Iterable[str] | None, token: Token, *, now_ms: int
) -> Work:
    """Answered with a DeleteReply. None for the names is all that the group has."""
    step = shard.step(now_ms)
    try:
        reply = _delete(Draft(_unused(shard, group_id), step), topic_names)
    except ApiError as error:
        return Work(replies=((token, DeleteReply(error=error.code, message=error.message)),))
    step.reply(token, reply)
    return step.work()


def _delete(draft: Draft, topic_names: Iterable[str] | None) -> DeleteReply:
    states, topics = draft.state.states, draft.step.topics
    names = dict(states.names)
    if topic_names is not None:
        found = (topics.get(name) for name in topic_names)
        names = {topic.id: topic.name for topic in found if topic is not None and topic.id in states.names}
    draft.change_states(states.delete(names))
    # What is known to have a state, and what may have had one when a deletion began before.
    known = {topic_id: states.of_topic(topic_id) for topic_id in names}
    again = every_place(states.deleting.intersection(names), topics)
    return DeleteReply(epoch=draft.state.epoch, places=union(known, again), names=names)


# Questions


def upkeep_now(shard: GroupShard, group_id: str) -> Upkeep | None:
    group = shard.groups.get(group_id)
    return upkeep_of(group, shard.topics) if isinstance(group, ShareGroup) else None


def places_of(shard: GroupShard, group_id: str) -> Assignment:
    """The share partitions of a group, of topics that are still there. Raises ApiError."""
    initialized = existing(shard, group_id).states.initialized
    found = {id: places for id, places in initialized.items() if shard.topics.by_id(id) is not None}
    return found or NOTHING
