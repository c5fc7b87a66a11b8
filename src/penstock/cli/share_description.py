"""How `penstock group` shows a share group: what it is not done with, rather than what it has committed."""

from typing import Any

from penstock.cli.client import Cluster, Place
from penstock.cli.coordinators import GROUP, coordinator_of
from penstock.cli.group_settings import own_settings
from penstock.cli.output import print_table
from penstock.cli.share_groups import SHARE, ShareGroup, ShareMember, ShareOffset, share_offsets

NOTHING_KNOWN = ShareOffset(None, None)


def start_offsets(cluster: Cluster, name: str) -> dict[Place, int]:
    return {
        place: offset.start
        for place, offset in share_offsets(cluster, name).items()
        if offset.start is not None
    }


def shared_description(cluster: Cluster, name: str, found: ShareGroup) -> dict[str, Any]:
    offsets = share_offsets(cluster, name)
    places = sorted({*offsets, *(place for member in found.members for place in member.partitions)})
    _, ends = cluster.ends(places)
    partitions = [
        _partition(place, offsets.get(place, NOTHING_KNOWN), ends[place], found.members) for place in places
    ]
    return {
        "group": name,
        "state": found.state,
        "assignor": found.assignor,
        "coordinator": coordinator_of(cluster, name, GROUP).node,
        "members": [_member(member) for member in found.members],
        "lag": sum(part["lag"] or 0 for part in partitions),
        "partitions": partitions,
        "type": SHARE,
        "settings": own_settings(cluster, name),
    }


def _partition(
    place: Place, offset: ShareOffset, end: int, members: tuple[ShareMember, ...]
) -> dict[str, Any]:
    return {
        "topic": place.topic,
        "partition": place.partition,
        "start": offset.start,
        "end": end,
        "lag": offset.lag,
        "members": sum(place in member.partitions for member in members),
    }


def _member(member: ShareMember) -> dict[str, Any]:
    return {
        "member": member.member,
        "instance": None,
        "client": member.client,
        "host": member.host,
        "partitions": len(member.partitions),
    }


def print_shared_partitions(document: dict[str, Any]) -> None:
    partitions = document["partitions"]
    if partitions:
        print()
        print_table(list(partitions[0]), (list(part.values()) for part in partitions))
