"""Whether the topics are as a topology needs them: how many tasks it has, and which internal topics are missing."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Final, NamedTuple

from penstock.groups.streams.values import InternalTopic, Subtopology, Topology
from penstock.groups.topics import Topics
from penstock.protocol.errors import ApiError, ErrorCode

#: How many names a message lists.
_NAMES_MAX: Final = 10
#: Of one group. A topology of many subtopologies on a topic of many partitions would keep the node busy for minutes.
TASKS_MAX: Final = 20_000


class StatusCode(IntEnum):
    """What a heartbeat's reply says of the group, beside errors; numbered as on the wire."""

    STALE_TOPOLOGY = 0
    MISSING_SOURCE_TOPICS = 1
    INCORRECTLY_PARTITIONED_TOPICS = 2
    MISSING_INTERNAL_TOPICS = 3
    SHUTDOWN_APPLICATION = 4
    ASSIGNMENT_DELAYED = 5


class Status(NamedTuple):
    code: StatusCode
    detail: str


class ConfiguredTopology(NamedTuple):
    #: By subtopology; empty while the topics are not as they must be.
    task_counts: Mapping[str, int]
    #: Internal topics with the numbers of partitions that were decided for them.
    internal_topics: Mapping[str, InternalTopic]
    missing_topics: tuple[InternalTopic, ...] = ()
    #: What is wrong with the topics.
    status: Status | None = None

    @property
    def is_ready(self) -> bool:
        return self.status is None


class _Misconfigured(Exception):
    def __init__(self, code: StatusCode, detail: str) -> None:
        super().__init__(detail)
        self.status = Status(code, detail)


def configure(topology: Topology, topics: Topics) -> ConfiguredTopology:
    """Raises ApiError (STREAMS_INVALID_TOPOLOGY) for a topology that no topics could satisfy."""
    try:
        return _configure(topology, topics)
    except _Misconfigured as problem:
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
        raise _Misconfigured(StatusCode.MISSING_SOURCE_TOPICS, detail)
    counts = _repartition_counts(topology, existing)
    _enforce_copartitioning(topology, existing, counts)
    known = {**counts, **existing}
    task_counts: dict[str, int] = {}
    internal: dict[str, InternalTopic] = {}
    for subtopology in topology.subtopologies:
        inputs = subtopology.input_topics
        if not inputs:
            raise _invalid(f"No source topics found for subtopology {subtopology.subtopology_id}")
        tasks = task_counts[subtopology.subtopology_id] = max(known[name] for name in inputs)
        for topic in subtopology.repartition_source_topics:
            internal[topic.name] = topic._replace(partitions=counts[topic.name])
        for topic in subtopology.changelog_topics:
            internal[topic.name] = topic._replace(partitions=tasks)
    if (total := sum(task_counts.values())) > TASKS_MAX:
        raise _invalid(f"The topology has {total} tasks, but a group can have at most {TASKS_MAX}.")
    for name, topic in internal.items():
        if existing.get(name, topic.partitions) != topic.partitions:
            detail = (
                f"Existing topic {name} has different number of partitions: expected {topic.partitions}, "
                f"found {existing[name]}"
            )
            raise _Misconfigured(StatusCode.INCORRECTLY_PARTITIONED_TOPICS, detail)
    to_create = tuple(topic for name, topic in sorted(internal.items()) if name not in existing)
    status = None
    if to_create:
        detail = f"Internal topics are missing: {_listed(topic.name for topic in to_create)}"
        status = Status(StatusCode.MISSING_INTERNAL_TOPICS, detail)
    return ConfiguredTopology(task_counts, internal, to_create, status)


def _repartition_counts(topology: Topology, existing: Mapping[str, int]) -> dict[str, int]:
    """As many partitions as the application says, or as the largest input of the subtopology that writes them.

    In rounds: a subtopology that has an input with a known number decides for all topics that it writes. Each has its
    round once, however long the chain is.
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
        raise _invalid(
            "Failed to compute number of partitions for all repartition topics. There may be loops in the "
            "topology that cannot be resolved."
        )
    for subtopology in every:
        if any(topic.name not in counts for topic in subtopology.repartition_source_topics):
            raise _invalid(
                "Failed to compute number of partitions for all repartition topics, because a repartition source "
                "topic is never used as a sink topic."
            )
    return counts


def _largest_input(
    subtopology: Subtopology, counts: Mapping[str, int], existing: Mapping[str, int]
) -> int | None:
    """None while none of its inputs is known."""
    repartition = (counts.get(topic.name) for topic in subtopology.repartition_source_topics)
    sources = (existing.get(name) for name in subtopology.source_topics)
    return max((count for count in (*repartition, *sources) if count is not None), default=None)


def _enforce_copartitioning(topology: Topology, existing: Mapping[str, int], counts: dict[str, int]) -> None:
    """Gives repartition topics the number of partitions of the topics that they are joined with."""
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
                raise _invalid(
                    "A copartition group refers to a topic that its subtopology does not have."
                ) from None
            _enforce(sources - repartition, repartition, fixed, existing, counts)


def _enforce(
    sources: set[str],
    repartition: set[str],
    fixed: set[str],
    existing: Mapping[str, int],
    counts: dict[str, int],
) -> None:
    if sources:
        wanted = _same({name: existing[name] for name in sources})
    elif repartition & fixed:
        wanted = _same({name: counts[name] for name in repartition & fixed})
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
            raise _Misconfigured(StatusCode.INCORRECTLY_PARTITIONED_TOPICS, detail)
        counts[name] = wanted


def _same(counts: Mapping[str, int]) -> int:
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name}={count}" for name, count in sorted(counts.items()))
        detail = f"Following topics do not have the same number of partitions: [{listed}]"
        raise _Misconfigured(StatusCode.INCORRECTLY_PARTITIONED_TOPICS, detail)
    return next(iter(counts.values()))


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - _NAMES_MAX} more" if len(ordered) > _NAMES_MAX else ""
    return ", ".join(ordered[:_NAMES_MAX]) + rest


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.streams_invalid_topology, message)
