"""A streams group as one kind of group in the shard: its data, its messages and its assignor.

Only records change the data. Messages are independent of the wire version. The `sticky` assignor makes each task
active on one member, gives all members the same number of tasks, and moves as few tasks as possible. A task that must
move goes to a member that has it as a standby task, because the state is there, or to the member with the fewest tasks.
Only stateful tasks have standby tasks; no process has a task twice.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Any, ClassVar, NamedTuple, Self

from penstock.groups.group import CommitRequest, OffsetToCommit, Operation
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.modern_group import (
    GroupDraft,
    GroupRecordCodec,
    MemberState,
    ModernGroup,
    ModernHeartbeatReply,
    put_or_remove,
    require_group,
)
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
from penstock.groups.timers import TimerKey, Timers
from penstock.groups.topics import Topics
from penstock.protocol.errors import ErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsHeartbeatRequest:
    """None means that a field has not changed since the last heartbeat."""

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
    #: The current settings of the group.
    session_timeout_ms: int
    heartbeat_interval_ms: int
    assignment_interval_ms: int
    initial_rebalance_delay_ms: int
    standby_replicas: int


class EndpointPartitions(NamedTuple):
    """The partitions that can be queried at the endpoint of a member, by topic."""

    endpoint: Endpoint
    active: Mapping[str, tuple[int, ...]]
    standby: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsHeartbeatReply(ModernHeartbeatReply):
    member_id: str = ""
    statuses: tuple[StreamsStatus, ...] = ()
    #: None if it has not changed since the last reply.
    assigned: TaskSets | None = None
    endpoint_epoch: int = 0
    #: None if the member has the current endpoints.
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
    #: Internal topics with their partition counts, as far as these are decided.
    internal_topics: Mapping[str, InternalTopic]
    members: tuple[StreamsGroupMember, ...]
    targets: Mapping[str, TaskSets]


Task = tuple[str, int]


class StreamsAssignorMember(NamedTuple):
    """The input of the assignor for one member."""

    process_id: str
    #: The previous target, of which the assignor keeps as much as possible.
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
    # If the tasks cannot be divided evenly, the members that have most keep one more.
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
    # A heap finds the first member with the most room without a scan for each task.
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
    """Assigns fewer standby tasks than requested if there are not enough processes."""
    load = Counter(active.values())
    previous: dict[Task, list[str]] = defaultdict(list)
    for member_id, member in members.items():
        # A member that had the task, active or standby, still has its state.
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


class StreamsGroup(ModernGroup):
    __slots__ = (
        "configured",
        "endpoint_epoch",
        "group_epoch",
        "reported",
        "shutdown_requested_by",
        "target",
        "topology",
    )

    kind: ClassVar[str] = "streams"
    codec: ClassVar[GroupRecordCodec[Any]] = STREAMS_GROUP_CODEC
    member_timers: ClassVar[tuple[str, ...]] = (SESSION_TIMER, REBALANCE_TIMER)
    members: dict[str, StreamsGroupMember]
    targets: dict[str, TaskSets]

    def __init__(self, group_id: str) -> None:
        super().__init__(group_id)
        self.group_epoch = StreamsGroupEpoch()
        self.target = StreamsTargetEpoch()
        self.topology: Topology | None = None
        # Not stored, so a coordinator that loads the group computes these again:
        self.configured: ConfiguredTopology | None = None
        self.endpoint_epoch = 0
        self.shutdown_requested_by: str | None = None
        #: The tasks that members last reported as owned.
        self.reported: dict[str, TaskSets] = {}

    def __repr__(self) -> str:
        members = list(self.members.values())
        return (
            f"<StreamsGroup {self.group_id} {self.group_epoch} target={self.target.epoch} members={members}>"
        )

    def fork(self) -> Self:
        copy = type(self)(self.group_id)
        copy.group_epoch, copy.target, copy.topology = self.group_epoch, self.target, self.topology
        copy.members, copy.targets = dict(self.members), dict(self.targets)
        copy.topics_version, copy.configured = self.topics_version, self.configured
        copy.endpoint_epoch, copy.shutdown_requested_by = self.endpoint_epoch, self.shutdown_requested_by
        copy.reported = self.reported
        return copy

    # Changes

    def apply(self, kind: StreamsGroupRecordType, name: str, value: Any) -> None:
        match kind:
            case StreamsGroupRecordType.GROUP_METADATA:
                self.group_epoch = value or StreamsGroupEpoch()
            case StreamsGroupRecordType.TARGET_ASSIGNMENT_METADATA:
                self.target = value or StreamsTargetEpoch()
            case StreamsGroupRecordType.TOPOLOGY:
                self.topology, self.configured, self.topics_version = value, None, None
            case StreamsGroupRecordType.TARGET_ASSIGNMENT_MEMBER:
                put_or_remove(self.targets, name, value)
            case StreamsGroupRecordType.MEMBER_METADATA | StreamsGroupRecordType.CURRENT_MEMBER_ASSIGNMENT:
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
            if kind is StreamsGroupRecordType.MEMBER_METADATA:
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

    def _other_records(self) -> Iterable[tuple[StreamsGroupRecordType, str]]:
        return ((StreamsGroupRecordType.TOPOLOGY, ""),)

    # Properties

    @property
    def epoch(self) -> int:
        return self.group_epoch.epoch

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
    def stored(self) -> object:
        return (self.group_epoch, self.target, self.topology, dict(self.members), dict(self.targets))

    @property
    def subtopologies_by_source(self) -> dict[str, list[str]]:
        """The subtopologies that read each topic, including repartition topics."""
        found: dict[str, list[str]] = {}
        for subtopology in () if self.topology is None else self.topology.subtopologies:
            for name in subtopology.input_topics:
                found.setdefault(name, []).append(subtopology.subtopology_id)
        return found

    # Offsets

    def check_commit(
        self, request: CommitRequest, topics: Topics, *, is_transactional: bool = False
    ) -> ErrorCode:
        if self.is_commit_without_member(request, is_transactional=is_transactional):
            return ErrorCode.none
        member_id, epoch = request.member_id, request.generation
        member = self.members.get(member_id)
        if member is not None and 0 < epoch < member.current.epoch:
            # A member that missed its latest epochs may commit for tasks that it has held since the request's epoch.
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

    def is_subscribed(self, topic: str) -> bool:
        return bool(self.members) and topic in self.subtopologies_by_source

    # Lifecycle

    def loaded(self, operation: Operation) -> None:
        timeout_ms = operation.config_of(self.group_id).streams_session_timeout_ms
        for member in self.members.values():
            operation.schedule_in(TimerKey(SESSION_TIMER, self.group_id, member.member_id), timeout_ms)
            if member.current.phase is MemberState.UNREVOKED:
                timer = TimerKey(REBALANCE_TIMER, self.group_id, member.member_id)
                operation.schedule_in(timer, member.metadata.rebalance_timeout_ms)

    def time_out(self, timer: TimerKey, operation: Operation) -> None:
        if timer.kind == INITIAL_DELAY_TIMER:
            if self.members:
                StreamsGroupDraft(self, operation).update_target()
            return
        member = self.members.get(timer.member_id)
        if member is not None and timer.kind in self.member_timers:
            fence_member(self, member, operation)

    def removed(self, timers: Timers[TimerKey]) -> None:
        timers.cancel(TimerKey(INITIAL_DELAY_TIMER, self.group_id))
        super().removed(timers)


def _was_assigned_at(
    member: StreamsGroupMember, offset: OffsetToCommit, epoch: int, readers: dict[str, list[str]]
) -> bool:
    """Whether the member holds a task that reads the partition, and already held it at this epoch."""
    return any(
        member.current.since.get(subtopology, {}).get(offset.partition, epoch + 1) <= epoch
        for subtopology in readers.get(offset.topic, ())
    )


class StreamsGroupDraft(GroupDraft[StreamsGroup]):
    """An operation on a streams group."""

    __slots__ = ()

    def configured(self) -> ConfiguredTopology:
        """The topology applied to the current topics. Raises ApiError for a topology that no topics could satisfy."""
        state = self.state
        assert state.topology is not None
        if state.configured is None or not self.topics_unchanged:
            state.configured = configure_topology(state.topology, self.operation.topics)
            if self._origin.topology == state.topology:
                self._origin.configured = state.configured
            self.mark_topics_seen()
        return state.configured

    def update_target(self) -> None:
        """Store the new tasks of each member whose tasks change, and then the target epoch."""
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
                self.change(StreamsGroupRecordType.TARGET_ASSIGNMENT_MEMBER, member_id, target)
        self.change(
            StreamsGroupRecordType.TARGET_ASSIGNMENT_METADATA,
            "",
            StreamsTargetEpoch(state.epoch, self.operation.now_ms),
        )


def fence_member(group: StreamsGroup, member: StreamsGroupMember, operation: Operation) -> None:
    """Remove the member. Its tasks are assigned with the next heartbeat of another member."""
    draft = StreamsGroupDraft(group, operation)
    draft.remove(member.member_id)
    draft.change(StreamsGroupRecordType.GROUP_METADATA, "", group.group_epoch._replace(epoch=group.epoch + 1))


def describe_streams_group(shard: GroupCoordinatorShard, group_id: str) -> DescribedStreamsGroup:
    """Raises ApiError."""
    group = require_group(shard, group_id, StreamsGroup)
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
