"""What `penstock group` requests and shows beyond the admin client of confluent-kafka: share groups, streams
groups, and the settings of single groups.

A share group is described by its start offsets and lag, because it has no committed offsets.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import typer

from penstock.cli.cluster_client import (
    GROUP_COORDINATOR,
    REQUEST_TIMEOUT_S,
    Address,
    LibrdkafkaCluster,
    PartitionName,
    find_coordinator,
    raise_for_error,
    request_from_all_brokers,
    request_from_coordinator,
    send_request,
)
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, parse_pairs
from penstock.cli.output import note, print_table
from penstock.protocol.schemas import schema_class

#: The config source that brokers report for settings of a single group.
_DYNAMIC_GROUP_CONFIG = 8


def group_settings(cluster: LibrdkafkaCluster, group: str) -> dict[str, str | None]:
    """The settings of this group itself. Also empty if the cluster does not support group settings."""
    from confluent_kafka.admin import ConfigResource

    resource = ConfigResource(ConfigResource.Type.GROUP, group)
    answer = cluster.admin.describe_configs([resource], request_timeout=REQUEST_TIMEOUT_S)
    entries = cluster.wait_each({group: answer[resource]})[group]
    if isinstance(entries, CommandError):
        return {}
    return {
        entry.name: entry.value
        for entry in sorted(entries.values(), key=lambda entry: str(entry.name))
        if int(getattr(entry.source, "value", entry.source)) == _DYNAMIC_GROUP_CONFIG
    }


def alter(
    group: Annotated[str, typer.Argument(metavar="GROUP", show_default=False)],
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-c", metavar="NAME=VALUE", help="A setting of the group; may be repeated."),
    ] = None,
    delete_config: Annotated[
        list[str] | None,
        typer.Option("--delete-config", "-d", metavar="NAME", help="Return a setting to its default."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Change the settings of a group. It need not exist yet."""
    settings, removed = parse_pairs(config or (), "--config"), delete_config or []
    if not settings and not removed:
        raise CommandError("nothing to change", hint="give --config or --delete-config", exit_code=EXIT_USAGE)
    cluster = LibrdkafkaCluster(bootstrap)
    cluster.alter_settings("GROUP", group, settings, removed)
    note(f"{group} altered")


SHARE: Final = "share"


class ShareMember(NamedTuple):
    member: str
    client: str
    host: str
    partitions: tuple[PartitionName, ...]


class ShareGroup(NamedTuple):
    state: str
    assignor: str | None
    members: tuple[ShareMember, ...]


class ShareOffset(NamedTuple):
    """`start` is None until the first fetch has set it; `lag` is None if it is unknown."""

    start: int | None
    lag: int | None


def list_group_types(cluster: LibrdkafkaCluster) -> dict[str, str]:
    """The type of every group; groups on brokers that do not report types are missing."""
    return dict(sorted(request_from_all_brokers(cluster, _list_on_broker)))


def share_group_names(cluster: LibrdkafkaCluster) -> list[str]:
    return [name for name, kind in list_group_types(cluster).items() if kind == SHARE]


def _list_on_broker(address: Address) -> list[tuple[str, str]]:
    request = schema_class("list_groups.v5.request:ListGroupsRequest")(states_filter=(), types_filter=())
    return [
        (str(group.group_id), kind)
        for group in send_request(address, request).groups
        if (kind := getattr(group, "group_type", "").lower())
    ]


def describe_share_group(cluster: LibrdkafkaCluster, name: str) -> ShareGroup:
    """Raises CommandError."""
    request = schema_class("share_group_describe.v1.request:ShareGroupDescribeRequest")(
        group_ids=(name,), include_authorized_operations=False
    )
    (found,) = request_from_coordinator(cluster, name, GROUP_COORDINATOR, request).groups
    raise_for_error(found, f"group {name}")
    return ShareGroup(
        str(found.group_state).lower(), found.assignor_name or None, tuple(map(_share_member, found.members))
    )


def _share_member(member: Any) -> ShareMember:
    places = (
        PartitionName(str(topic.topic_name), int(index))
        for topic in member.assignment.topic_partitions
        for index in topic.partitions
    )
    return ShareMember(
        str(member.member_id), str(member.client_id), str(member.client_host), tuple(sorted(places))
    )


