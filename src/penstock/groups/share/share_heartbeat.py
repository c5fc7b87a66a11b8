"""ShareGroupHeartbeat: the only request of a member of a share group, and the assignor behind it.

In order: the member joins or changes its subscription, the group starts a new epoch if necessary, the coordinator
computes the target assignment from the partitions whose state is initialized, and the member gets its part at once,
because partitions are shared and none has to be revoked first.

The `simple` assignor: every partition has a reader and every member reads a partition, as evenly as possible. With at
least as many partitions as members each partition has one reader; with more members than partitions each member has
one partition, which other members read too. The assignor keeps as much as balance allows. If all members have the same
subscription it spreads all partitions at once, otherwise the partitions of each topic over its subscribers.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar
from uuid import UUID

from penstock.groups.group import GroupResult, Operation, ReplyToken
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.modern_group import (
    JOIN_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_MEMBER_EPOCH,
    NO_PARTITIONS,
    Assignment,
    GroupEpoch,
    check_group_size,
    invalid_request,
    metadata_hash,
    refuse_blank,
    require_group,
    require_member,
    run_operation,
    to_assignment,
)
from penstock.groups.share.share_group import (
    ShareGroup,
    ShareGroupDraft,
    ShareHeartbeatReply,
    ShareHeartbeatRequest,
    fence_member,
    session_timer,
)
from penstock.groups.share.share_group_offsets import pending_state_changes, refresh_state_partitions
from penstock.groups.share.share_group_records import (
    ShareCurrentAssignment,
    ShareGroupMember,
    ShareGroupRecordType,
    ShareSubscription,
)
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.stored_records import can_store

TopicIdPartition = tuple[UUID, int]
Item = TypeVar("Item", bound=Hashable)
Holder = TypeVar("Holder", bound=Hashable)


class ShareAssignorMember(NamedTuple):
    """The input of the assignor for one member."""

    topics: frozenset[UUID]
    #: The previous target, of which the assignor keeps as much as possible.
    target: Assignment


#: By member id, in an order that does not depend on when members joined.
ShareAssignorMembers = Mapping[str, ShareAssignorMember]


def assign_simply(members: ShareAssignorMembers, partitions: Assignment) -> dict[str, Assignment]:
    """`partitions` are those whose state is initialized."""
    hands: dict[str, list[TopicIdPartition]] = {member_id: [] for member_id in members}
    for readers, tps in _pools(members, partitions):
        for member_id, tp in _spread(readers, tps, members):
            hands[member_id].append(tp)
    return {member_id: to_assignment(tps) for member_id, tps in hands.items()}


def _pools(
    members: ShareAssignorMembers, partitions: Assignment
) -> list[tuple[list[str], list[TopicIdPartition]]]:
    """Sets of members, each with the partitions that they may read."""
    subscribers: dict[UUID, list[str]] = defaultdict(list)
    for member_id, member in members.items():
        for topic_id in member.topics:
            subscribers[topic_id].append(member_id)
    pools = [
        (subscribers[topic_id], [(topic_id, partition) for partition in sorted(partitions[topic_id])])
        for topic_id in partitions
        if topic_id in subscribers
    ]
    if pools and len({member.topics for member in members.values()}) == 1:
        return [(list(members), [tp for _, tps in pools for tp in tps])]
    return pools


def _spread(
    readers: list[str], tps: list[TopicIdPartition], members: ShareAssignorMembers
) -> list[tuple[str, TopicIdPartition]]:
    if not tps:
        return []
    held: dict[TopicIdPartition, list[str]] = defaultdict(list)
    wanted = set(tps)
    for member_id in readers:
        for topic_id, partitions in members[member_id].target.items():
            for partition in sorted(partitions):
                if (topic_id, partition) in wanted:
                    held[topic_id, partition].append(member_id)
    if len(tps) >= len(readers):
        return [(member_id, tp) for tp, member_id in _assign_evenly(tps, readers, held).items()]
    holds: dict[str, list[TopicIdPartition]] = defaultdict(list)
    for tp in tps:
        for member_id in held.get(tp, ()):
            holds[member_id].append(tp)
    return list(_assign_evenly(readers, tps, holds).items())


def _assign_evenly(
    items: Sequence[Item], holders: Sequence[Holder], held: Mapping[Item, Sequence[Holder]]
) -> dict[Item, Holder]:
    """Give each item to one holder. Holders differ by at most one item; those that have most now keep one more."""
    claims = Counter(holder for item in items for holder in held.get(item, ()))
    fair, over = divmod(len(items), len(holders))
    by_claims = sorted(holders, key=lambda holder: -claims[holder])
    room = {holder: fair + (rank < over) for rank, holder in enumerate(by_claims)}
    dealt: dict[Item, Holder] = {}
    for item in items:
        for holder in held.get(item, ()):
            if room[holder]:
                room[holder] -= 1
                dealt[item] = holder
                break
    rounds = max(room.values())
    free = iter([holder for turn in range(rounds) for holder in holders if room[holder] > turn])
    return {item: dealt[item] if item in dealt else next(free) for item in items}


def share_group_heartbeat(
    shard: GroupCoordinatorShard, request: ShareHeartbeatRequest, token: ReplyToken, *, now_ms: int
) -> GroupResult:
    def decide(operation: Operation) -> ShareHeartbeatReply:
        _check_request(request)
        if request.member_epoch == LEAVE_GROUP_MEMBER_EPOCH:
            return _leave(require_group(shard, request.group_id, ShareGroup), request, operation)
        return _process_heartbeat(_draft_for(shard, request, operation), request)

    return run_operation(shard, token, now_ms, decide, ShareHeartbeatReply)


# Checks


def _check_request(request: ShareHeartbeatRequest) -> None:
    refuse_blank(MemberId=request.member_id, GroupId=request.group_id, RackId=request.rack_id)
    if request.member_epoch == JOIN_GROUP_MEMBER_EPOCH and not request.topic_names:
        raise invalid_request("SubscribedTopicNames must be set in first request.")
    if request.member_epoch < LEAVE_GROUP_MEMBER_EPOCH:
        raise invalid_request("MemberEpoch is invalid.")
    names = request.topic_names or ()
    if not can_store(request.group_id, request.member_id, request.rack_id or "", request.client_id, *names):
        raise invalid_request("A name is too long to be stored.")


def _draft_for(
    shard: GroupCoordinatorShard, request: ShareHeartbeatRequest, operation: Operation
) -> ShareGroupDraft:
    """The group of the heartbeat. A joining member creates it."""
    if request.group_id not in shard.groups and request.member_epoch == JOIN_GROUP_MEMBER_EPOCH:
        return ShareGroupDraft(ShareGroup(request.group_id), operation, is_new=True)
    return ShareGroupDraft(require_group(shard, request.group_id, ShareGroup), operation)


def _member_of_request(state: ShareGroup, request: ShareHeartbeatRequest, size_max: int) -> ShareGroupMember:
    if request.member_epoch == JOIN_GROUP_MEMBER_EPOCH and request.member_id not in state.members:
        check_group_size(state, size_max)
        return ShareGroupMember(request.member_id)
    member: ShareGroupMember = require_member(state, request.member_id)
    current = member.current
    # A member one epoch behind missed the last reply, and gets it again.
    if request.member_epoch not in (JOIN_GROUP_MEMBER_EPOCH, current.epoch, current.previous_epoch):
        message = (
            f"The share group member has another member epoch ({request.member_epoch}) than the one known by the "
            f"group coordinator ({current.epoch}). The member must abandon all its partitions and rejoin."
        )
        raise ApiError(ErrorCode.fenced_member_epoch, message)
    return member


# Effects


def _leave(group: ShareGroup, request: ShareHeartbeatRequest, operation: Operation) -> ShareHeartbeatReply:
    fence_member(group, require_member(group, request.member_id), operation)
    return ShareHeartbeatReply(member_id=request.member_id, member_epoch=LEAVE_GROUP_MEMBER_EPOCH)


def _process_heartbeat(draft: ShareGroupDraft, request: ShareHeartbeatRequest) -> ShareHeartbeatReply:
    operation = draft.operation
    before = _member_of_request(draft.state, request, operation.settings.share_size_max)
    subscription = _updated_subscription(before.subscription, request)
    if subscription != before.subscription or before.member_id not in draft.state.members:
        draft.change(ShareGroupRecordType.MEMBER_METADATA, before.member_id, subscription)
    _refresh_subscribed_topics(
        draft, begins_epoch=subscription.topic_names != before.subscription.topic_names
    )
    _update_target_assignment(draft)
    member = _assign_member(draft, before.member_id)
    operation.schedule_in(session_timer(draft.group_id, member.member_id), request.session_timeout_ms)
    # A member that joins, or that may have missed a reply, sends its subscription; a member one epoch behind has missed
    # the last reply.
    sends_assignment = (
        request.topic_names is not None
        or request.member_epoch != before.current.epoch
        or before.current.assigned != member.current.assigned
    )
    return ShareHeartbeatReply(
        member_id=member.member_id,
        member_epoch=member.current.epoch,
        heartbeat_interval_ms=request.heartbeat_interval_ms,
        assigned=member.current.assigned if sends_assignment else None,
        upkeep=pending_state_changes(draft.state, operation.topics),
    )


def _updated_subscription(known: ShareSubscription, request: ShareHeartbeatRequest) -> ShareSubscription:
    """Fields that the request omits keep their value."""
    names = request.topic_names
    return ShareSubscription(
        rack_id=known.rack_id if request.rack_id is None else request.rack_id,
        client_id=request.client_id,
        client_host=request.client_host,
        topic_names=known.topic_names if names is None else tuple(sorted(set(names))),
    )


def _refresh_subscribed_topics(draft: ShareGroupDraft, *, begins_epoch: bool) -> None:
    """Check the topics again if they or the subscriptions may have changed since the last check."""
    if draft.topics_unchanged and not begins_epoch:
        return
    refresh_state_partitions(draft)
    number = metadata_hash(draft.state.subscribed, draft.operation.topics)
    if begins_epoch or number != draft.state.metadata_hash:
        draft.change(ShareGroupRecordType.GROUP_METADATA, "", GroupEpoch(draft.state.epoch + 1, number))
    draft.mark_topics_seen()


def _update_target_assignment(draft: ShareGroupDraft) -> None:
    """Store each target that has changed, and then the target epoch, which marks the target as complete."""
    state = draft.state
    if state.epoch <= state.target_epoch:
        return
    found = (draft.operation.topics.get(name) for name in sorted(state.subscribed))
    ids = {topic.name: topic.id for topic in found if topic is not None}
    known: dict[tuple[str, ...], frozenset[UUID]] = {}
    members = {}
    for member_id in sorted(state.members):
        names = state.members[member_id].subscription.topic_names
        if names not in known:
            known[names] = frozenset(ids[name] for name in names if name in ids)
        members[member_id] = ShareAssignorMember(known[names], state.targets.get(member_id, NO_PARTITIONS))
    readable = {
        topic_id: state.states.initialized[topic_id]
        for topic_id in ids.values()
        if topic_id in state.states.initialized
    }
    for member_id, target in assign_simply(members, readable).items():
        if target != members[member_id].target or member_id not in state.targets:
            draft.change(ShareGroupRecordType.TARGET_ASSIGNMENT_MEMBER, member_id, target)
    draft.change(ShareGroupRecordType.TARGET_ASSIGNMENT_METADATA, "", state.epoch)


def _assign_member(draft: ShareGroupDraft, member_id: str) -> ShareGroupMember:
    """Assign without revoking first: another member may get a partition before this member loses it."""
    state = draft.state
    member = state.members[member_id]
    if member.current.epoch != state.target_epoch:
        target = state.targets.get(member_id, NO_PARTITIONS)
        draft.change(
            ShareGroupRecordType.CURRENT_MEMBER_ASSIGNMENT,
            member_id,
            ShareCurrentAssignment(state.target_epoch, member.current.epoch, target),
        )
    return draft.state.members[member_id]
