"""StreamsGroupHeartbeat: the only request of a member of a streams group.

In order: the member joins or changes, the group stores its topology and checks the topics, the group starts a new epoch
if necessary, the coordinator assigns tasks for that epoch, and the member takes its next step towards its assignment.
"""

from collections.abc import Iterable, Mapping

from penstock.groups import modern_group
from penstock.groups.classic.classic_group import ClassicGroup
from penstock.groups.group import GroupResult, Operation, ReplyToken
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.streams.streams_group import (
    INITIAL_DELAY_TIMER,
    NUM_STANDBY_REPLICAS,
    REBALANCE_TIMER,
    SESSION_TIMER,
    EndpointPartitions,
    StreamsGroup,
    StreamsGroupDraft,
    StreamsHeartbeatReply,
    StreamsHeartbeatRequest,
    fence_member,
)
from penstock.groups.streams.streams_group_records import StreamsGroupRecordType
from penstock.groups.streams.topology import (
    FIRST_EPOCH,
    NO_TASK_SETS,
    NOT_VALIDATED,
    ConfiguredTopology,
    StreamsCurrentAssignment,
    StreamsGroupEpoch,
    StreamsGroupMember,
    StreamsMemberMetadata,
    StreamsStatus,
    StreamsStatusCode,
    Tasks,
    TaskSets,
)
from penstock.groups.timers import TimerKey
from penstock.groups.topics import Topics
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.stored_records import can_store


def streams_group_heartbeat(
    shard: GroupCoordinatorShard, request: StreamsHeartbeatRequest, token: ReplyToken, *, now_ms: int
) -> GroupResult:
    def decide(operation: Operation) -> StreamsHeartbeatReply:
        _check_request(request)
        if request.member_epoch == modern_group.LEAVE_GROUP_MEMBER_EPOCH:
            return _leave(
                modern_group.require_group(shard, request.group_id, StreamsGroup), request, operation
            )
        return _process_heartbeat(_draft_for(shard, request, operation), request)

    return modern_group.run_operation(shard, token, now_ms, decide, StreamsHeartbeatReply)


# Checks


def _check_request(request: StreamsHeartbeatRequest) -> None:
    """Raises ApiError with Kafka's error messages."""
    modern_group.refuse_blank(
        MemberId=request.member_id,
        GroupId=request.group_id,
        InstanceId=request.instance_id,
        RackId=request.rack_id,
    )
    if request.member_epoch < modern_group.LEAVE_GROUP_MEMBER_EPOCH:
        raise modern_group.invalid_request(
            f"MemberEpoch is {request.member_epoch}, but must be greater than or equal to -1."
        )
    if request.member_epoch == modern_group.JOIN_GROUP_MEMBER_EPOCH:
        _check_join(request)
    elif request.topology is not None:
        raise modern_group.invalid_request("Topology can only be provided when (re-)joining.")
    if request.instance_id is not None:
        raise modern_group.invalid_request("Static membership is not yet supported.")
    if request.has_task_offsets:
        raise modern_group.invalid_request("TaskOffsets are not supported yet.")
    if request.owned is not None and request.owned.warmup:
        raise modern_group.invalid_request("WarmupTasks are not supported yet.")
    names = (request.group_id, request.member_id, request.rack_id or "", request.client_id)
    if not can_store(*names, request.process_id or ""):
        raise modern_group.invalid_request("A name is too long to be stored.")


def _check_join(request: StreamsHeartbeatRequest) -> None:
    if request.rebalance_timeout_ms == -1:
        raise modern_group.invalid_request("RebalanceTimeoutMs must be provided in first request.")
    if request.owned:
        raise modern_group.invalid_request(
            "ActiveTasks, StandbyTasks and WarmupTasks must be empty when (re-)joining."
        )
    if request.topology is None:
        raise modern_group.invalid_request("Topology must be non-null when (re-)joining.")
    ids = [subtopology.subtopology_id for subtopology in request.topology.subtopologies]
    if len(set(ids)) != len(ids):
        raise ApiError(ErrorCode.streams_invalid_topology, "Two subtopologies have the same id.")
    for subtopology in request.topology.subtopologies:
        if subtopology.source_topic_regex:
            raise modern_group.invalid_request("Regular expressions for source topics are not supported yet.")
        for topic in subtopology.changelog_topics:
            if topic.partitions:
                raise ApiError(
                    ErrorCode.streams_invalid_topology,
                    f"Changelog topic {topic.name} must have an undefined partition count, but it is set to "
                    f"{topic.partitions}.",
                )