def describe_share_offsets(cluster: LibrdkafkaCluster, name: str) -> dict[PartitionName, ShareOffset]:
    """All partitions for which the group has a state. Raises CommandError."""
    module = "describe_share_group_offsets.v1.request"
    asked = schema_class(f"{module}:DescribeShareGroupOffsetsRequestGroup")(group_id=name, topics=None)
    request = schema_class(f"{module}:DescribeShareGroupOffsetsRequest")(groups=(asked,))
    (found,) = request_from_coordinator(cluster, name, GROUP_COORDINATOR, request).groups
    raise_for_error(found, f"group {name}")
    return {
        PartitionName(str(topic.topic_name), int(part.partition_index)): ShareOffset(
            _none_if_negative(int(part.start_offset)), _none_if_negative(int(getattr(part, "lag", -1)))
        )
        for topic in found.topics
        for part in topic.partitions
    }


def _none_if_negative(number: int) -> int | None:
    return None if number < 0 else number


def alter_share_offsets(cluster: LibrdkafkaCluster, name: str, offsets: dict[PartitionName, int]) -> None:
    """Raises CommandError."""
    module = "alter_share_group_offsets.v0.request"
    partition_class = schema_class(f"{module}:AlterShareGroupOffsetsRequestPartition")
    topic_class = schema_class(f"{module}:AlterShareGroupOffsetsRequestTopic")
    by_topic: defaultdict[str, list[Any]] = defaultdict(list)
    for place, offset in offsets.items():
        by_topic[place.topic].append(partition_class(partition_index=place.partition, start_offset=offset))
    topics = tuple(
        topic_class(topic_name=topic, partitions=tuple(parts)) for topic, parts in by_topic.items()
    )
    request = schema_class(f"{module}:AlterShareGroupOffsetsRequest")(group_id=name, topics=topics)
    answer = request_from_coordinator(cluster, name, GROUP_COORDINATOR, request)
    raise_for_error(answer, f"group {name}")
    for topic in answer.responses:
        for part in topic.partitions:
            raise_for_error(part, str(PartitionName(str(topic.topic_name), int(part.partition_index))))


def delete_group(cluster: LibrdkafkaCluster, name: str) -> None:
    """Works for every type of group. Raises CommandError."""
    request = schema_class("delete_groups.v2.request:DeleteGroupsRequest")(groups_names=(name,))
    (result,) = request_from_coordinator(cluster, name, GROUP_COORDINATOR, request).results
    raise_for_error(result, f"group {name}")


UNKNOWN_SHARE_OFFSET = ShareOffset(None, None)


def share_start_offsets(cluster: LibrdkafkaCluster, name: str) -> dict[PartitionName, int]:
    return {
        place: offset.start
        for place, offset in describe_share_offsets(cluster, name).items()
        if offset.start is not None
    }


def share_group_document(cluster: LibrdkafkaCluster, name: str, found: ShareGroup) -> dict[str, Any]:
    offsets = describe_share_offsets(cluster, name)
    places = sorted({*offsets, *(place for member in found.members for place in member.partitions)})
    _, ends = cluster.ends(places)
    partitions = [
        _share_partition_document(place, offsets.get(place, UNKNOWN_SHARE_OFFSET), ends[place], found.members)
        for place in places
    ]
    return {
        "group": name,
        "state": found.state,
        "assignor": found.assignor,
        "coordinator": find_coordinator(cluster, name, GROUP_COORDINATOR).node,
        "members": [_share_member_document(member) for member in found.members],
        "lag": sum(part["lag"] or 0 for part in partitions),
        "partitions": partitions,
        "type": SHARE,
        "settings": group_settings(cluster, name),
    }


def _share_partition_document(
    place: PartitionName, offset: ShareOffset, end: int, members: tuple[ShareMember, ...]
) -> dict[str, Any]:
    return {
        "topic": place.topic,
        "partition": place.partition,
        "start": offset.start,
        "end": end,
        "lag": offset.lag,
        "members": sum(place in member.partitions for member in members),
    }


def _share_member_document(member: ShareMember) -> dict[str, Any]:
    return {
        "member": member.member,
        "instance": None,
        "client": member.client,
        "host": member.host,
        "partitions": len(member.partitions),
    }


