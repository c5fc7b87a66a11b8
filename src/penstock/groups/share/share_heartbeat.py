"""ShareGroupHeartbeat: one request for everything that a member of a share group says and hears.

In order: the member joins or changes its subscription, the group begins a new epoch if that matters, the target is
worked out for it from what can be read by now, and the member is told its part at once: nobody has to let go first.
"""

from uuid import UUID

from penstock.groups.consumer.subscriptions import metadata_hash
from penstock.groups.consumer.values import JOINING, LEFT, NOTHING, GroupEpoch
from penstock.groups.records import can_store
from penstock.groups.shard import GroupShard
from penstock.groups.share.assignor import Candidate, assign_simply
from penstock.groups.share.draft import Draft, session_timer
from penstock.groups.share.group import ShareGroup, existing, fence
from penstock.groups.share.messages import ShareHeartbeat, ShareHeartbeatReply
from penstock.groups.share.places import refresh_states, upkeep_of
from penstock.groups.share.records import Kind
from penstock.groups.share.state import GroupState
from penstock.groups.share.values import Current, Member, Subscription
from penstock.groups.work import Step, Token, Work
from penstock.protocol.errors import ApiError, ErrorCode


def heartbeat(shard: GroupShard, request: ShareHeartbeat, token: Token, *, now_ms: int) -> Work:
    step = shard.step(now_ms)
    try:
        _check_request(request)
        if request.member_epoch == LEFT:
            reply = _leave(existing(shard, request.group_id), request, step)
        else:
            reply = _beat(_open(shard, request, step), request)
    except ApiError as error:
        # What was noted before it was found out is not to be written.
        refusal = ShareHeartbeatReply(error=error.code, message=error.message)
        return Work(replies=((token, refusal),))
    step.reply(token, reply)
    return step.work()


# Who may say what


def _check_request(request: ShareHeartbeat) -> None:
    for name, text in (
        ("MemberId", request.member_id),
        ("GroupId", request.group_id),
        ("RackId", request.rack_id),
    ):
        if text is not None and not text.strip():
            raise _invalid(f"{name} can't be empty.")
    if request.member_epoch == JOINING and not request.topic_names:
        raise _invalid("SubscribedTopicNames must be set in first request.")
    if request.member_epoch < LEFT:
        raise _invalid("MemberEpoch is invalid.")
    names = request.topic_names or ()
    if not can_store(request.group_id, request.member_id, request.rack_id or "", request.client_id, *names):
        raise _invalid("A name is too long to be stored.")


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.invalid_request, message)


def _open(shard: GroupShard, request: ShareHeartbeat, step: Step) -> Draft:
    """The group to beat in: it is made for a member that joins."""
    if request.group_id not in shard.groups and request.member_epoch == JOINING:
        return Draft(GroupState(request.group_id), step, is_new=True)
    return Draft(existing(shard, request.group_id), step)


def _sender(state: GroupState, request: ShareHeartbeat, size_max: int) -> Member:
    member = state.members.get(request.member_id)
    if member is None:
        if request.member_epoch != JOINING:
            message = f"Member {request.member_id} is not a member of group {state.group_id}."
            raise ApiError(ErrorCode.unknown_member_id, message)
        if len(state.members) >= size_max:
            message = f"The share group has reached its maximum capacity of {size_max} members."
            raise ApiError(ErrorCode.group_max_size_reached, message)
        return Member(request.member_id)
    current = member.current
    # One epoch behind is a member that did not hear of the last one: it is told again.
    if request.member_epoch not in (JOINING, current.epoch, current.previous_epoch):
        message = (
            f"The share group member has another member epoch ({request.member_epoch}) than the one known by the "
            f"group coordinator ({current.epoch}). The member must abandon all its partitions and rejoin."
        )
        raise ApiError(ErrorCode.fenced_member_epoch, message)
    return member


# What comes of it


