"""What `penstock group` shows of streams groups, which the client library's administrator does not know."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from penstock.cli.client import Cluster, Place
from penstock.cli.coordinators import GROUP, ask_coordinator, coordinator_of, refuse_error
from penstock.cli.group_settings import own_settings
from penstock.protocol.schemas import schema_class

STREAMS: Final = "streams"
#: The only assignor of streams groups.
ASSIGNOR: Final = "sticky"


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

    def owner_of(self, place: Place) -> StreamsMember | None:
        tasks = {(subtopology, place.partition) for subtopology in self.readers.get(place.topic, ())}
        return next((member for member in self.members if member.active & tasks), None)


def describe_streams_group(cluster: Cluster, name: str) -> StreamsGroup:
    """Raises Failure."""
    request = schema_class("streams_group_describe.v0.request:StreamsGroupDescribeRequest")(
        group_ids=(name,), include_authorized_operations=False
    )
    (found,) = ask_coordinator(cluster, name, GROUP, request).groups
    refuse_error(found, f"group {name}")
    readers: dict[str, tuple[str, ...]] = {}
    for subtopology in (found.topology.subtopologies if found.topology else None) or ():
        internal = (topic.name for topic in subtopology.repartition_source_topics)
        for topic in (*subtopology.source_topics, *internal):
            readers[str(topic)] = (*readers.get(str(topic), ()), str(subtopology.subtopology_id))
    return StreamsGroup(_hyphenated(str(found.group_state)), tuple(map(_member, found.members)), readers)


def _hyphenated(state: str) -> str:
    """NotReady as not-ready, as the states of other groups are shown."""
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in state).lstrip("-")


def _member(member: Any) -> StreamsMember:
    return StreamsMember(
        member=str(member.member_id),
        client=str(member.client_id),
        host=str(member.client_host),
        process=str(member.process_id),
        active=_tasks(member.assignment.active_tasks),
        standby=_tasks(member.assignment.standby_tasks),
    )


def _tasks(parts: Any) -> frozenset[tuple[str, int]]:
    return frozenset(
        (str(part.subtopology_id), int(partition)) for part in parts for partition in part.partitions
    )


def streams_description(
    cluster: Cluster, name: str, found: StreamsGroup, committed: Mapping[Place, int]
) -> dict[str, Any]:
    known = cluster.metadata().topics
    places = sorted(
        {place for place in committed if place.topic in known}
        | {place for topic in found.readers if topic in known for place in cluster.places([topic])}
    )
    _, ends = cluster.ends(places)
    partitions = [
        _partition(place, committed.get(place), ends[place], found.owner_of(place)) for place in places
    ]
    return {
        "group": name,
        "state": found.state,
        "assignor": ASSIGNOR,
        "coordinator": coordinator_of(cluster, name, GROUP).node,
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
        "settings": own_settings(cluster, name),
    }


def _partition(place: Place, committed: int | None, end: int, owner: StreamsMember | None) -> dict[str, Any]:
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