def print_share_partitions(document: dict[str, Any]) -> None:
    partitions = document["partitions"]
    if partitions:
        print()
        print_table(list(partitions[0]), (list(part.values()) for part in partitions))


STREAMS: Final = "streams"
#: The only assignor of streams groups.
STREAMS_ASSIGNOR: Final = "sticky"


class StreamsMember(NamedTuple):
    member: str
    client: str
    host: str
    process: str
    #: (subtopology, partition)
    active: frozenset[tuple[str, int]]
    standby: frozenset[tuple[str, int]]


class StreamsGroup(NamedTuple):
    state: str
    members: tuple[StreamsMember, ...]
    #: By topic, the subtopologies that read it.
    readers: Mapping[str, tuple[str, ...]]

    def owner_of(self, place: PartitionName) -> StreamsMember | None:
        tasks = {(subtopology, place.partition) for subtopology in self.readers.get(place.topic, ())}
        return next((member for member in self.members if member.active & tasks), None)


def describe_streams_group(cluster: LibrdkafkaCluster, name: str) -> StreamsGroup:
    """Raises CommandError."""
    request = schema_class("streams_group_describe.v0.request:StreamsGroupDescribeRequest")(
        group_ids=(name,), include_authorized_operations=False
    )
    (found,) = request_from_coordinator(cluster, name, GROUP_COORDINATOR, request).groups
    raise_for_error(found, f"group {name}")
    readers: dict[str, tuple[str, ...]] = {}
    for subtopology in (found.topology.subtopologies if found.topology else None) or ():
        internal = (topic.name for topic in subtopology.repartition_source_topics)
        for topic in (*subtopology.source_topics, *internal):
            readers[str(topic)] = (*readers.get(str(topic), ()), str(subtopology.subtopology_id))
    return StreamsGroup(
        _hyphenated(str(found.group_state)), tuple(map(_streams_member, found.members)), readers
    )


def _hyphenated(state: str) -> str:
    """NotReady as not-ready, like the states of other groups."""
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in state).lstrip("-")


def _streams_member(member: Any) -> StreamsMember:
    return StreamsMember(
        member=str(member.member_id),
        client=str(member.client_id),
        host=str(member.client_host),
        process=str(member.process_id),
        active=_task_ids(member.assignment.active_tasks),
        standby=_task_ids(member.assignment.standby_tasks),
    )


def _task_ids(parts: Any) -> frozenset[tuple[str, int]]:
    return frozenset(
        (str(part.subtopology_id), int(partition)) for part in parts for partition in part.partitions
    )


def streams_group_document(
    cluster: LibrdkafkaCluster, name: str, found: StreamsGroup, committed: Mapping[PartitionName, int]
) -> dict[str, Any]:
    known = cluster.metadata().topics
    places = sorted(
        {place for place in committed if place.topic in known}
        | {place for topic in found.readers if topic in known for place in cluster.places([topic])}
    )
    _, ends = cluster.ends(places)
    partitions = [
        _streams_partition_document(place, committed.get(place), ends[place], found.owner_of(place))
        for place in places
    ]
    return {
        "group": name,
        "state": found.state,
        "assignor": STREAMS_ASSIGNOR,
        "coordinator": find_coordinator(cluster, name, GROUP_COORDINATOR).node,
        "members": [
            {
                "member": member.member,
                "instance": None,
                "client": member.client,
                "host": member.host,
                "process": member.process,
                "active_tasks": sorted(f"{name}_{number}" for name, number in member.active),
                "standby_tasks": sorted(f"{name}_{number}" for name, number in member.standby),
            }
            for member in found.members
        ],
        "lag": sum(part["lag"] or 0 for part in partitions),
        "partitions": partitions,
        "type": STREAMS,
        "settings": group_settings(cluster, name),
    }


def _streams_partition_document(
    place: PartitionName, committed: int | None, end: int, owner: StreamsMember | None
) -> dict[str, Any]:
    return {
        "topic": place.topic,
        "partition": place.partition,
        "committed": committed,
        "end": end,
        "lag": None if committed is None else max(0, end - committed),
        "member": owner.member if owner else None,
        "client": owner.client if owner else None,
        "host": owner.host if owner else None,
    }
