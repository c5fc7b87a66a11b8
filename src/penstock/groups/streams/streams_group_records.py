"""Records of streams groups in `__consumer_offsets` (keys 17 and 19 to 23), in Kafka's published formats."""

from collections.abc import Iterable, Mapping
from dataclasses import field
from enum import IntEnum
from typing import Any, Final

from kio.static.primitive import i8, i16, i32, i64, u16

from penstock.groups.modern_group import GroupRecordCodec, MemberState, TargetAssignmentMetadataValue
from penstock.groups.streams.topology import (
    CopartitionGroup,
    Endpoint,
    InternalTopic,
    StreamsCurrentAssignment,
    StreamsGroupEpoch,
    StreamsMemberMetadata,
    StreamsTargetEpoch,
    Subtopology,
    TaskEpochs,
    Tasks,
    TaskSets,
    Topology,
)
from penstock.protocol.stored_records import NestedSchema, RecordSchema, kafka_field, schema


class StreamsGroupRecordType(IntEnum):
    """The record types, by the number at the start of the key."""

    GROUP_METADATA = 17  # GroupEpoch
    MEMBER_METADATA = 19  # Metadata, by member
    TARGET_ASSIGNMENT_METADATA = 20  # TargetEpoch
    TARGET_ASSIGNMENT_MEMBER = 21  # TaskSets, by member
    CURRENT_MEMBER_ASSIGNMENT = 22  # Current, by member
    TOPOLOGY = 23  # Topology


# --- Kafka's formats ---


@schema()
class KeyValuePart(NestedSchema):
    key: str = kafka_field("string")
    value: str = kafka_field("string")


@schema()
class StreamsGroupMetadataValue(RecordSchema):
    epoch: i32 = kafka_field("int32")
    metadata_hash: i64 = kafka_field("int64")
    validated_topology_epoch: i32 = kafka_field("int32", tag=0, default=i32(-1))
    last_assignment_configs: tuple[KeyValuePart, ...] = field(metadata={"tag": 1}, default=())


@schema()
class EndpointPart(NestedSchema):
    host: str = kafka_field("string")
    port: u16 = kafka_field("uint16")


@schema()
class StreamsGroupMemberMetadataValue(RecordSchema):
    instance_id: str | None = kafka_field("string")
    rack_id: str | None = kafka_field("string")
    client_id: str = kafka_field("string")
    client_host: str = kafka_field("string")
    rebalance_timeout_ms: i32 = kafka_field("int32")
    topology_epoch: i32 = kafka_field("int32")
    process_id: str = kafka_field("string")
    user_endpoint: EndpointPart | None
    client_tags: tuple[KeyValuePart, ...]


@schema()
class TaskIdsPart(NestedSchema):
    subtopology_id: str = kafka_field("string")
    partitions: tuple[i32, ...] = kafka_field("int32")


@schema()
class StreamsGroupTargetAssignmentMemberValue(RecordSchema):
    active_tasks: tuple[TaskIdsPart, ...]
    standby_tasks: tuple[TaskIdsPart, ...]
    warmup_tasks: tuple[TaskIdsPart, ...]


@schema()
class AssignedTaskIdsPart(NestedSchema):
    subtopology_id: str = kafka_field("string")
    partitions: tuple[i32, ...] = kafka_field("int32")
    #: One epoch for each partition; only for active tasks.
    assignment_epochs: tuple[i32, ...] | None = kafka_field("int32", tag=0, default=None)


@schema()
class StreamsGroupCurrentMemberAssignmentValue(RecordSchema):
    member_epoch: i32 = kafka_field("int32")
    previous_member_epoch: i32 = kafka_field("int32")
    state: i8 = kafka_field("int8")
    active_tasks: tuple[AssignedTaskIdsPart, ...]
    standby_tasks: tuple[AssignedTaskIdsPart, ...]
    warmup_tasks: tuple[AssignedTaskIdsPart, ...]
    active_tasks_pending_revocation: tuple[AssignedTaskIdsPart, ...]
    standby_tasks_pending_revocation: tuple[AssignedTaskIdsPart, ...]
    warmup_tasks_pending_revocation: tuple[AssignedTaskIdsPart, ...]