def _leave(group: ShareGroup, request: ShareHeartbeat, step: Step) -> ShareHeartbeatReply:
    member = group.members.get(request.member_id)
    if member is None:
        message = f"Member {request.member_id} is not a member of group {group.group_id}."
        raise ApiError(ErrorCode.unknown_member_id, message)
    fence(group, member, step)
    return ShareHeartbeatReply(member_id=request.member_id, member_epoch=LEFT)


def _beat(draft: Draft, request: ShareHeartbeat) -> ShareHeartbeatReply:
    step = draft.step
    before = _sender(draft.state, request, step.settings.share_size_max)
    subscription = _subscription(before.subscription, request)
    if subscription != before.subscription or before.member_id not in draft.state.members:
        draft.change(Kind.SUBSCRIPTION, before.member_id, subscription)
    _refresh(draft, begins_epoch=subscription.topic_names != before.subscription.topic_names)
    _update_target(draft)
    member = _told(draft, before.member_id)
    step.schedule_in(session_timer(draft.group_id, member.member_id), request.session_timeout_ms)
    # Who joins, or is not sure that its last request was heard, says what it subscribes to; who is an epoch behind
    # has not heard the last reply.
    is_told = (
        request.topic_names is not None
        or request.member_epoch != before.current.epoch
        or before.current.assigned != member.current.assigned
    )
    return ShareHeartbeatReply(
        member_id=member.member_id,
        member_epoch=member.current.epoch,
        heartbeat_interval_ms=request.heartbeat_interval_ms,
        assigned=member.current.assigned if is_told else None,
        upkeep=upkeep_of(draft.state, step.topics),
    )


def _subscription(known: Subscription, request: ShareHeartbeat) -> Subscription:
    """What is not said is as it was."""
    names = request.topic_names
    return Subscription(
        rack_id=known.rack_id if request.rack_id is None else request.rack_id,
        client_id=request.client_id,
        client_host=request.client_host,
        topic_names=known.topic_names if names is None else tuple(sorted(set(names))),
    )


def _refresh(draft: Draft, *, begins_epoch: bool) -> None:
    """Look at the topics again if they or the subscriptions may have changed since this was last done."""
    if draft.knows_topics and not begins_epoch:
        return
    refresh_states(draft)
    number = metadata_hash(draft.state.subscribed, draft.step.topics)
    if begins_epoch or number != draft.state.metadata_hash:
        draft.change(Kind.GROUP_EPOCH, "", GroupEpoch(draft.state.epoch + 1, number))
    draft.topics_seen()


def _update_target(draft: Draft) -> None:
    """Records for those whose target has changed, and one that says that it is complete."""
    state = draft.state
    if state.epoch <= state.target_epoch:
        return
    found = (draft.step.topics.get(name) for name in sorted(state.subscribed))
    ids = {topic.name: topic.id for topic in found if topic is not None}
    known: dict[tuple[str, ...], frozenset[UUID]] = {}
    members = {}
    for member_id in sorted(state.members):
        names = state.members[member_id].subscription.topic_names
        if names not in known:
            known[names] = frozenset(ids[name] for name in names if name in ids)
        members[member_id] = Candidate(known[names], state.targets.get(member_id, NOTHING))
    readable = {
        topic_id: state.states.initialized[topic_id]
        for topic_id in ids.values()
        if topic_id in state.states.initialized
    }
    for member_id, target in assign_simply(members, readable).items():
        if target != members[member_id].target or member_id not in state.targets:
            draft.change(Kind.TARGET, member_id, target)
    draft.change(Kind.TARGET_EPOCH, "", state.epoch)


def _told(draft: Draft, member_id: str) -> Member:
    """What a share group takes from a member, others may have been given before it hears of that."""
    state = draft.state
    member = state.members[member_id]
    if member.current.epoch != state.target_epoch:
        target = state.targets.get(member_id, NOTHING)
        draft.change(Kind.CURRENT, member_id, Current(state.target_epoch, member.current.epoch, target))
    return draft.state.members[member_id]