def _draft_for(
    shard: GroupCoordinatorShard, request: StreamsHeartbeatRequest, operation: Operation
) -> StreamsGroupDraft:
    """The group of the request. A joining member creates it, also in place of an empty classic group."""
    group = shard.groups.get(request.group_id)
    if request.member_epoch == modern_group.JOIN_GROUP_MEMBER_EPOCH:
        if group is None:
            return StreamsGroupDraft(StreamsGroup(request.group_id), operation, is_new=True)
        if isinstance(group, ClassicGroup) and group.can_be_replaced:
            if group.stored is not None:
                operation.store_all(group.tombstones())
            return StreamsGroupDraft(StreamsGroup(request.group_id), operation, is_new=True)
    return StreamsGroupDraft(modern_group.require_group(shard, request.group_id, StreamsGroup), operation)


def _member_of_request(
    group: StreamsGroup, request: StreamsHeartbeatRequest, size_max: int
) -> StreamsGroupMember:
    if (
        request.member_epoch == modern_group.JOIN_GROUP_MEMBER_EPOCH
        and request.member_id not in group.members
    ):
        modern_group.check_group_size(group, size_max)
        return StreamsGroupMember(request.member_id)
    member: StreamsGroupMember = modern_group.require_member(group, request.member_id)
    current = member.current
    if request.member_epoch in (modern_group.JOIN_GROUP_MEMBER_EPOCH, current.epoch):
        return member
    # A member one epoch behind missed the last reply, and gets it again if it owns no tasks of other members.
    has_own = request.owned is not None and request.owned.is_within(current.assigned.merged(current.revoking))
    if request.member_epoch > current.epoch or request.member_epoch != current.previous_epoch or not has_own:
        than = "greater" if request.member_epoch > current.epoch else "smaller"
        raise ApiError(
            ErrorCode.fenced_member_epoch,
            f"The streams group member has a {than} member epoch ({request.member_epoch}) than the one known by the "
            f"group coordinator ({current.epoch}). The member must abandon all its tasks and rejoin.",
        )
    return member


# Effects


def _leave(
    group: StreamsGroup, request: StreamsHeartbeatRequest, operation: Operation
) -> StreamsHeartbeatReply:
    member = modern_group.require_member(group, request.member_id)
    if request.shutdown_application:
        _request_shutdown(group, request.member_id)
    fence_member(group, member, operation)
    return StreamsHeartbeatReply(
        member_id=request.member_id, member_epoch=modern_group.LEAVE_GROUP_MEMBER_EPOCH
    )


def _process_heartbeat(draft: StreamsGroupDraft, request: StreamsHeartbeatRequest) -> StreamsHeartbeatReply:
    group, operation = draft.state, draft.operation
    was_empty = not group.members
    before = _member_of_request(group, request, operation.settings.streams_size_max)
    metadata = _updated_metadata(before.metadata, request)
    has_changed = metadata != before.metadata or before.member_id not in group.members
    if has_changed:
        draft.change(StreamsGroupRecordType.MEMBER_METADATA, before.member_id, metadata)
    _take_topology(draft, request, was_empty=was_empty)
    configured = draft.configured()
    if configured.is_ready:
        _check_tasks(configured, request.owned)
    _begin_epoch_if_needed(draft, configured, request, has_changed=has_changed)
    delay = TimerKey(INITIAL_DELAY_TIMER, draft.group_id)
    if was_empty and request.initial_rebalance_delay_ms and operation.timers.deadline_ms(delay) is None:
        operation.schedule_in(delay, request.initial_rebalance_delay_ms)
    statuses = list(_statuses(draft, metadata, configured))
    next_beat_ms = request.heartbeat_interval_ms
    due_in_ms = _target_due_in_ms(draft, delay, request.assignment_interval_ms)
    if draft.state.epoch > draft.state.target.epoch:
        if due_in_ms:
            statuses.append(
                StreamsStatus(StreamsStatusCode.ASSIGNMENT_DELAYED, "The assignment waits for more members.")
            )
            next_beat_ms = min(next_beat_ms, due_in_ms)
        else:
            draft.update_target()
    member = _reconcile(draft, before.member_id, request)
    operation.schedule_in(
        TimerKey(SESSION_TIMER, draft.group_id, member.member_id), request.session_timeout_ms
    )
    if request.shutdown_application:
        _request_shutdown(group, member.member_id)
    if group.shutdown_requested_by is not None:
        detail = (
            f"Streams group member {group.shutdown_requested_by} encountered a fatal error and requested a shutdown "
            "for the entire application."
        )
        statuses.append(StreamsStatus(StreamsStatusCode.SHUTDOWN_APPLICATION, detail))
    is_assigned = (
        request.member_epoch != before.current.epoch
        or request.member_epoch == modern_group.JOIN_GROUP_MEMBER_EPOCH
        or before.current.assigned != member.current.assigned
    )
    if is_assigned and member.metadata.endpoint is not None:
        # In both: the group keeps the epoch, and the reply is built from the draft.
        group.endpoint_epoch += 1
        draft.state.endpoint_epoch = group.endpoint_epoch
    endpoints = None
    if group.endpoint_epoch != request.endpoint_epoch:
        endpoints = _endpoints(draft.state, configured, operation.topics)
    return StreamsHeartbeatReply(
        member_id=member.member_id,
        member_epoch=member.current.epoch,
        heartbeat_interval_ms=next_beat_ms,
        statuses=tuple(statuses),
        assigned=member.current.assigned if is_assigned else None,
        endpoint_epoch=group.endpoint_epoch,
        endpoints=endpoints,
        topics_to_create=configured.missing_topics,
    )


