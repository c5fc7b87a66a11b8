"""The offsets of a share group: which share partitions need a state, and changes by administrators.

The share coordinator keeps the state itself. The group coordinator decides which states to initialize or delete, and
stores the progress, so that the next coordinator of the group continues with it.
"""

from collections.abc import Callable, Iterable
from uuid import UUID

from penstock.groups.group import GroupResult, Operation, ReplyToken
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.modern_group import NO_PARTITIONS, Assignment, require_group, run_operation, union
from penstock.groups.share.share_group import (
    AlterShareOffsetsReply,
    DeleteShareOffsetsReply,
    PendingStateChanges,
    ShareGroup,
    ShareGroupDraft,
    StartOffsets,
)
from penstock.groups.share.share_group_records import StatePartitionMetadata
from penstock.groups.topics import Topics
from penstock.protocol.errors import ApiError, ErrorCode


def refresh_state_partitions(draft: ShareGroupDraft) -> None:
    """Initialize states that subscribed topics lack, and forget the states of topics that no longer exist."""
    topics = draft.operation.topics
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
        without_state = topic.every_partition - states.of_topic(topic.id)
        if without_state:
            missing[topic.id], names[topic.id] = without_state, name
    if missing:
        states = states.initialize(missing, names)
    draft.change_states(states)


def pending_state_changes(state: ShareGroup, topics: Topics) -> PendingStateChanges | None:
    """All changes that are not complete, even if they are in progress: repeating them is harmless."""
    states = state.states
    if not states.initializing and not states.deleting:
        return None
    return PendingStateChanges(state.epoch, all_partitions(states.deleting, topics), states.initializing)


def all_partitions(topic_ids: frozenset[UUID], topics: Topics) -> Assignment:
    """All partitions, because it is not stored which partitions of a topic in deletion had a state."""
    return {
        topic_id: frozenset() if (topic := topics.by_id(topic_id)) is None else topic.every_partition
        for topic_id in sorted(topic_ids)
    }


# Results of the share coordinator


def state_initialized(
    shard: GroupCoordinatorShard, group_id: str, partitions: Assignment, token: ReplyToken, *, now_ms: int
) -> GroupResult:
    """Mark the states as initialized, and start a new epoch, which assigns the partitions to members."""
    return _update_states(
        shard, group_id, lambda states: states.initialization_done(partitions), token, now_ms
    )


def state_deleted(
    shard: GroupCoordinatorShard, group_id: str, topic_ids: Iterable[UUID], token: ReplyToken, *, now_ms: int
) -> GroupResult:
    """Mark the deletion as complete. States that are initialized later have a later epoch than the deletion."""
    return _update_states(shard, group_id, lambda states: states.deletion_done(topic_ids), token, now_ms)


def _update_states(
    shard: GroupCoordinatorShard,
    group_id: str,
    update: Callable[[StatePartitionMetadata], StatePartitionMetadata],
    token: ReplyToken,
    now_ms: int,
) -> GroupResult:
    operation, group = shard.operation(now_ms), shard.groups.get(group_id)
    if isinstance(group, ShareGroup):
        states = update(group.states)
        if states != group.states:
            draft = ShareGroupDraft(group, operation)
            draft.change_states(states)
            draft.begin_epoch()
    operation.reply(token, None)
    return operation.work()


# Requests of administrators


def begin_alter_offsets(
    shard: GroupCoordinatorShard, group_id: str, offsets: StartOffsets, token: ReplyToken, *, now_ms: int
) -> GroupResult:
    """The reply is an AlterShareOffsetsReply. A group that does not exist is created."""

    def decide(operation: Operation) -> AlterShareOffsetsReply:
        if group_id not in shard.groups:
            draft = ShareGroupDraft(ShareGroup(group_id), operation, is_new=True)
        else:
            draft = ShareGroupDraft(_require_empty_group(shard, group_id), operation)
        return _alter_offsets(draft, offsets)

    return run_operation(shard, token, now_ms, decide, AlterShareOffsetsReply)


def _require_empty_group(shard: GroupCoordinatorShard, group_id: str) -> ShareGroup:
    group = require_group(shard, group_id, ShareGroup)
    if group.members:
        raise ApiError(ErrorCode.non_empty_group, f"Group {group_id} is not empty.")
    return group


def _alter_offsets(draft: ShareGroupDraft, offsets: StartOffsets) -> AlterShareOffsetsReply:
    topics, states = draft.operation.topics, draft.state.states
    partitions: dict[UUID, frozenset[int]] = {}
    names: dict[UUID, str] = {}
    for name, by_partition in offsets.items():
        topic = topics.get(name)
        known = frozenset() if topic is None else topic.every_partition.intersection(by_partition)
        if topic is not None and known:
            partitions[topic.id], names[topic.id] = known, name
    if not partitions:
        return AlterShareOffsetsReply()
    if not states.deleting.isdisjoint(partitions):
        return AlterShareOffsetsReply(waits_for_deletion=True)
    draft.change_states(states.initialize(partitions, names))
    # The states are initialized again with the new epoch, which fences leaders that have the old states.
    draft.begin_epoch()
    return AlterShareOffsetsReply(epoch=draft.state.epoch, partitions=partitions)


def begin_delete_offsets(
    shard: GroupCoordinatorShard,
    group_id: str,
    topic_names: Iterable[str] | None,
    token: ReplyToken,
    *,
    now_ms: int,
) -> GroupResult:
    """The reply is a DeleteShareOffsetsReply. `topic_names` None selects all topics of the group."""

    def decide(operation: Operation) -> DeleteShareOffsetsReply:
        return _delete_offsets(ShareGroupDraft(_require_empty_group(shard, group_id), operation), topic_names)

    return run_operation(shard, token, now_ms, decide, DeleteShareOffsetsReply)


def _delete_offsets(draft: ShareGroupDraft, topic_names: Iterable[str] | None) -> DeleteShareOffsetsReply:
    states, topics = draft.state.states, draft.operation.topics
    names = dict(states.names)
    if topic_names is not None:
        found = (topics.get(name) for name in topic_names)
        names = {topic.id: topic.name for topic in found if topic is not None and topic.id in states.names}
    draft.change_states(states.delete(names))
    # Partitions that are known to have a state, and partitions whose earlier deletion is not complete.
    known = {topic_id: states.of_topic(topic_id) for topic_id in names}
    again = all_partitions(states.deleting.intersection(names), topics)
    return DeleteShareOffsetsReply(epoch=draft.state.epoch, partitions=union(known, again), names=names)


# Queries


def current_state_changes(shard: GroupCoordinatorShard, group_id: str) -> PendingStateChanges | None:
    group = shard.groups.get(group_id)
    return pending_state_changes(group, shard.topics) if isinstance(group, ShareGroup) else None


def share_partitions_of(shard: GroupCoordinatorShard, group_id: str) -> Assignment:
    """The share partitions of a group, of topics that still exist. Raises ApiError."""
    initialized = require_group(shard, group_id, ShareGroup).states.initialized
    found = {id: indexes for id, indexes in initialized.items() if shard.topics.by_id(id) is not None}
    return found or NO_PARTITIONS
