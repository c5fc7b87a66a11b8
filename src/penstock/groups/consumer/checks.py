"""What a heartbeat must look like, and whether its sender is who the group takes it for. All raise ApiError."""

from penstock.groups.classic_kind import Classic
from penstock.groups.consumer.messages import ConsumerHeartbeat
from penstock.groups.consumer.regex import compiled
from penstock.groups.consumer.state import GroupState
from penstock.groups.consumer.values import AWAY, JOINING, LEFT, Assignment, Member, is_within, union
from penstock.groups.records import can_store
from penstock.groups.settings import GroupSettings
from penstock.groups.work import Step
from penstock.protocol.errors import ApiError, ErrorCode


def check_request(request: ConsumerHeartbeat, settings: GroupSettings) -> None:
    _refuse_empty(
        GroupId=request.group_id,
        MemberId=request.member_id,
        InstanceId=request.instance_id,
        RackId=request.rack_id,
    )
    if request.member_epoch == JOINING:
        _check_joining(request)
    elif request.member_epoch == AWAY and request.instance_id is None:
        raise _invalid("InstanceId can't be null.")
    elif request.member_epoch < AWAY:
        raise _invalid("MemberEpoch is invalid.")
    names = request.topic_names or ()
    texts = (request.instance_id, request.rack_id, request.client_id, request.topic_regex, *names)
    if not can_store(request.group_id, request.member_id, *(text for text in texts if text is not None)):
        raise _invalid("A name is too long to be stored.")
    if request.assignor is not None and request.assignor not in settings.consumer_assignors:
        supported = ", ".join(settings.consumer_assignors)
        message = f"ServerAssignor {request.assignor} is not supported. Supported assignors: {supported}."
        raise ApiError(ErrorCode.unsupported_assignor, message)
    if request.topic_regex and request.member_epoch not in (LEFT, AWAY):
        compiled(request.topic_regex)


def _check_joining(request: ConsumerHeartbeat) -> None:
    if request.rebalance_timeout_ms == -1:
        raise _invalid("RebalanceTimeoutMs must be provided in first request.")
    if request.owned is None or request.owned:
        raise _invalid("TopicPartitions must be empty when (re-)joining.")
    if request.topic_names is None and request.topic_regex is None:
        raise _invalid(
            "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining."
        )


def _refuse_empty(**texts: str | None) -> None:
    for name, text in texts.items():
        if text is not None and not text.strip():
            raise _invalid(f"{name} can't be empty.")


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.invalid_request, message)


def check_room(group: GroupState | Classic, has_place: bool, step: Step) -> None:
    """A static member that returns under another id has one."""
    size_max = step.settings.consumer_size_max
    if len(group.members) >= size_max and not has_place:
        message = f"The consumer group has reached its maximum capacity of {size_max} members."
        raise ApiError(ErrorCode.group_max_size_reached, message)


def check_epoch(member: Member, epoch: int, owned: Assignment | None) -> None:
    """A member one epoch behind missed the last reply: it gets it again, if it owns nothing that is not its own."""
    current = member.current
    if epoch in (JOINING, current.epoch):
        return
    has_own = owned is not None and is_within(owned, union(current.assigned, current.revoking))
    is_retry = epoch == current.previous_epoch and has_own
    if epoch > current.epoch or not is_retry:
        than = "greater" if epoch > current.epoch else "smaller"
        message = (
            f"The consumer group member has a {than} member epoch ({epoch}) than the one known by the group "
            f"coordinator ({current.epoch}). The member must abandon all its partitions and rejoin."
        )
        raise ApiError(ErrorCode.fenced_member_epoch, message)


def known_member(state: GroupState, member_id: str, instance_id: str | None) -> Member:
    member = state.members.get(member_id) if instance_id is None else state.static_member(instance_id)
    if member is None:
        what = f"Member {member_id}" if instance_id is None else f"Instance id {instance_id}"
        message = f"{what} is not a member of group {state.group_id}."
        raise ApiError(ErrorCode.unknown_member_id, message)
    if member.member_id != member_id:
        message = f"Static member {member_id} with instance id {instance_id} was fenced by member {member.member_id}."
        raise ApiError(ErrorCode.fenced_instance_id, message)
    return member
