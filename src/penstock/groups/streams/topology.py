"""The topology of a streams group, and whether the topics match it.

The topology, members and tasks are values. `configure_topology` computes how many tasks a topology has, and which
internal topics are missing.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Final, NamedTuple

from penstock.groups.modern_group import MemberState
from penstock.groups.topics import Topics
from penstock.protocol.errors import ApiError, ErrorCode

#: Partitions by subtopology; each pair is a task. Immutable by convention; subtopologies without tasks are omitted.
Tasks = Mapping[str, frozenset[int]]
NO_TASKS: Final[Tasks] = {}
#: The epoch since which a member has held each of its active tasks without interruption.
TaskEpochs = Mapping[str, Mapping[int, int]]
NO_TASK_EPOCHS: Final[TaskEpochs] = {}

#: The first epoch of a group and of its target assignment. A member that waits for its first assignment is in this
#: epoch. It must not be 0, because a member joins with 0.
FIRST_EPOCH: Final = 1
#: The validated topology epoch of a group whose topics do not match its topology.
NOT_VALIDATED: Final = -1


class TaskSets(NamedTuple):
    """The tasks of one member, by role."""

    active: Tasks = NO_TASKS
    standby: Tasks = NO_TASKS
    warmup: Tasks = NO_TASKS

    def __bool__(self) -> bool:
        return bool(self.active or self.standby or self.warmup)

    def overlaps(self, other: "TaskSets") -> bool:
        """Whether both have a task in the same role."""
        return any(
            not partitions.isdisjoint(theirs.get(subtopology, ()))
            for mine, theirs in zip(self, other, strict=True)
            for subtopology, partitions in mine.items()
        )

    def is_within(self, other: "TaskSets") -> bool:
        return not self.without(other)

    def without(self, other: "TaskSets") -> "TaskSets":
        return TaskSets(*map(_task_difference, self, other))

    def shared_with(self, other: "TaskSets") -> "TaskSets":
        return self.without(self.without(other))

    def merged(self, other: "TaskSets") -> "TaskSets":
        return TaskSets(*map(_task_union, self, other))

    def every(self) -> Iterator[tuple[str, int]]:
        """All tasks, whatever their role."""
        for tasks in self:
            for subtopology, partitions in tasks.items():
                for partition in partitions:
                    yield subtopology, partition


def _task_difference(one: Tasks, other: Tasks) -> Tasks:
    left = {name: partitions - other.get(name, frozenset()) for name, partitions in one.items()}
    return {name: partitions for name, partitions in left.items() if partitions}


def _task_union(one: Tasks, other: Tasks) -> Tasks:
    return {name: one.get(name, frozenset()) | other.get(name, frozenset()) for name in {**one, **other}}


NO_TASK_SETS: Final = TaskSets()


class InternalTopic(NamedTuple):
    """A changelog or repartition topic as the application requests it; 0 leaves the number to the cluster."""

    name: str
    partitions: int = 0
    replication_factor: int = 0
    configs: tuple[tuple[str, str], ...] = ()


class CopartitionGroup(NamedTuple):
    """Topics that must have the same number of partitions, by their index in the subtopology."""

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
        """The topics that its tasks read."""
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
    """The address at which a member answers interactive queries."""

    host: str
    port: int


class StreamsMemberMetadata(NamedTuple):
    """What a member reports about itself."""

    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topology_epoch: int = -1
    process_id: str = ""
    endpoint: Endpoint | None = None
    tags: tuple[tuple[str, str], ...] = ()


class StreamsCurrentAssignment(NamedTuple):
    """The assignment that the member has received."""

    epoch: int = 0
    previous_epoch: int = -1
    phase: MemberState = MemberState.STABLE
    assigned: TaskSets = NO_TASK_SETS
    #: The member must revoke these; it still owns them until it confirms.
    revoking: TaskSets = NO_TASK_SETS
    since: TaskEpochs = NO_TASK_EPOCHS

    def moved(
        self, epoch: int, phase: MemberState, assigned: TaskSets, revoking: TaskSets = NO_TASK_SETS
    ) -> "StreamsCurrentAssignment":
        since = {
            name: {partition: self.since.get(name, {}).get(partition, epoch) for partition in partitions}
            for name, partitions in _task_union(assigned.active, revoking.active).items()
        }
        return StreamsCurrentAssignment(epoch, self.epoch, phase, assigned, revoking, since)

    def is_settled(self, target_epoch: int) -> bool:
        return self.phase is MemberState.STABLE and self.epoch == target_epoch


class StreamsGroupMember(NamedTuple):
    member_id: str
    metadata: StreamsMemberMetadata = StreamsMemberMetadata()
    current: StreamsCurrentAssignment = StreamsCurrentAssignment()


class StreamsGroupEpoch(NamedTuple):
    epoch: int = FIRST_EPOCH
    #: A hash of the topics that the topology needs, at this epoch.
    metadata_hash: int = 0
    validated_topology_epoch: int = NOT_VALIDATED
    #: The settings with which tasks were assigned.
    assignment_configs: tuple[tuple[str, str], ...] = ()


class StreamsTargetEpoch(NamedTuple):
    """The group epoch of the last target assignment, and when it was computed."""

    epoch: int = FIRST_EPOCH
    timestamp_ms: int = 0


#: How many names a message lists.
_NAMES_MAX: Final = 10
#: The maximum for one group: many subtopologies on a topic of many partitions would keep the node busy for minutes.
TASKS_MAX: Final = 20_000


class StreamsStatusCode(IntEnum):
    """The status of the group in a heartbeat reply, numbered as on the wire."""

    STALE_TOPOLOGY = 0
    MISSING_SOURCE_TOPICS = 1
    INCORRECTLY_PARTITIONED_TOPICS = 2
    MISSING_INTERNAL_TOPICS = 3
    SHUTDOWN_APPLICATION = 4
    ASSIGNMENT_DELAYED = 5


class StreamsStatus(NamedTuple):
    code: StreamsStatusCode
    detail: str


class ConfiguredTopology(NamedTuple):
    #: By subtopology; empty while the topics do not match.
    task_counts: Mapping[str, int]
    #: Internal topics with their number of partitions.
    internal_topics: Mapping[str, InternalTopic]
    missing_topics: tuple[InternalTopic, ...] = ()
    #: Why the topics do not match; None if they do.
    status: StreamsStatus | None = None

    @property
    def is_ready(self) -> bool:
        return self.status is None


class _MisconfiguredTopics(Exception):
    def __init__(self, code: StreamsStatusCode, detail: str) -> None:
        super().__init__(detail)
        self.status = StreamsStatus(code, detail)


def configure_topology(topology: Topology, topics: Topics) -> ConfiguredTopology:
    """Raises ApiError (STREAMS_INVALID_TOPOLOGY) for a topology that no topics could satisfy."""
    try:
        return _configure(topology, topics)
    except _MisconfiguredTopics as problem:
        return ConfiguredTopology({}, {}, status=problem.status)


def _configure(topology: Topology, topics: Topics) -> ConfiguredTopology:
    existing = {
        name: found.partition_count
        for name in topology.required_topics
        if (found := topics.get(name)) is not None
    }
    sources = {name for subtopology in topology.subtopologies for name in subtopology.source_topics}
    if missing := sources - existing.keys():
        detail = f"Source topics {_listed(missing)} are missing."
        raise _MisconfiguredTopics(StreamsStatusCode.MISSING_SOURCE_TOPICS, detail)
    counts = _repartition_counts(topology, existing)
    _enforce_copartitioning(topology, existing, counts)
    known = {**counts, **existing}
    task_counts: dict[str, int] = {}
    internal: dict[str, InternalTopic] = {}
    for subtopology in topology.subtopologies:
        inputs = subtopology.input_topics
        if not inputs:
            raise _invalid_topology(f"No source topics found for subtopology {subtopology.subtopology_id}")
        tasks = task_counts[subtopology.subtopology_id] = max(known[name] for name in inputs)
        for topic in subtopology.repartition_source_topics:
            internal[topic.name] = topic._replace(partitions=counts[topic.name])
        for topic in subtopology.changelog_topics:
            internal[topic.name] = topic._replace(partitions=tasks)
    if (total := sum(task_counts.values())) > TASKS_MAX:
        raise _invalid_topology(f"The topology has {total} tasks, but a group can have at most {TASKS_MAX}.")
    for name, topic in internal.items():
        if existing.get(name, topic.partitions) != topic.partitions:
            detail = (
                f"Existing topic {name} has different number of partitions: expected {topic.partitions}, "
                f"found {existing[name]}"
            )
            raise _MisconfiguredTopics(StreamsStatusCode.INCORRECTLY_PARTITIONED_TOPICS, detail)
    to_create = tuple(topic for name, topic in sorted(internal.items()) if name not in existing)
    status = None
    if to_create:
        detail = f"Internal topics are missing: {_listed(topic.name for topic in to_create)}"
        status = StreamsStatus(StreamsStatusCode.MISSING_INTERNAL_TOPICS, detail)
    return ConfiguredTopology(task_counts, internal, to_create, status)


def _repartition_counts(topology: Topology, existing: Mapping[str, int]) -> dict[str, int]:
    """The number of the application, or else that of the largest input of the subtopology that writes the topic.

    In rounds: a subtopology that has an input with a known number decides for all topics that it writes. Each decides
    only once, so a long chain takes no longer than its length.
    """
    every = topology.subtopologies
    counts = {
        topic.name: topic.partitions
        for subtopology in every
        for topic in subtopology.repartition_source_topics
        if topic.partitions
    }
    readers: dict[str, list[int]] = defaultdict(list)
    for number, subtopology in enumerate(every):
        for topic in subtopology.repartition_source_topics:
            readers[topic.name].append(number)
    ready = {n for n, subtopology in enumerate(every) if _largest_input(subtopology, counts, existing)}
    done = set(ready)
    while ready:
        decided: dict[str, int] = {}
        for number in sorted(ready):
            count = _largest_input(every[number], counts, existing)
            assert count is not None
            decided |= {sink: count for sink in every[number].repartition_sink_topics if sink not in counts}
        counts.update(decided)
        ready = {number for sink in decided for number in readers.get(sink, ())} - done
        done |= ready
    if any(sink not in counts for subtopology in every for sink in subtopology.repartition_sink_topics):
        raise _invalid_topology(
            "Failed to compute number of partitions for all repartition topics. There may be loops in the "
            "topology that cannot be resolved."
        )
    for subtopology in every:
        if any(topic.name not in counts for topic in subtopology.repartition_source_topics):
            raise _invalid_topology(
                "Failed to compute number of partitions for all repartition topics, because a repartition source "
                "topic is never used as a sink topic."
            )
    return counts


def _largest_input(
    subtopology: Subtopology, counts: Mapping[str, int], existing: Mapping[str, int]
) -> int | None:
    """None while the number of partitions of no input is known."""
    repartition = (counts.get(topic.name) for topic in subtopology.repartition_source_topics)
    sources = (existing.get(name) for name in subtopology.source_topics)
    return max((count for count in (*repartition, *sources) if count is not None), default=None)


def _enforce_copartitioning(topology: Topology, existing: Mapping[str, int], counts: dict[str, int]) -> None:
    """Gives repartition topics the number of partitions of the topics with which they are joined."""
    fixed = {
        topic.name
        for subtopology in topology.subtopologies
        for topic in subtopology.repartition_source_topics
        if topic.partitions
    }
    for subtopology in topology.subtopologies:
        for group in subtopology.copartition_groups:
            try:
                sources = {subtopology.source_topics[index] for index in group.source_topics}
                repartition = {
                    subtopology.repartition_source_topics[index].name
                    for index in group.repartition_source_topics
                }
            except IndexError:
                raise _invalid_topology(
                    "A copartition group refers to a topic that its subtopology does not have."
                ) from None
            _enforce_group(sources - repartition, repartition, fixed, existing, counts)


def _enforce_group(
    sources: set[str],
    repartition: set[str],
    fixed: set[str],
    existing: Mapping[str, int],
    counts: dict[str, int],
) -> None:
    if sources:
        wanted = _common_partition_count({name: existing[name] for name in sources})
    elif repartition & fixed:
        wanted = _common_partition_count({name: counts[name] for name in repartition & fixed})
    elif repartition:
        wanted = max(counts[name] for name in repartition)
    else:
        return
    for name in repartition:
        if name in fixed and counts[name] != wanted:
            detail = (
                f"Number of partitions [{counts[name]}] of repartition topic [{name}] doesn't match number of "
                f"partitions [{wanted}] of the source topic."
            )
            raise _MisconfiguredTopics(StreamsStatusCode.INCORRECTLY_PARTITIONED_TOPICS, detail)
        counts[name] = wanted


def _common_partition_count(counts: Mapping[str, int]) -> int:
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name}={count}" for name, count in sorted(counts.items()))
        detail = f"Following topics do not have the same number of partitions: [{listed}]"
        raise _MisconfiguredTopics(StreamsStatusCode.INCORRECTLY_PARTITIONED_TOPICS, detail)
    return next(iter(counts.values()))


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - _NAMES_MAX} more" if len(ordered) > _NAMES_MAX else ""
    return ", ".join(ordered[:_NAMES_MAX]) + rest


def _invalid_topology(message: str) -> ApiError:
    return ApiError(ErrorCode.streams_invalid_topology, message)
