"""What is known of a streams group, as values: its topology, its members, their tasks."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from penstock.groups.consumer.values import Phase

#: Partitions by subtopology: a task is one of each. Never changed in place; no subtopology is without partitions.
Tasks = Mapping[str, frozenset[int]]
NO_TASKS: Final[Tasks] = {}
#: For the active tasks of a member, the epoch since which it has had each without a break.
TaskEpochs = Mapping[str, Mapping[int, int]]
NO_TASK_EPOCHS: Final[TaskEpochs] = {}

#: The epoch of a group, and of its target assignment, before anything was decided: a member that waits for the first
#: assignment is in this epoch, which must not be 0, because 0 is how a member joins.
FIRST_EPOCH: Final = 1
#: The topology epoch of a group whose topics are not as its topology needs them.
NOT_VALIDATED: Final = -1


class TaskSets(NamedTuple):
    """The tasks of one member by what it does with them."""

    active: Tasks = NO_TASKS
    standby: Tasks = NO_TASKS
    warmup: Tasks = NO_TASKS

    def __bool__(self) -> bool:
        return bool(self.active or self.standby or self.warmup)

    def overlaps(self, other: "TaskSets") -> bool:
        """Whether a task is in both, in the same role."""
        return any(
            not partitions.isdisjoint(theirs.get(subtopology, ()))
            for mine, theirs in zip(self, other, strict=True)
            for subtopology, partitions in mine.items()
        )

    def is_within(self, other: "TaskSets") -> bool:
        return not self.without(other)

    def without(self, other: "TaskSets") -> "TaskSets":
        return TaskSets(*map(_without, self, other))

    def shared_with(self, other: "TaskSets") -> "TaskSets":
        return self.without(self.without(other))

    def merged(self, other: "TaskSets") -> "TaskSets":
        return TaskSets(*map(_merged, self, other))

    def every(self) -> Iterator[tuple[str, int]]:
        """Each task, in whatever role."""
        for tasks in self:
            for subtopology, partitions in tasks.items():
                for partition in partitions:
                    yield subtopology, partition


def _without(one: Tasks, other: Tasks) -> Tasks:
    left = {name: partitions - other.get(name, frozenset()) for name, partitions in one.items()}
    return {name: partitions for name, partitions in left.items() if partitions}


def _merged(one: Tasks, other: Tasks) -> Tasks:
    return {name: one.get(name, frozenset()) | other.get(name, frozenset()) for name in {**one, **other}}


NO_TASK_SETS: Final = TaskSets()


class InternalTopic(NamedTuple):
    """A changelog or repartition topic as the application asks for it; 0 leaves a number to the cluster."""

    name: str
    partitions: int = 0
    replication_factor: int = 0
    configs: tuple[tuple[str, str], ...] = ()


class CopartitionGroup(NamedTuple):
    """Topics that must have equally many partitions, by their index in the subtopology."""

    source_topics: tuple[int, ...] = ()
    source_topic_regex: tuple[int, ...] = ()
    repartition_source_topics: tuple[int, ...] = ()


class Subtopology(NamedTuple):
    subtopology_id: str
    source_topics: tuple[str, ...] = ()
    source_topic_regex: tuple[str, ...] = ()
    changelog_topics: tuple[InternalTopic, ...] = ()
    repartition_sink_topics: tuple[str, ...] = ()
    repartition_source_topics: tuple[InternalTopic, ...] = ()
    copartition_groups: tuple[CopartitionGroup, ...] = ()

    @property
    def input_topics(self) -> tuple[str, ...]:
        """All that its tasks read."""
        return (*self.source_topics, *(topic.name for topic in self.repartition_source_topics))


class Topology(NamedTuple):
    epoch: int
    #: Sorted by id.
    subtopologies: tuple[Subtopology, ...] = ()

    @property
    def required_topics(self) -> frozenset[str]:
        return frozenset(
            name
            for subtopology in self.subtopologies
            for name in (
                *subtopology.input_topics,
                *(topic.name for topic in subtopology.changelog_topics),
            )
        )


class Endpoint(NamedTuple):
    """Where a member answers interactive queries."""

    host: str
    port: int


class Metadata(NamedTuple):
    """What a member says of itself."""

    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topology_epoch: int = -1
    process_id: str = ""
    endpoint: Endpoint | None = None
    tags: tuple[tuple[str, str], ...] = ()


class Current(NamedTuple):
    """What a member has been assigned."""

    epoch: int = 0
    previous_epoch: int = -1
    phase: Phase = Phase.STABLE
    assigned: TaskSets = NO_TASK_SETS
    #: To be revoked: the member's until it confirms that it has revoked them.
    revoking: TaskSets = NO_TASK_SETS
    since: TaskEpochs = NO_TASK_EPOCHS

    def moved(
        self, epoch: int, phase: Phase, assigned: TaskSets, revoking: TaskSets = NO_TASK_SETS
    ) -> "Current":
        since = {
            name: {partition: self.since.get(name, {}).get(partition, epoch) for partition in partitions}
            for name, partitions in _merged(assigned.active, revoking.active).items()
        }
        return Current(epoch, self.epoch, phase, assigned, revoking, since)

    def is_settled(self, target_epoch: int) -> bool:
        return self.phase is Phase.STABLE and self.epoch == target_epoch


class Member(NamedTuple):
    member_id: str
    metadata: Metadata = Metadata()
    current: Current = Current()


class GroupEpoch(NamedTuple):
    epoch: int = FIRST_EPOCH
    #: Of the topics that the topology needs, as they were at this epoch.
    metadata_hash: int = 0
    validated_topology_epoch: int = NOT_VALIDATED
    #: The settings with which tasks were assigned.
    assignment_configs: tuple[tuple[str, str], ...] = ()


class TargetEpoch(NamedTuple):
    """The group epoch of the last target assignment, and when it was computed."""

    epoch: int = FIRST_EPOCH
    timestamp_ms: int = 0
