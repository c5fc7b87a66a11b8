"""A streams group as one kind of group in the shard: its data, its messages and its assignor.

Only records change the data. Messages are independent of the wire version. The `sticky` assignor makes each task
active at one member, gives all members equally many, and leaves as much as possible in place. A task that must move
goes to a member that has it as a standby task, because the state is there, or to the least loaded member. Only
stateful tasks have standby tasks; no process has a task twice.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Any, ClassVar, NamedTuple

from penstock.groups.consumer.consumer_group_records import MemberState
from penstock.groups.coordinator_records import CommittedOffset, KeyValue
from penstock.groups.group import (
    CommitRequest,
    DescribedGroup,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LeaveResults,
    OffsetToCommit,
    Operation,
    ReplyToken,
    SyncReply,
    SyncRequest,
    TimerKey,
    Timers,
)
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.modern_group import GroupDraft, ModernGroupRecord
from penstock.groups.streams.streams_group_records import STREAMS_GROUP_CODEC, StreamsGroupRecordType
from penstock.groups.streams.topology import (
    NO_TASK_SETS,
    ConfiguredTopology,
    Endpoint,
    InternalTopic,
    StreamsCurrentAssignment,
    StreamsGroupEpoch,
    StreamsGroupMember,
    StreamsMemberMetadata,
    StreamsStatus,
    StreamsTargetEpoch,
    Tasks,
    TaskSets,
    Topology,
    configure_topology,
)
from penstock.groups.topics import Topics
from penstock.protocol.errors import ApiError, ErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsHeartbeatRequest:
    """None for what has not changed since the last one."""

    group_id: str
    member_id: str
    member_epoch: int
    endpoint_epoch: int = 0
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topology: Topology | None = None
    owned: TaskSets | None = None
    process_id: str | None = None
    endpoint: Endpoint | None = None
    tags: tuple[tuple[str, str], ...] | None = None
    has_task_offsets: bool = False
    shutdown_application: bool = False
    #: What holds for this group now.
    session_timeout_ms: int
    heartbeat_interval_ms: int
    assignment_interval_ms: int
    initial_rebalance_delay_ms: int
    standby_replicas: int


class EndpointPartitions(NamedTuple):
    """What can be queried at the endpoint of a member, by topic."""

    endpoint: Endpoint
    active: Mapping[str, tuple[int, ...]]
    standby: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsHeartbeatReply:
    error: ErrorCode = ErrorCode.none
    message: str | None = None
    member_id: str = ""
    member_epoch: int = 0
    heartbeat_interval_ms: int = 0
    statuses: tuple[StreamsStatus, ...] = ()
    #: None when it is what the member was assigned before.
    assigned: TaskSets | None = None
    endpoint_epoch: int = 0
    #: None when it is what the member knows.
    endpoints: tuple[EndpointPartitions, ...] | None = None
    #: Internal topics that the group waits for.
    topics_to_create: tuple[InternalTopic, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedStreamsGroup:
    group_id: str
    state: str
    epoch: int
    target_epoch: int
    topology: Topology | None
    #: Internal topics with the numbers of partitions that were decided for them, where they were.
    internal_topics: Mapping[str, InternalTopic]
    members: tuple[StreamsGroupMember, ...]
    targets: Mapping[str, TaskSets]


Task = tuple[str, int]


class StreamsAssignorMember(NamedTuple):
    """A member, as the assignor sees it."""

    process_id: str
    #: Its target until now, of which as much as possible is kept.
    target: TaskSets


def assign_sticky(
    members: Mapping[str, StreamsAssignorMember],
    task_counts: Mapping[str, int],
    stateful: Iterable[str],
    standby_replicas: int,
) -> dict[str, TaskSets]:
    """`task_counts` by subtopology; `stateful` are the subtopologies with changelogs. The order of members matters."""
    if not members:
        return {}
    tasks = [(name, partition) for name in sorted(task_counts) for partition in range(task_counts[name])]
    active = _assign_active(members, tasks)
    standby: dict[str, set[Task]] = {member_id: set() for member_id in members}
    if standby_replicas:
        with_state = frozenset(stateful)
        _assign_standby(
            members, active, standby, [task for task in tasks if task[0] in with_state], standby_replicas
        )
    owned: dict[str, set[Task]] = {member_id: set() for member_id in members}
    for task, member_id in active.items():
        owned[member_id].add(task)
    return {
        member_id: TaskSets(_by_subtopology(owned[member_id]), _by_subtopology(standby[member_id]))
        for member_id in members
    }


def _assign_active(members: Mapping[str, StreamsAssignorMember], tasks: list[Task]) -> dict[Task, str]:
    previous: dict[Task, str] = {}
    standbys: dict[Task, list[str]] = defaultdict(list)
    for member_id, member in members.items():
        for task in _tasks_in_order(member.target.active):
            previous.setdefault(task, member_id)
        for task in _tasks_in_order(member.target.standby):
            standbys[task].append(member_id)
    # Those that have the most keep one more, where the tasks cannot be divided evenly.
    claims = Counter(previous[task] for task in tasks if task in previous)
    fair, over = divmod(len(tasks), len(members))
    by_claims = sorted(members, key=lambda member_id: -claims[member_id])
    room = {member_id: fair + (rank < over) for rank, member_id in enumerate(by_claims)}
    owner: dict[Task, str] = {}

    def give(task: Task, member_id: str) -> None:
        owner[task] = member_id
        room[member_id] -= 1

    for task in tasks:
        if task in previous and room[previous[task]]:
            give(task, previous[task])
    for task in tasks:
        if task not in owner:
            with_state = [member_id for member_id in standbys.get(task, ()) if room[member_id]]
            if with_state:
                give(task, max(with_state, key=room.__getitem__))
    # The member with the most room, and of those the first, without looking at all of them for each task.
    open_to = [(-room[member_id], rank, member_id) for rank, member_id in enumerate(members)]
    heapify(open_to)
    for task in tasks:
        if task not in owner:
            left, rank, member_id = open_to[0]
            give(task, member_id)
            heapreplace(open_to, (left + 1, rank, member_id))
    return owner


def _assign_standby(
    members: Mapping[str, StreamsAssignorMember],
    active: Mapping[Task, str],
    standby: dict[str, set[Task]],
    tasks: list[Task],
    replicas: int,
) -> None:
    """Fewer than asked for where there are not enough processes."""
    load = Counter(active.values())
    previous: dict[Task, list[str]] = defaultdict(list)
    for member_id, member in members.items():
        # A member that had the task, in whatever role, still has its state.
        for task in dict.fromkeys(
            (*_tasks_in_order(member.target.standby), *_tasks_in_order(member.target.active))
        ):
            previous[task].append(member_id)
    total = sum(load.values()) + len(tasks) * min(replicas, len({m.process_id for m in members.values()}) - 1)
    quota = -(-total // len(members))
    processes: dict[Task, set[str]] = {task: {members[active[task]].process_id} for task in tasks}
    missing: list[Task] = []
    for task in tasks:
        for _ in range(replicas):
            keepers = [
                member_id
                for member_id in previous.get(task, ())
                if members[member_id].process_id not in processes[task] and load[member_id] < quota
            ]
            if keepers:
                _add_standby(min(keepers, key=load.__getitem__), task, members, standby, processes, load)
            else:
                missing.append(task)
    for task in missing:
        others = [
            member_id for member_id, member in members.items() if member.process_id not in processes[task]
        ]
        if others:
            _add_standby(min(others, key=load.__getitem__), task, members, standby, processes, load)


def _add_standby(
    member_id: str,
    task: Task,
    members: Mapping[str, StreamsAssignorMember],
    standby: dict[str, set[Task]],
    processes: dict[Task, set[str]],
    load: Counter[str],
) -> None:
    standby[member_id].add(task)
    processes[task].add(members[member_id].process_id)
    load[member_id] += 1


def _tasks_in_order(tasks: Tasks) -> Iterable[Task]:
    return ((name, partition) for name in sorted(tasks) for partition in sorted(tasks[name]))


def _by_subtopology(tasks: Iterable[Task]) -> Tasks:
    found: dict[str, set[int]] = defaultdict(set)
    for name, partition in tasks:
        found[name].add(partition)
    return {name: frozenset(found[name]) for name in sorted(found)}


# Timers: of a member, and of a group that waits for more members before its first assignment.
SESSION_TIMER, REBALANCE_TIMER, INITIAL_DELAY_TIMER = (
    "streams session",
    "streams rebalance",
    "streams initial delay",
)
#: The assignment setting that is stored with the epoch for which it was used, under Kafka's name.
NUM_STANDBY_REPLICAS = "num.standby.replicas"


class StreamsGroup:
    __slots__ = (
        "configured",
        "endpoint_epoch",
        "group_epoch",
        "group_id",
        "members",
        "reported",
        "shutdown_requested_by",
        "target",
        "targets",
        "topics_version",
        "topology",
    )

    kind: ClassVar[str] = "streams"

    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.group_epoch = StreamsGroupEpoch()
        self.target = StreamsTargetEpoch()
        self.members: dict[str, StreamsGroupMember] = {}
        self.targets: dict[str, TaskSets] = {}
        self.topology: Topology | None = None
        # Not stored, so a coordinator that loads the group finds it out again:
        self.topics_version: int | None = None
        self.configured: ConfiguredTopology | None = None
        self.endpoint_epoch = 0
        self.shutdown_requested_by: str | None = None
        #: The tasks that members last said they own.
        self.reported: dict[str, TaskSets] = {}

    def __repr__(self) -> str:
        members = list(self.members.values())
        return (
            f"<StreamsGroup {self.group_id} {self.group_epoch} target={self.target.epoch} members={members}>"
        )

    def fork(self) -> "StreamsGroup":
        copy = StreamsGroup(self.group_id)
        copy.group_epoch, copy.target, copy.topology = self.group_epoch, self.target, self.topology
        copy.members, copy.targets = dict(self.members), dict(self.targets)
        copy.topics_version, copy.configured = self.topics_version, self.configured
        copy.endpoint_epoch, copy.shutdown_requested_by = self.endpoint_epoch, self.shutdown_requested_by
        copy.reported = self.reported
        return copy

    # Changes

    def record_of(self, kind: StreamsGroupRecordType, name: str, value: Any) -> KeyValue:
        return STREAMS_GROUP_CODEC.encode(ModernGroupRecord(kind, self.group_id, name, value))

    def apply(self, kind: StreamsGroupRecordType, name: str, value: Any) -> None:
        """`value` is None for a deletion; deleting what is not there is harmless, because tombstones outlive it."""
        match kind:
            case StreamsGroupRecordType.GROUP_EPOCH:
                self.group_epoch = value or StreamsGroupEpoch()
            case StreamsGroupRecordType.TARGET_EPOCH:
                self.target = value or StreamsTargetEpoch()
            case StreamsGroupRecordType.TOPOLOGY:
                self.topology, self.configured, self.topics_version = value, None, None
            case StreamsGroupRecordType.TARGET:
                if value is None:
                    self.targets.pop(name, None)
                else:
                    self.targets[name] = value
            case StreamsGroupRecordType.MEMBER | StreamsGroupRecordType.CURRENT:
                self._apply_to_member(kind, name, value)

    def _apply_to_member(
        self,
        kind: StreamsGroupRecordType,
        member_id: str,
        value: StreamsMemberMetadata | StreamsCurrentAssignment | None,
    ) -> None:
        """A compacted log may have a member's assignment before its metadata."""
        member = self.members.get(member_id)
        if value is None:
            if kind is StreamsGroupRecordType.MEMBER:
                self.members.pop(member_id, None)
                self.reported.pop(member_id, None)
                if not self.members:
                    self.shutdown_requested_by = None
            elif member is not None:
                self.members[member_id] = member._replace(current=StreamsCurrentAssignment())
            return
        member = member or StreamsGroupMember(member_id)
        if isinstance(value, StreamsMemberMetadata):
            self.members[member_id] = member._replace(metadata=value)
        else:
            self.members[member_id] = member._replace(current=value)

    def tombstones(self) -> Iterator[KeyValue]:
        for kind in (StreamsGroupRecordType.CURRENT, StreamsGroupRecordType.TARGET):
            for member_id in self.members:
                yield self.record_of(kind, member_id, None)
        yield self.record_of(StreamsGroupRecordType.TARGET_EPOCH, "", None)
        for member_id in self.members:
            yield self.record_of(StreamsGroupRecordType.MEMBER, member_id, None)
        yield self.record_of(StreamsGroupRecordType.TOPOLOGY, "", None)
        yield self.record_of(StreamsGroupRecordType.GROUP_EPOCH, "", None)

    # What it is

    @property
    def epoch(self) -> int:
        return self.group_epoch.epoch

    @property
    def protocol_name(self) -> str:
        return self.kind

    @property
    def state_name(self) -> str:
        if not self.members:
            return "Empty"
        if self.topology is None or self.topology.epoch != self.group_epoch.validated_topology_epoch:
            return "NotReady"
        if self.epoch > self.target.epoch:
            return "Assigning"
        settled = all(member.current.is_settled(self.target.epoch) for member in self.members.values())
        return "Stable" if settled else "Reconciling"

    @property
    def member_count(self) -> int:
        return len(self.members)

    @property
    def is_empty(self) -> bool:
        return not self.members

    @property
    def is_idle(self) -> bool:
        return not self.members

    @property
    def can_be_replaced(self) -> bool:
        return False

    @property
    def stored(self) -> object:
        return (self.group_epoch, self.target, self.topology, dict(self.members), dict(self.targets))

    @property
    def subtopologies_by_source(self) -> dict[str, list[str]]:
        """Which subtopologies read a topic, repartition topics too."""
        found: dict[str, list[str]] = {}
        for subtopology in () if self.topology is None else self.topology.subtopologies:
            for name in subtopology.input_topics:
                found.setdefault(name, []).append(subtopology.subtopology_id)
        return found

    # The classic protocol, which no member speaks

    def join(
        self, request: JoinRequest, token: ReplyToken, operation: Operation, *, new_member_id: str
    ) -> None:
        error = ErrorCode.inconsistent_group_protocol
        operation.reply(token, JoinReply(error=error, member_id=request.member_id))

    def sync(self, request: SyncRequest, token: ReplyToken, operation: Operation) -> None:
        operation.reply(token, SyncReply(error=ErrorCode.unknown_member_id))

    def heartbeat(self, request: HeartbeatRequest, operation: Operation) -> ErrorCode:
        return ErrorCode.unknown_member_id

    def leave(self, request: LeaveRequest, operation: Operation) -> LeaveResults:
        return tuple((member, ErrorCode.unknown_member_id) for member in request.members)

    def described(self) -> DescribedGroup | None:
        return None

    # Offsets

    def check_commit(
        self, request: CommitRequest, topics: Topics, *, is_transactional: bool = False
    ) -> ErrorCode:
        member_id, epoch = request.member_id, request.generation
        if epoch < 0 and self.is_empty:
            return ErrorCode.none
        if is_transactional and epoch < 0 and not member_id and request.instance_id is None:
            # Older transactional producers do not say for which member they commit.
            return ErrorCode.none
        member = self.members.get(member_id)
        if member is not None and 0 < epoch < member.current.epoch:
            # It missed its last epochs, and may commit for tasks that it has had since the epoch it knows.
            readers = self.subtopologies_by_source
            had = all(_was_assigned_at(member, each, epoch, readers) for each in request.offsets)
            return ErrorCode.none if had else ErrorCode.stale_member_epoch
        return self.check_fetch(member_id, epoch)

    def needs_member_epoch(self, member_id: str) -> bool:
        return member_id in self.members

    def check_fetch(self, member_id: str | None, epoch: int) -> ErrorCode:
        if member_id is None and epoch < 0:
            return ErrorCode.none
        member = self.members.get(member_id or "")
        if member is None:
            return ErrorCode.unknown_member_id
        return ErrorCode.none if epoch == member.current.epoch else ErrorCode.stale_member_epoch

    def check_offset_deletion(self) -> ErrorCode:
        return ErrorCode.none

    def is_subscribed(self, topic: str) -> bool:
        return bool(self.members) and topic in self.subtopologies_by_source

    def retained_from_ms(self, offset: CommittedOffset) -> int | None:
        return offset.commit_timestamp_ms

    # Life

    def loaded(self, operation: Operation) -> None:
        timeout_ms = operation.config_of(self.group_id).streams_session_timeout_ms
        for member in self.members.values():
            operation.schedule_in(TimerKey(SESSION_TIMER, self.group_id, member.member_id), timeout_ms)
            if member.current.phase is MemberState.UNREVOKED:
                timer = TimerKey(REBALANCE_TIMER, self.group_id, member.member_id)
                operation.schedule_in(timer, member.metadata.rebalance_timeout_ms)

    def member_committed(self, member_id: str, operation: Operation) -> None:
        """Only heartbeats count."""

    def time_out(self, timer: TimerKey, operation: Operation) -> None:
        if timer.kind == INITIAL_DELAY_TIMER:
            if self.members:
                StreamsGroupDraft(self, operation).update_target()
            return
        member = self.members.get(timer.member_id)
        if member is not None and timer.kind in (SESSION_TIMER, REBALANCE_TIMER):
            fence_member(self, member, operation)

    def removed(self, timers: Timers[TimerKey]) -> None:
        timers.cancel(TimerKey(INITIAL_DELAY_TIMER, self.group_id))
        for member_id in self.members:
            for kind in (SESSION_TIMER, REBALANCE_TIMER):
                timers.cancel(TimerKey(kind, self.group_id, member_id))