def _request_shutdown(group: StreamsGroup, member_id: str) -> None:
    if group.shutdown_requested_by is None:
        group.shutdown_requested_by = member_id


def _updated_metadata(
    known: StreamsMemberMetadata, request: StreamsHeartbeatRequest
) -> StreamsMemberMetadata:
    """Fields that the request omits keep their value."""
    timeout_ms, topology = request.rebalance_timeout_ms, request.topology
    return StreamsMemberMetadata(
        rack_id=known.rack_id if request.rack_id is None else request.rack_id,
        client_id=request.client_id,
        client_host=request.client_host,
        rebalance_timeout_ms=known.rebalance_timeout_ms if timeout_ms == -1 else timeout_ms,
        topology_epoch=known.topology_epoch if topology is None else topology.epoch,
        process_id=known.process_id if request.process_id is None else request.process_id,
        endpoint=known.endpoint if request.endpoint is None else request.endpoint,
        tags=known.tags if request.tags is None else tuple(sorted(request.tags)),
    )


def _take_topology(draft: StreamsGroupDraft, request: StreamsHeartbeatRequest, *, was_empty: bool) -> None:
    """The first member of a group defines its topology; the others must send the same topology or an older one."""
    known, given = draft.state.topology, request.topology
    if given is None or given == known:
        return
    if known is None or (was_empty and given.epoch >= known.epoch):
        draft.change(StreamsGroupRecordType.TOPOLOGY, "", given)
    elif given.epoch >= known.epoch:
        raise modern_group.invalid_request("Topology updates are not supported yet.")


def _check_tasks(configured: ConfiguredTopology, owned: TaskSets | None) -> None:
    for name, partition in () if owned is None else owned.every():
        count = configured.task_counts.get(name)
        if count is None:
            raise modern_group.invalid_request(f"Subtopology {name} does not exist in the topology.")
        if not 0 <= partition < count:
            raise modern_group.invalid_request(
                f"Task {partition} for subtopology {name} is invalid. Number of tasks: {count}"
            )


def _begin_epoch_if_needed(
    draft: StreamsGroupDraft,
    configured: ConfiguredTopology,
    request: StreamsHeartbeatRequest,
    *,
    has_changed: bool,
) -> None:
    group = draft.state
    assert group.topology is not None
    wanted = StreamsGroupEpoch(
        epoch=group.epoch,
        metadata_hash=modern_group.metadata_hash(group.topology.required_topics, draft.operation.topics),
        validated_topology_epoch=group.topology.epoch if configured.is_ready else NOT_VALIDATED,
        assignment_configs=((NUM_STANDBY_REPLICAS, str(request.standby_replicas)),),
    )
    if has_changed or wanted != group.group_epoch:
        draft.change(StreamsGroupRecordType.GROUP_METADATA, "", wanted._replace(epoch=group.epoch + 1))


def _statuses(
    draft: StreamsGroupDraft, metadata: StreamsMemberMetadata, configured: ConfiguredTopology
) -> Iterable[StreamsStatus]:
    topology = draft.state.topology
    assert topology is not None
    if metadata.topology_epoch < topology.epoch:
        detail = (
            f"The member's topology epoch {metadata.topology_epoch} is behind the group's topology epoch "
            f"{topology.epoch}."
        )
        yield StreamsStatus(StreamsStatusCode.STALE_TOPOLOGY, detail)
    if configured.status is not None:
        yield configured.status


def _target_due_in_ms(draft: StreamsGroupDraft, delay: TimerKey, interval_ms: int) -> int:
    """0 if tasks may be assigned now. Members that join at about the same time get their tasks together."""
    now_ms, target = draft.operation.now_ms, draft.state.target
    deadline_ms = draft.operation.timers.deadline_ms(delay)
    if deadline_ms is not None:
        return max(1, deadline_ms - now_ms)
    age_ms = now_ms - target.timestamp_ms
    return interval_ms - age_ms if target.epoch != FIRST_EPOCH and 0 <= age_ms < interval_ms else 0


# Reconciliation