@schema()
class TopicInfoPart(NestedSchema):
    name: str = kafka_field("string")
    partitions: i32 = kafka_field("int32")
    replication_factor: i16 = kafka_field("int16")
    topic_configs: tuple[KeyValuePart, ...]


@schema()
class CopartitionGroupPart(NestedSchema):
    source_topics: tuple[i16, ...] = kafka_field("int16")
    source_topic_regex: tuple[i16, ...] = kafka_field("int16")
    repartition_source_topics: tuple[i16, ...] = kafka_field("int16")


@schema()
class SubtopologyPart(NestedSchema):
    subtopology_id: str = kafka_field("string")
    source_topics: tuple[str, ...] = kafka_field("string")
    source_topic_regex: tuple[str, ...] = kafka_field("string")
    state_changelog_topics: tuple[TopicInfoPart, ...]
    repartition_sink_topics: tuple[str, ...] = kafka_field("string")
    repartition_source_topics: tuple[TopicInfoPart, ...]
    copartition_groups: tuple[CopartitionGroupPart, ...]


@schema()
class StreamsGroupTopologyValue(RecordSchema):
    epoch: i32 = kafka_field("int32")
    subtopologies: tuple[SubtopologyPart, ...]


# --- values to entities and back ---


def _pairs(pairs: Iterable[tuple[str, str]]) -> tuple[Any, ...]:
    return tuple(KeyValuePart(key=key, value=value) for key, value in pairs)


def pairs_of(entities: Iterable[Any] | None) -> tuple[tuple[str, str], ...]:
    return tuple((entity.key, entity.value) for entity in entities or ())


def _group_epoch_entity(value: StreamsGroupEpoch) -> Any:
    return StreamsGroupMetadataValue(
        epoch=value.epoch,
        metadata_hash=value.metadata_hash,
        validated_topology_epoch=value.validated_topology_epoch,
        last_assignment_configs=_pairs(value.assignment_configs),
    )


def _group_epoch(entity: Any) -> StreamsGroupEpoch:
    return StreamsGroupEpoch(
        entity.epoch,
        entity.metadata_hash,
        entity.validated_topology_epoch,
        pairs_of(entity.last_assignment_configs),
    )