def _was_assigned_at(
    member: StreamsGroupMember, offset: OffsetToCommit, epoch: int, readers: dict[str, list[str]]
) -> bool:
    """Whether the member has a task that reads the partition, and had it in this epoch already."""
    return any(
        member.current.since.get(subtopology, {}).get(offset.partition, epoch + 1) <= epoch
        for subtopology in readers.get(offset.topic, ())
    )


class StreamsGroupDraft(GroupDraft[StreamsGroup]):
    """An operation on a streams group under way."""

    __slots__ = ()

    def remove(self, member: StreamsGroupMember) -> None:
        for kind in (
            StreamsGroupRecordType.CURRENT,
            StreamsGroupRecordType.TARGET,
            StreamsGroupRecordType.MEMBER,
        ):
            self.change(kind, member.member_id, None)
        for timer in (SESSION_TIMER, REBALANCE_TIMER):
            self.operation.timers.cancel(TimerKey(timer, self.group_id, member.member_id))

    def configured(self) -> ConfiguredTopology:
        """The topology on the topics as they are now. Raises ApiError for a topology that no topics could satisfy."""
        state = self.state
        assert state.topology is not None
        if state.configured is None or not self.topics_unchanged:
            state.configured = configure_topology(state.topology, self.operation.topics)
            if self._origin.topology == state.topology:
                self._origin.configured = state.configured
            self.mark_topics_seen()
        return state.configured

    def update_target(self) -> None:
        """Assigns tasks for the group's epoch: records for members whose tasks change, and one for the epoch."""
        state = self.state
        if state.epoch <= state.target.epoch or state.topology is None:
            return
        configs = dict(state.group_epoch.assignment_configs)
        members = {
            member_id: StreamsAssignorMember(
                member.metadata.process_id, state.targets.get(member_id, NO_TASK_SETS)
            )
            for member_id, member in sorted(state.members.items())
        }
        configured = self.configured()
        stateful = (each.subtopology_id for each in state.topology.subtopologies if each.changelog_topics)
        assigned = assign_sticky(
            members,
            configured.task_counts if configured.is_ready else {},
            stateful,
            int(configs.get(NUM_STANDBY_REPLICAS, "0")),
        )
        for member_id, target in assigned.items():
            if target != members[member_id].target or member_id not in state.targets:
                self.change(StreamsGroupRecordType.TARGET, member_id, target)
        self.change(
            StreamsGroupRecordType.TARGET_EPOCH, "", StreamsTargetEpoch(state.epoch, self.operation.now_ms)
        )


