"""A streams group: its state, changed by records only, and what a shard asks of a group of any kind."""

from collections.abc import Iterator
from typing import Any, ClassVar

from penstock.groups.assigned_records import Record
from penstock.groups.consumer.values import Phase
from penstock.groups.drafting import GroupDraft
from penstock.groups.messages import (
    CommitRequest,
    DescribedGroup,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LeaveResults,
    OffsetToCommit,
    SyncReply,
    SyncRequest,
)
from penstock.groups.records import CommittedOffset, KeyValue
from penstock.groups.shard import GroupShard
from penstock.groups.streams.assignor import Candidate, assign_sticky
from penstock.groups.streams.messages import DescribedStreamsGroup
from penstock.groups.streams.records import FORMS, Kind
from penstock.groups.streams.topology import ConfiguredTopology, configure
from penstock.groups.streams.values import (
    NO_TASK_SETS,
    Current,
    GroupEpoch,
    Member,
    Metadata,
    TargetEpoch,
    TaskSets,
    Topology,
)
from penstock.groups.timers import Timers
from penstock.groups.topics import Topics
from penstock.groups.work import Step, Timer, Token
from penstock.protocol.errors import ApiError, ErrorCode

# Timers: of a member, and of a group that waits for more members before its first assignment.
SESSION, REBALANCE, INITIAL_DELAY = "streams session", "streams rebalance", "streams initial delay"
#: The assignment setting that is stored with the epoch for which it was used, under Kafka's name.
STANDBY_REPLICAS = "num.standby.replicas"


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
        self.group_epoch = GroupEpoch()
        self.target = TargetEpoch()
        self.members: dict[str, Member] = {}
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

    def record_of(self, kind: Kind, name: str, value: Any) -> KeyValue:
        return FORMS.encode(Record(kind, self.group_id, name, value))

    def apply(self, kind: Kind, name: str, value: Any) -> None:
        """`value` is None for a deletion; deleting what is not there is harmless, because tombstones outlive it."""
        match kind:
            case Kind.GROUP_EPOCH:
                self.group_epoch = value or GroupEpoch()
            case Kind.TARGET_EPOCH:
                self.target = value or TargetEpoch()
            case Kind.TOPOLOGY:
                self.topology, self.configured, self.topics_version = value, None, None
            case Kind.TARGET:
                if value is None:
                    self.targets.pop(name, None)
                else:
                    self.targets[name] = value
            case Kind.MEMBER | Kind.CURRENT:
                self._apply_to_member(kind, name, value)

    def _apply_to_member(self, kind: Kind, member_id: str, value: Metadata | Current | None) -> None:
        """A compacted log may have a member's assignment before its metadata."""
        member = self.members.get(member_id)
        if value is None:
            if kind is Kind.MEMBER:
                self.members.pop(member_id, None)
                self.reported.pop(member_id, None)
                if not self.members:
                    self.shutdown_requested_by = None
            elif member is not None:
                self.members[member_id] = member._replace(current=Current())
            return
        member = member or Member(member_id)
        if isinstance(value, Metadata):
            self.members[member_id] = member._replace(metadata=value)
        else:
            self.members[member_id] = member._replace(current=value)

    def tombstones(self) -> Iterator[KeyValue]:
        for kind in (Kind.CURRENT, Kind.TARGET):
            for member_id in self.members:
                yield self.record_of(kind, member_id, None)
        yield self.record_of(Kind.TARGET_EPOCH, "", None)
        for member_id in self.members:
            yield self.record_of(Kind.MEMBER, member_id, None)
        yield self.record_of(Kind.TOPOLOGY, "", None)
        yield self.record_of(Kind.GROUP_EPOCH, "", None)

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
    def gives_way(self) -> bool:
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

    def join(self, request: JoinRequest, token: Token, step: Step, *, new_member_id: str) -> None:
        error = ErrorCode.inconsistent_group_protocol
        step.reply(token, JoinReply(error=error, member_id=request.member_id))

    def sync(self, request: SyncRequest, token: Token, step: Step) -> None:
        step.reply(token, SyncReply(error=ErrorCode.unknown_member_id))

    def heartbeat(self, request: HeartbeatRequest, step: Step) -> ErrorCode:
        return ErrorCode.unknown_member_id

    def leave(self, request: LeaveRequest, step: Step) -> LeaveResults:
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
            had = all(_has_had(member, each, epoch, readers) for each in request.offsets)
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

    def loaded(self, step: Step) -> None:
        timeout_ms = step.config_of(self.group_id).streams_session_timeout_ms
        for member in self.members.values():
            step.schedule_in(Timer(SESSION, self.group_id, member.member_id), timeout_ms)
            if member.current.phase is Phase.UNREVOKED:
                timer = Timer(REBALANCE, self.group_id, member.member_id)
                step.schedule_in(timer, member.metadata.rebalance_timeout_ms)

    def heard_of(self, member_id: str, step: Step) -> None:
        """Only heartbeats count."""

    def time_out(self, timer: Timer, step: Step) -> None:
        if timer.kind == INITIAL_DELAY:
            if self.members:
                Draft(self, step).update_target()
            return
        member = self.members.get(timer.member_id)
        if member is not None and timer.kind in (SESSION, REBALANCE):
            fence(self, member, step)

    def dropped(self, timers: Timers[Timer]) -> None:
        timers.cancel(Timer(INITIAL_DELAY, self.group_id))
        for member_id in self.members:
            for kind in (SESSION, REBALANCE):
                timers.cancel(Timer(kind, self.group_id, member_id))


