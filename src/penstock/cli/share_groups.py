"""What `penstock group` asks about share groups, which the client library's administrator does not know."""

from collections import defaultdict
from typing import Any, Final, NamedTuple

from penstock.cli.client import Cluster, Place
from penstock.cli.coordinators import GROUP, ask_coordinator, ask_everyone, refuse_error
from penstock.cli.wire import Address, ask
from penstock.protocol.schemas import schema_class

SHARE: Final = "share"


class ShareMember(NamedTuple):
    member: str
    client: str
    host: str
    partitions: tuple[Place, ...]


class ShareGroup(NamedTuple):
    state: str
    assignor: str | None
    members: tuple[ShareMember, ...]


class ShareOffset(NamedTuple):
    """`start` is None until the first fetch has decided on it, `lag` where it is not known."""

    start: int | None
    lag: int | None


def groups_by_type(cluster: Cluster) -> dict[str, str]:
    """The type of every group whose broker knows of types."""
    return dict(sorted(ask_everyone(cluster, _listed)))


def share_group_names(cluster: Cluster) -> list[str]:
    return [name for name, kind in groups_by_type(cluster).items() if kind == SHARE]


def _listed(address: Address) -> list[tuple[str, str]]:
    request = schema_class("list_groups.v5.request:ListGroupsRequest")(states_filter=(), types_filter=())
    return [
        (str(group.group_id), kind)
        for group in ask(address, request).groups
        if (kind := getattr(group, "group_type", "").lower())
    ]


def describe_share_group(cluster: Cluster, name: str) -> ShareGroup:
    """Raises Failure."""
    request = schema_class("share_group_describe.v1.request:ShareGroupDescribeRequest")(
        group_ids=(name,), include_authorized_operations=False
    )
    (found,) = ask_coordinator(cluster, name, GROUP, request).groups
    refuse_error(found, f"group {name}")
    return ShareGroup(
        str(found.group_state).lower(), found.assignor_name or None, tuple(map(_member, found.members))
    )


def _member(member: Any) -> ShareMember:
    places = (
        Place(str(topic.topic_name), int(index))
        for topic in member.assignment.topic_partitions
        for index in topic.partitions
    )
    return ShareMember(
        str(member.member_id), str(member.client_id), str(member.client_host), tuple(sorted(places))
    )


def share_offsets(cluster: Cluster, name: str) -> dict[Place, ShareOffset]:
    """Of all that the group has a state for. Raises Failure."""
    module = "describe_share_group_offsets.v1.request"
    asked = schema_class(f"{module}:DescribeShareGroupOffsetsRequestGroup")(group_id=name, topics=None)
    request = schema_class(f"{module}:DescribeShareGroupOffsetsRequest")(groups=(asked,))
    (found,) = ask_coordinator(cluster, name, GROUP, request).groups
    refuse_error(found, f"group {name}")
    return {
        Place(str(topic.topic_name), int(part.partition_index)): ShareOffset(
            _known(int(part.start_offset)), _known(int(getattr(part, "lag", -1)))
        )
        for topic in found.topics
        for part in topic.partitions
    }


def _known(number: int) -> int | None:
    return None if number < 0 else number


def alter_share_offsets(cluster: Cluster, name: str, offsets: dict[Place, int]) -> None:
    """Raises Failure."""
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
    answer = ask_coordinator(cluster, name, GROUP, request)
    refuse_error(answer, f"group {name}")
    for topic in answer.responses:
        for part in topic.partitions:
            refuse_error(part, str(Place(str(topic.topic_name), int(part.partition_index))))


def delete_group(cluster: Cluster, name: str) -> None:
    """Of any kind. Raises Failure."""
    request = schema_class("delete_groups.v2.request:DeleteGroupsRequest")(groups_names=(name,))
    (result,) = ask_coordinator(cluster, name, GROUP, request).results
    refuse_error(result, f"group {name}")