def _member_entity(value: StreamsMemberMetadata) -> Any:
    at = value.endpoint
    return StreamsGroupMemberMetadataValue(
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


def _member(entity: Any) -> StreamsMemberMetadata:
    at = entity.user_endpoint
    return StreamsMemberMetadata(
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
    """`entities` are any objects with a subtopology and partitions."""
    return {entity.subtopology_id: frozenset(entity.partitions) for entity in entities if entity.partitions}


def task_ids(tasks: Tasks, part_class: Any) -> tuple[Any, ...]:
    return tuple(
        part_class(subtopology_id=name, partitions=tuple(sorted(partitions)))
        for name, partitions in sorted(tasks.items())
    )


def _target_entity(value: TaskSets) -> Any:
    return StreamsGroupTargetAssignmentMemberValue(
        active_tasks=task_ids(value.active, TaskIdsPart),
        standby_tasks=task_ids(value.standby, TaskIdsPart),
        warmup_tasks=task_ids(value.warmup, TaskIdsPart),
    )


def _target(entity: Any) -> TaskSets:
    return TaskSets(*map(tasks_of, (entity.active_tasks, entity.standby_tasks, entity.warmup_tasks)))


def _current_entity(value: StreamsCurrentAssignment) -> Any:
    assigned, revoking = value.assigned, value.revoking
    return StreamsGroupCurrentMemberAssignmentValue(
        member_epoch=value.epoch,
        previous_member_epoch=value.previous_epoch,
        state=value.phase,
        active_tasks=_assigned_task_ids(assigned.active, value.since),
        standby_tasks=task_ids(assigned.standby, AssignedTaskIdsPart),
        warmup_tasks=task_ids(assigned.warmup, AssignedTaskIdsPart),
        active_tasks_pending_revocation=_assigned_task_ids(revoking.active, value.since),
        standby_tasks_pending_revocation=task_ids(revoking.standby, AssignedTaskIdsPart),
        warmup_tasks_pending_revocation=task_ids(revoking.warmup, AssignedTaskIdsPart),
    )


def _assigned_task_ids(tasks: Tasks, since: TaskEpochs) -> tuple[Any, ...]:
    return tuple(
        AssignedTaskIdsPart(
            subtopology_id=name,
            partitions=tuple(sorted(partitions)),
            assignment_epochs=tuple(since[name][partition] for partition in sorted(partitions)),
        )
        for name, partitions in sorted(tasks.items())
    )


def _current(entity: Any) -> StreamsCurrentAssignment:
    since: dict[str, dict[int, int]] = {}
    for part in (*entity.active_tasks, *entity.active_tasks_pending_revocation):
        epochs = part.assignment_epochs or (entity.member_epoch,) * len(part.partitions)
        since.setdefault(part.subtopology_id, {}).update(zip(part.partitions, epochs, strict=True))
    return StreamsCurrentAssignment(
        epoch=entity.member_epoch,
        previous_epoch=entity.previous_member_epoch,
        phase=MemberState(entity.state),
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
    return StreamsGroupTopologyValue(
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
    """The topology of a record or of a request, which have the same fields."""
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


_ENTITIES: Final[Mapping[StreamsGroupRecordType, Any]] = {
    StreamsGroupRecordType.GROUP_METADATA: _group_epoch_entity,
    StreamsGroupRecordType.MEMBER_METADATA: _member_entity,
    StreamsGroupRecordType.TARGET_ASSIGNMENT_METADATA: lambda value: TargetAssignmentMetadataValue(
        assignment_epoch=value.epoch, assignment_timestamp=value.timestamp_ms
    ),
    StreamsGroupRecordType.TARGET_ASSIGNMENT_MEMBER: _target_entity,
    StreamsGroupRecordType.CURRENT_MEMBER_ASSIGNMENT: _current_entity,
    StreamsGroupRecordType.TOPOLOGY: _topology_entity,
}
_PARSERS: Final[Mapping[StreamsGroupRecordType, tuple[Any, Any]]] = {
    StreamsGroupRecordType.GROUP_METADATA: (StreamsGroupMetadataValue, _group_epoch),
    StreamsGroupRecordType.MEMBER_METADATA: (StreamsGroupMemberMetadataValue, _member),
    StreamsGroupRecordType.TARGET_ASSIGNMENT_METADATA: (
        TargetAssignmentMetadataValue,
        lambda entity: StreamsTargetEpoch(entity.assignment_epoch, entity.assignment_timestamp),
    ),
    StreamsGroupRecordType.TARGET_ASSIGNMENT_MEMBER: (StreamsGroupTargetAssignmentMemberValue, _target),
    StreamsGroupRecordType.CURRENT_MEMBER_ASSIGNMENT: (StreamsGroupCurrentMemberAssignmentValue, _current),
    StreamsGroupRecordType.TOPOLOGY: (StreamsGroupTopologyValue, topology_of),
}

STREAMS_GROUP_CODEC: Final = GroupRecordCodec(
    StreamsGroupRecordType,
    of_group=(
        StreamsGroupRecordType.GROUP_METADATA,
        StreamsGroupRecordType.TARGET_ASSIGNMENT_METADATA,
        StreamsGroupRecordType.TOPOLOGY,
    ),
    entities=_ENTITIES,
    parsers=_PARSERS,
)