def _has_had(member: Member, offset: OffsetToCommit, epoch: int, readers: dict[str, list[str]]) -> bool:
    """Whether the member has a task that reads the partition, and had it in this epoch already."""
    return any(
        member.current.since.get(subtopology, {}).get(offset.partition, epoch + 1) <= epoch
        for subtopology in readers.get(offset.topic, ())
    )


class Draft(GroupDraft[StreamsGroup]):
    """An operation on a streams group under way."""

    __slots__ = ()

    def remove(self, member: Member) -> None:
        for kind in (Kind.CURRENT, Kind.TARGET, Kind.MEMBER):
            self.change(kind, member.member_id, None)
        for timer in (SESSION, REBALANCE):
            self.step.timers.cancel(Timer(timer, self.group_id, member.member_id))

    def configured(self) -> ConfiguredTopology:
        """The topology on the topics as they are now. Raises ApiError for a topology that no topics could satisfy."""
        state = self.state
        assert state.topology is not None
        if state.configured is None or not self.knows_topics:
            state.configured = configure(state.topology, self.step.topics)
            if self._origin.topology == state.topology:
                self._origin.configured = state.configured
            self.topics_seen()
        return state.configured

    def update_target(self) -> None:
        """Assigns tasks for the group's epoch: records for members whose tasks change, and one for the epoch."""
        state = self.state
        if state.epoch <= state.target.epoch or state.topology is None:
            return
        configs = dict(state.group_epoch.assignment_configs)
        members = {
            member_id: Candidate(member.metadata.process_id, state.targets.get(member_id, NO_TASK_SETS))
            for member_id, member in sorted(state.members.items())
        }
        configured = self.configured()
        stateful = (each.subtopology_id for each in state.topology.subtopologies if each.changelog_topics)
        assigned = assign_sticky(
            members,
            configured.task_counts if configured.is_ready else {},
            stateful,
            int(configs.get(STANDBY_REPLICAS, "0")),
        )
        for member_id, target in assigned.items():
            if target != members[member_id].target or member_id not in state.targets:
                self.change(Kind.TARGET, member_id, target)
        self.change(Kind.TARGET_EPOCH, "", TargetEpoch(state.epoch, self.step.now_ms))


def fence(group: StreamsGroup, member: Member, step: Step) -> None:
    """Removes the member. Its tasks are assigned with the next heartbeat of another one."""
    draft = Draft(group, step)
    draft.remove(member)
    draft.change(Kind.GROUP_EPOCH, "", group.group_epoch._replace(epoch=group.epoch + 1))


def existing(shard: GroupShard, group_id: str) -> StreamsGroup:
    """Raises ApiError."""
    group = shard.groups.get(group_id)
    if group is None:
        raise ApiError(ErrorCode.group_id_not_found, f"Streams group {group_id} not found.")
    if not isinstance(group, StreamsGroup):
        raise ApiError(ErrorCode.group_id_not_found, f"Group {group_id} is not a streams group.")
    return group


def described(shard: GroupShard, group_id: str) -> DescribedStreamsGroup:
    """Raises ApiError."""
    group = existing(shard, group_id)
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