def fence_member(group: StreamsGroup, member: StreamsGroupMember, operation: Operation) -> None:
    """Removes the member. Its tasks are assigned with the next heartbeat of another one."""
    draft = StreamsGroupDraft(group, operation)
    draft.remove(member)
    draft.change(StreamsGroupRecordType.GROUP_EPOCH, "", group.group_epoch._replace(epoch=group.epoch + 1))


def require_streams_group(shard: GroupCoordinatorShard, group_id: str) -> StreamsGroup:
    """Raises ApiError."""
    group = shard.groups.get(group_id)
    if group is None:
        raise ApiError(ErrorCode.group_id_not_found, f"Streams group {group_id} not found.")
    if not isinstance(group, StreamsGroup):
        raise ApiError(ErrorCode.group_id_not_found, f"Group {group_id} is not a streams group.")
    return group


def describe_streams_group(shard: GroupCoordinatorShard, group_id: str) -> DescribedStreamsGroup:
    """Raises ApiError."""
    group = require_streams_group(shard, group_id)
    return DescribedStreamsGroup(
        group_id=group_id,
        state=group.state_name,
        epoch=group.epoch,
        target_epoch=group.target.epoch,
        topology=group.topology,
        internal_topics={} if group.configured is None else group.configured.internal_topics,
        members=tuple(group.members.values()),
        targets=dict(group.targets),
    )