def _reconcile(
    draft: StreamsGroupDraft, member_id: str, request: StreamsHeartbeatRequest
) -> StreamsGroupMember:
    group = draft.state
    member = group.members[member_id]
    is_retry = request.member_epoch not in (modern_group.JOIN_GROUP_MEMBER_EPOCH, member.current.epoch)
    # A member that missed the last reply may not own the tasks to revoke yet, but be about to take them.
    owned = None if is_retry else request.owned
    if request.member_epoch == modern_group.JOIN_GROUP_MEMBER_EPOCH:
        owned = NO_TASK_SETS
    elif request.owned is None and group.reported.get(member_id) == member.current.assigned:
        # A member that owns exactly its assignment has nothing to revoke and does not report it again.
        owned = member.current.assigned
    if request.owned is not None:
        group.reported[member_id] = request.owned
    current = _next_assignment(
        group, member, owned, joins=request.member_epoch == modern_group.JOIN_GROUP_MEMBER_EPOCH
    )
    if current == member.current:
        return member
    timer = TimerKey(REBALANCE_TIMER, group.group_id, member_id)
    if current.phase is modern_group.MemberState.UNREVOKED:
        draft.operation.schedule_in(timer, member.metadata.rebalance_timeout_ms)
    else:
        draft.operation.timers.cancel(timer)
    draft.change(StreamsGroupRecordType.CURRENT_MEMBER_ASSIGNMENT, member_id, current)
    return draft.state.members[member_id]


def _next_assignment(
    group: StreamsGroup, member: StreamsGroupMember, owned: TaskSets | None, *, joins: bool
) -> StreamsCurrentAssignment:
    """First the member revokes the tasks that it must not keep, and confirms that in the same epoch.

    Then it moves to the target epoch with those of its new tasks that are free; the others follow once released.
    """
    current, target_epoch = member.current, group.target.epoch
    target = group.targets.get(member.member_id, NO_TASK_SETS)
    if current.is_settled(target_epoch):
        return current
    if current.phase is modern_group.MemberState.UNREVOKED and (
        owned is None or owned.overlaps(current.revoking)
    ):
        return current
    kept = current.assigned.shared_with(target)
    revoking = current.assigned.without(kept)
    if revoking and not joins:
        return current.moved(current.epoch + 1, modern_group.MemberState.UNREVOKED, kept, revoking)
    wanted = target.without(kept)
    free = _free_tasks(group, member, wanted)
    phase = modern_group.MemberState.STABLE if free == wanted else modern_group.MemberState.UNRELEASED
    return current.moved(target_epoch, phase, kept.merged(free))


def _free_tasks(group: StreamsGroup, member: StreamsGroupMember, wanted: TaskSets) -> TaskSets:
    """A task may be active on one member only, and may be only once in a process, whose threads share a disk."""
    active: set[tuple[str, int]] = set()
    in_process: set[tuple[str, int]] = set()
    for other in group.members.values():
        if other.member_id == member.member_id:
            continue
        held = other.current.assigned.merged(other.current.revoking)
        active.update(TaskSets(active=held.active).every())
        if other.metadata.process_id == member.metadata.process_id:
            in_process.update(held.every())
    return TaskSets(
        _without_taken(wanted.active, active | in_process),
        _without_taken(wanted.standby, in_process),
        _without_taken(wanted.warmup, in_process),
    )


def _without_taken(tasks: Tasks, taken: set[tuple[str, int]]) -> Tasks:
    left = {
        name: frozenset(partition for partition in partitions if (name, partition) not in taken)
        for name, partitions in tasks.items()
    }
    return {name: partitions for name, partitions in left.items() if partitions}


# Interactive queries


def _endpoints(
    group: StreamsGroup, configured: ConfiguredTopology, topics: Topics
) -> tuple[EndpointPartitions, ...]:
    if not configured.is_ready or group.topology is None:
        return ()
    inputs = {each.subtopology_id: each.input_topics for each in group.topology.subtopologies}
    return tuple(
        EndpointPartitions(
            member.metadata.endpoint,
            _partitions(member.current.assigned.active, inputs, topics),
            _partitions(member.current.assigned.standby, inputs, topics),
        )
        for member in group.members.values()
        if member.metadata.endpoint is not None
    )


def _partitions(
    tasks: Tasks, inputs: Mapping[str, tuple[str, ...]], topics: Topics
) -> dict[str, tuple[int, ...]]:
    """A task reads the partition with its own number from each input topic that has this partition."""
    found: dict[str, set[int]] = {}
    for subtopology, partitions in tasks.items():
        for name in inputs.get(subtopology, ()):
            topic = topics.get(name)
            count = 0 if topic is None else topic.partition_count
            found.setdefault(name, set()).update(number for number in partitions if number < count)
    return {name: tuple(sorted(numbers)) for name, numbers in found.items()}
