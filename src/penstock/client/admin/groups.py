"""Lists, describes, changes and deletes groups of every type: classic, consumer, share and streams."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kio.serial import entity_reader
from kio.serial.errors import SerialError

from penstock.client.errors import raise_for_error
from penstock.client.wire.cluster import Cluster, CoordinatorType
from penstock.client.wire.connection import Connection
from penstock.client.wire.metadata import TopicPartition, by_topic
from penstock.protocol.errors import ErrorCode
from penstock.protocol.schemas import schema_class

CLASSIC: Final = "classic"
CONSUMER: Final = "consumer"
SHARE: Final = "share"
STREAMS: Final = "streams"
DEAD_STATE: Final = "Dead"

#: The only assignor of streams groups.
_STREAMS_ASSIGNOR: Final = "sticky"
_CONSUMER_PROTOCOL: Final = "consumer"
_VERSION: Final = struct.Struct(">h")

#: A subtopology and a partition.
Task = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberDescription:
    id: str
    client_id: str
    host: str
    instance_id: str | None = None
    partitions: tuple[TopicPartition, ...] = ()
    #: Only members of streams groups have a process and tasks.
    process: str = ""
    active_tasks: frozenset[Task] = frozenset()
    standby_tasks: frozenset[Task] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDescription:
    group: str
    kind: str
    state: str
    assignor: str | None
    coordinator_id: int
    members: tuple[MemberDescription, ...]
    #: The subtopologies of a streams group that read each topic.
    readers: Mapping[str, tuple[str, ...]]

    def owner(self, topic: str, partition: int) -> MemberDescription | None:
        """The member that this partition is assigned to, in any but a share group."""
        tasks = {(subtopology, partition) for subtopology in self.readers.get(topic, ())}
        return next(
            (
                member
                for member in self.members
                if (topic, partition) in member.partitions or member.active_tasks & tasks
            ),
            None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOffset:
    """`start` is None until the first fetch has set it; `lag` is None if it is unknown."""

    start: int | None = None
    lag: int | None = None


def describe_group(cluster: Cluster, group: str, kind: str) -> GroupDescription:
    """`kind` is the type from `list_groups`; a classic group that does not exist has the state Dead.

    Raises Refused, Unavailable.
    """
    describe = {CONSUMER: _describe_consumer, SHARE: _describe_share, STREAMS: _describe_streams}.get(
        kind, _describe_classic
    )

    def ask(connection: Connection) -> dict[str, Any]:
        return describe(connection, group)

    found = cluster.call_coordinator(CoordinatorType.GROUP, group, ask)
    coordinator_id = cluster.coordinator_id(CoordinatorType.GROUP, group)
    return GroupDescription(group=group, kind=kind, coordinator_id=coordinator_id, **{"readers": {}, **found})


def _describe_classic(connection: Connection, group: str) -> dict[str, Any]:
    request = schema_class("describe_groups.v5.request:DescribeGroupsRequest")(
        groups=(group,), include_authorized_operations=False
    )
    (found,) = connection.call(request).groups
    raise_for_error(found.error_code, f"group {group}")
    reads_topics = found.protocol_type == _CONSUMER_PROTOCOL
    members = (
        MemberDescription(
            id=str(member.member_id),
            instance_id=getattr(member, "group_instance_id", None) or None,
            client_id=str(member.client_id),
            host=str(member.client_host),
            partitions=_decode_assignment(member.member_assignment) if reads_topics else (),
        )
        for member in found.members
    )
    return {
        "state": str(found.group_state),
        "assignor": str(found.protocol_data) or None,
        "members": tuple(members),
    }


def _decode_assignment(data: bytes | None) -> tuple[TopicPartition, ...]:
    """All versions begin alike. Empty if a client wrote something else."""
    if not data:
        return ()
    assignment = schema_class("consumer_protocol_assignment.v0.data:ConsumerProtocolAssignment")
    try:
        found, _ = entity_reader(assignment)(bytes(data), _VERSION.size)
    except (SerialError, struct.error, IndexError, ValueError):
        return ()
    return tuple(
        sorted(
            (str(topic.topic), int(index))
            for topic in found.assigned_partitions
            for index in topic.partitions
        )
    )


def _describe_consumer(connection: Connection, group: str) -> dict[str, Any]:
    found = _describe_one(
        connection, schema_class("consumer_group_describe.v1.request:ConsumerGroupDescribeRequest"), group
    )
    return {
        "state": str(found.group_state),
        "assignor": str(found.assignor_name) or None,
        "members": tuple(_assigned_member(member) for member in found.members),
    }


def _describe_share(connection: Connection, group: str) -> dict[str, Any]:
    found = _describe_one(
        connection, schema_class("share_group_describe.v1.request:ShareGroupDescribeRequest"), group
    )
    return {
        "state": str(found.group_state),
        "assignor": found.assignor_name or None,
        "members": tuple(_assigned_member(member) for member in found.members),
    }


def _describe_streams(connection: Connection, group: str) -> dict[str, Any]:
    found = _describe_one(
        connection, schema_class("streams_group_describe.v0.request:StreamsGroupDescribeRequest"), group
    )
    readers: dict[str, tuple[str, ...]] = {}
    for subtopology in (found.topology.subtopologies if found.topology else None) or ():
        internal = (topic.name for topic in subtopology.repartition_source_topics)
        for topic in (*subtopology.source_topics, *internal):
            readers[str(topic)] = (*readers.get(str(topic), ()), str(subtopology.subtopology_id))
    members = (
        MemberDescription(
            id=str(member.member_id),
            client_id=str(member.client_id),
            host=str(member.client_host),
            process=str(member.process_id),
            active_tasks=_tasks(member.assignment.active_tasks),
            standby_tasks=_tasks(member.assignment.standby_tasks),
        )
        for member in found.members
    )
    return {
        "state": str(found.group_state),
        "assignor": _STREAMS_ASSIGNOR,
        "members": tuple(members),
        "readers": readers,
    }


def _describe_one(connection: Connection, request: Any, group: str) -> Any:
    (found,) = connection.call(request(group_ids=(group,), include_authorized_operations=False)).groups
    raise_for_error(found.error_code, f"group {group}", found.error_message)
    return found


def _assigned_member(member: Any) -> MemberDescription:
    return MemberDescription(
        id=str(member.member_id),
        instance_id=getattr(member, "instance_id", None) or None,
        client_id=str(member.client_id),
        host=str(member.client_host),
        partitions=tuple(
            sorted(
                (str(topic.topic_name), int(index))
                for topic in member.assignment.topic_partitions
                for index in topic.partitions
            )
        ),
    )


def _tasks(parts: Any) -> frozenset[Task]:
    return frozenset(
        (str(part.subtopology_id), int(partition)) for part in parts for partition in part.partitions
    )


def share_offsets(cluster: Cluster, group: str) -> dict[TopicPartition, ShareOffset]:
    """All partitions for which the share group has a state. Raises Refused, Unavailable."""
    module = "describe_share_group_offsets.v1.request"
    wanted = schema_class(f"{module}:DescribeShareGroupOffsetsRequestGroup")(group_id=group, topics=None)
    request = schema_class(f"{module}:DescribeShareGroupOffsetsRequest")(groups=(wanted,))

    def ask(connection: Connection) -> dict[TopicPartition, ShareOffset]:
        (found,) = connection.call(request).groups
        raise_for_error(found.error_code, f"group {group}", found.error_message)
        return {
            (str(topic.topic_name), int(part.partition_index)): ShareOffset(
                start=_none_if_negative(int(part.start_offset)),
                lag=_none_if_negative(int(getattr(part, "lag", -1))),
            )
            for topic in found.topics
            for part in topic.partitions
        }

    return cluster.call_coordinator(CoordinatorType.GROUP, group, ask)


def _none_if_negative(number: int) -> int | None:
    return None if number < 0 else number


def alter_share_offsets(cluster: Cluster, group: str, offsets: Mapping[TopicPartition, int]) -> None:
    """Sets the start offsets of a share group that has no members. Raises Refused, Unavailable."""
    module = "alter_share_group_offsets.v0.request"
    partition_class = schema_class(f"{module}:AlterShareGroupOffsetsRequestPartition")
    topic_class = schema_class(f"{module}:AlterShareGroupOffsetsRequestTopic")
    topics = tuple(
        topic_class(
            topic_name=name,
            partitions=tuple(
                partition_class(partition_index=index, start_offset=offset) for index, offset in parts
            ),
        )
        for name, parts in by_topic(offsets.items()).items()
    )
    request = schema_class(f"{module}:AlterShareGroupOffsetsRequest")(group_id=group, topics=topics)

    def ask(connection: Connection) -> None:
        response = connection.call(request)
        raise_for_error(response.error_code, f"group {group}", response.error_message)
        for topic in response.responses:
            for part in topic.partitions:
                raise_for_error(
                    part.error_code, f"{topic.topic_name}[{part.partition_index}]", part.error_message
                )

    cluster.call_coordinator(CoordinatorType.GROUP, group, ask)


def delete_group(cluster: Cluster, group: str) -> None:
    """Works for every type of group. Raises Refused (NON_EMPTY_GROUP, GROUP_ID_NOT_FOUND), Unavailable."""
    request = schema_class("delete_groups.v2.request:DeleteGroupsRequest")(groups_names=(group,))

    def ask(connection: Connection) -> ErrorCode:
        (result,) = connection.call(request).results
        raise_for_error(result.error_code, f"group {group}")
        return ErrorCode.none

    cluster.call_coordinator(CoordinatorType.GROUP, group, ask)
