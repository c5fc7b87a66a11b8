# ruff: noqa: RUF009 - wire() is dataclasses.field()
"""What `__consumer_offsets` stores of streams groups, in Kafka's published formats (keys 17 and 19 to 23)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

from kio.static.primitive import i8, i16, i32, i64, u16

from penstock.groups.assigned_records import Forms, Record
from penstock.groups.consumer.schemas import Part, TargetEpochValue, Value, wire
from penstock.groups.consumer.values import Phase
from penstock.groups.shard import GroupShard
from penstock.groups.streams.values import (
    CopartitionGroup,
    Current,
    Endpoint,
    GroupEpoch,
    InternalTopic,
    Metadata,
    Subtopology,
    TargetEpoch,
    TaskEpochs,
    Tasks,
    TaskSets,
    Topology,
)


class Kind(IntEnum):
    """What a record is about, by the number that its key starts with."""

    GROUP_EPOCH = 17  # GroupEpoch
    MEMBER = 19  # Metadata, by member
    TARGET_EPOCH = 20  # TargetEpoch
    TARGET = 21  # TaskSets, by member
    CURRENT = 22  # Current, by member
    TOPOLOGY = 23  # Topology


# --- Kafka's formats ---


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValuePart(Part):
    key: str = wire("string")
    value: str = wire("string")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEpochValue(Value):
    epoch: i32 = wire("int32")
    metadata_hash: i64 = wire("int64")
    validated_topology_epoch: i32 = wire("int32", tag=0, default=i32(-1))
    last_assignment_configs: tuple[KeyValuePart, ...] = field(metadata={"tag": 1}, default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPart(Part):
    host: str = wire("string")
    port: u16 = wire("uint16")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberValue(Value):
    instance_id: str | None = wire("string")
    rack_id: str | None = wire("string")
    client_id: str = wire("string")
    client_host: str = wire("string")
    rebalance_timeout_ms: i32 = wire("int32")
    topology_epoch: i32 = wire("int32")
    process_id: str = wire("string")
    user_endpoint: EndpointPart | None
    client_tags: tuple[KeyValuePart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskIdsPart(Part):
    subtopology_id: str = wire("string")
    partitions: tuple[i32, ...] = wire("int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetValue(Value):
    active_tasks: tuple[TaskIdsPart, ...]
    standby_tasks: tuple[TaskIdsPart, ...]
    warmup_tasks: tuple[TaskIdsPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTaskIdsPart(Part):
    subtopology_id: str = wire("string")
    partitions: tuple[i32, ...] = wire("int32")
    #: One for each partition, of active tasks only.
    assignment_epochs: tuple[i32, ...] | None = wire("int32", tag=0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentValue(Value):
    member_epoch: i32 = wire("int32")
    previous_member_epoch: i32 = wire("int32")
    state: i8 = wire("int8")
    active_tasks: tuple[HeldTaskIdsPart, ...]
    standby_tasks: tuple[HeldTaskIdsPart, ...]
    warmup_tasks: tuple[HeldTaskIdsPart, ...]
    active_tasks_pending_revocation: tuple[HeldTaskIdsPart, ...]
    standby_tasks_pending_revocation: tuple[HeldTaskIdsPart, ...]
    warmup_tasks_pending_revocation: tuple[HeldTaskIdsPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicInfoPart(Part):
    name: str = wire("string")
    partitions: i32 = wire("int32")
    replication_factor: i16 = wire("int16")
    topic_configs: tuple[KeyValuePart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopartitionGroupPart(Part):
    source_topics: tuple[i16, ...] = wire("int16")
    source_topic_regex: tuple[i16, ...] = wire("int16")
    repartition_source_topics: tuple[i16, ...] = wire("int16")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubtopologyPart(Part):
    subtopology_id: str = wire("string")
    source_topics: tuple[str, ...] = wire("string")
    source_topic_regex: tuple[str, ...] = wire("string")
    state_changelog_topics: tuple[TopicInfoPart, ...]
    repartition_sink_topics: tuple[str, ...] = wire("string")
    repartition_source_topics: tuple[TopicInfoPart, ...]
    copartition_groups: tuple[CopartitionGroupPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyValue(Value):
    epoch: i32 = wire("int32")
    subtopologies: tuple[SubtopologyPart, ...]


# --- values to entities and back ---


def _pairs(pairs: Iterable[tuple[str, str]]) -> tuple[Any, ...]:
    return tuple(KeyValuePart(key=key, value=value) for key, value in pairs)


def pairs_of(entities: Iterable[Any] | None) -> tuple[tuple[str, str], ...]:
    return tuple((entity.key, entity.value) for entity in entities or ())


def _group_epoch_entity(value: GroupEpoch) -> Any:
    return GroupEpochValue(
        epoch=value.epoch,
        metadata_hash=value.metadata_hash,
        validated_topology_epoch=value.validated_topology_epoch,
        last_assignment_configs=_pairs(value.assignment_configs),
    )


def _group_epoch(entity: Any) -> GroupEpoch:
    return GroupEpoch(
        entity.epoch,
        entity.metadata_hash,
        entity.validated_topology_epoch,
        pairs_of(entity.last_assignment_configs),
    )


def _member_entity(value: Metadata) -> Any:
    at = value.endpoint
    return MemberValue(
        instance_id=None,
        rack_id=value.rack_id,
        client_id=value.client_id,
        client_host=value.client_host,
        rebalance_timeout_ms=value.rebalance_timeout_ms,
        topology_epoch=value.topology_epoch,
        process_id=value.process_id,
        user_endpoint=None if at is None else EndpointPart(host=at.host, port=at.port),
        client_tags=_pairs(value.tags),
    )


def _member(entity: Any) -> Metadata:
    at = entity.user_endpoint
    return Metadata(
        rack_id=entity.rack_id,
        client_id=entity.client_id,
        client_host=entity.client_host,
        rebalance_timeout_ms=entity.rebalance_timeout_ms,
        topology_epoch=entity.topology_epoch,
        process_id=entity.process_id,
        endpoint=None if at is None else Endpoint(at.host, at.port),
        tags=pairs_of(entity.client_tags),
    )


def tasks_of(entities: Iterable[Any]) -> Tasks:
    """Of anything with a subtopology and partitions."""
    return {entity.subtopology_id: frozenset(entity.partitions) for entity in entities if entity.partitions}


def task_ids(tasks: Tasks, part_class: Any) -> tuple[Any, ...]:
    return tuple(
        part_class(subtopology_id=name, partitions=tuple(sorted(partitions)))
        for name, partitions in sorted(tasks.items())
    )


def _target_entity(value: TaskSets) -> Any:
    return TargetValue(
        active_tasks=task_ids(value.active, TaskIdsPart),
        standby_tasks=task_ids(value.standby, TaskIdsPart),
        warmup_tasks=task_ids(value.warmup, TaskIdsPart),
    )


def _target(entity: Any) -> TaskSets:
    return TaskSets(*map(tasks_of, (entity.active_tasks, entity.standby_tasks, entity.warmup_tasks)))


def _current_entity(value: Current) -> Any:
    assigned, revoking = value.assigned, value.revoking
    return CurrentValue(
        member_epoch=value.epoch,
        previous_member_epoch=value.previous_epoch,
        state=value.phase,
        active_tasks=_held(assigned.active, value.since),
        standby_tasks=task_ids(assigned.standby, HeldTaskIdsPart),
        warmup_tasks=task_ids(assigned.warmup, HeldTaskIdsPart),
        active_tasks_pending_revocation=_held(revoking.active, value.since),
        standby_tasks_pending_revocation=task_ids(revoking.standby, HeldTaskIdsPart),
        warmup_tasks_pending_revocation=task_ids(revoking.warmup, HeldTaskIdsPart),
    )


def _held(tasks: Tasks, since: TaskEpochs) -> tuple[Any, ...]:
    return tuple(
        HeldTaskIdsPart(
            subtopology_id=name,
            partitions=tuple(sorted(partitions)),
            assignment_epochs=tuple(since[name][partition] for partition in sorted(partitions)),
        )
        for name, partitions in sorted(tasks.items())
    )


def _current(entity: Any) -> Current:
    since: dict[str, dict[int, int]] = {}
    for part in (*entity.active_tasks, *entity.active_tasks_pending_revocation):
        epochs = part.assignment_epochs or (entity.member_epoch,) * len(part.partitions)
        since.setdefault(part.subtopology_id, {}).update(zip(part.partitions, epochs, strict=True))
    return Current(
        epoch=entity.member_epoch,
        previous_epoch=entity.previous_member_epoch,
        phase=Phase(entity.state),
        assigned=_target(entity),
        revoking=TaskSets(
            tasks_of(entity.active_tasks_pending_revocation),
            tasks_of(entity.standby_tasks_pending_revocation),
            tasks_of(entity.warmup_tasks_pending_revocation),
        ),
        since=since,
    )


def _topic_info(topic: InternalTopic) -> Any:
    return TopicInfoPart(
        name=topic.name,
        partitions=topic.partitions,
        replication_factor=topic.replication_factor,
        topic_configs=_pairs(topic.configs),
    )


def _internal_topic(entity: Any) -> InternalTopic:
    return InternalTopic(
        entity.name, entity.partitions, entity.replication_factor, pairs_of(entity.topic_configs)
    )


def _topology_entity(value: Topology) -> Any:
    return TopologyValue(
        epoch=value.epoch,
        subtopologies=tuple(
            SubtopologyPart(
                subtopology_id=each.subtopology_id,
                source_topics=each.source_topics,
                source_topic_regex=each.source_topic_regex,
                state_changelog_topics=tuple(map(_topic_info, each.changelog_topics)),
                repartition_sink_topics=each.repartition_sink_topics,
                repartition_source_topics=tuple(map(_topic_info, each.repartition_source_topics)),
                copartition_groups=tuple(
                    CopartitionGroupPart(**group._asdict()) for group in each.copartition_groups
                ),
            )
            for each in value.subtopologies
        ),
    )


def topology_of(entity: Any) -> Topology:
    """Of a record or of a request: they look alike."""
    subtopologies = (
        Subtopology(
            subtopology_id=each.subtopology_id,
            source_topics=tuple(each.source_topics),
            source_topic_regex=tuple(each.source_topic_regex),
            changelog_topics=tuple(map(_internal_topic, each.state_changelog_topics)),
            repartition_sink_topics=tuple(each.repartition_sink_topics),
            repartition_source_topics=tuple(map(_internal_topic, each.repartition_source_topics)),
            copartition_groups=tuple(
                CopartitionGroup(
                    tuple(group.source_topics),
                    tuple(group.source_topic_regex),
                    tuple(group.repartition_source_topics),
                )
                for group in each.copartition_groups
            ),
        )
        for each in entity.subtopologies
    )
    return Topology(entity.epoch, tuple(sorted(subtopologies)))


_ENTITIES: Final[Mapping[Kind, Any]] = {
    Kind.GROUP_EPOCH: _group_epoch_entity,
    Kind.MEMBER: _member_entity,
    Kind.TARGET_EPOCH: lambda value: TargetEpochValue(
        assignment_epoch=value.epoch, assignment_timestamp=value.timestamp_ms
    ),
    Kind.TARGET: _target_entity,
    Kind.CURRENT: _current_entity,
    Kind.TOPOLOGY: _topology_entity,
}
_PARSERS: Final[Mapping[Kind, tuple[Any, Any]]] = {
    Kind.GROUP_EPOCH: (GroupEpochValue, _group_epoch),
    Kind.MEMBER: (MemberValue, _member),
    Kind.TARGET_EPOCH: (
        TargetEpochValue,
        lambda entity: TargetEpoch(entity.assignment_epoch, entity.assignment_timestamp),
    ),
    Kind.TARGET: (TargetValue, _target),
    Kind.CURRENT: (CurrentValue, _current),
    Kind.TOPOLOGY: (TopologyValue, topology_of),
}

FORMS: Final = Forms(
    Kind,
    of_group=(Kind.GROUP_EPOCH, Kind.TARGET_EPOCH, Kind.TOPOLOGY),
    entities=_ENTITIES,
    parsers=_PARSERS,
)


def replay(shard: GroupShard, key: bytes, value: bytes | None) -> None:
    from penstock.groups.replaying import replay_into
    from penstock.groups.streams.group import StreamsGroup  # which is built on these records

    record: Record[Kind] = FORMS.decode(key, value)
    replay_into(shard, record, StreamsGroup, ends_with=Kind.GROUP_EPOCH)
