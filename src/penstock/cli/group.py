"""`penstock group`: list, describe, reset and delete groups of every kind, and change their settings."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from penstock.cli.client import REQUEST_TIMEOUT_S, Cluster, Place
from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.group_settings import alter, own_settings
from penstock.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Yes
from penstock.cli.output import confirm, note, plural, print_facts, print_json, print_table
from penstock.cli.reset_target import (
    Offsets,
    OnlyTopics,
    Shift,
    ShiftBy,
    To,
    ToEarliest,
    ToLatest,
    ToOffset,
    ToTimestamp,
    parse_target,
)
from penstock.cli.share_description import print_shared_partitions, shared_description, start_offsets
from penstock.cli.share_groups import (
    SHARE,
    ShareGroup,
    alter_share_offsets,
    delete_group,
    describe_share_group,
    groups_by_type,
    share_group_names,
)
from penstock.cli.starting import starting_offsets
from penstock.cli.streams_groups import (
    ASSIGNOR,
    STREAMS,
    StreamsGroup,
    describe_streams_group,
    streams_description,
)

#: As offsets by partition name the ends of a log.
EARLIEST, LATEST = -2, -1

app = typer.Typer(help="List, describe, alter, reset and delete groups.", no_args_is_help=True)

app.command()(alter)

Names = Annotated[list[str], typer.Argument(metavar="GROUP", show_default=False)]


@app.command("list")
def list_groups(bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, as_json: AsJson = False) -> None:
    """List groups with their type, state and members."""
    cluster = Cluster(bootstrap)
    kinds = groups_by_type(cluster)
    listed = cluster.wait({"groups": cluster.admin.list_consumer_groups(request_timeout=REQUEST_TIMEOUT_S)})
    described = _describe(
        cluster,
        sorted(
            entry.group_id
            for entry in listed["groups"].valid
            if kinds.get(entry.group_id) not in (SHARE, STREAMS)
        ),
    )
    rows = [_row(name, _type(found), found, found.partition_assignor) for name, found in described.items()]
    for name, kind in kinds.items():
        if kind == SHARE:
            shared = describe_share_group(cluster, name)
            rows.append(_row(name, SHARE, shared, shared.assignor))
        elif kind == STREAMS:
            rows.append(_row(name, STREAMS, describe_streams_group(cluster, name), ASSIGNOR))
    rows.sort(key=lambda row: str(row["group"]))
    if as_json:
        print_json(rows)
    elif rows:
        print_table(list(rows[0]), (list(row.values()) for row in rows))
    else:
        note("no groups yet")


def _row(name: str, kind: str | None, found: Any, assignor: str | None) -> dict[str, Any]:
    return {
        "group": name,
        "state": _state(found),
        "members": len(found.members),
        "assignor": assignor or None,
        "type": kind,
    }


@app.command()
def describe(groups: Names, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, as_json: AsJson = False) -> None:
    """Show the members, positions, lag and own settings of groups."""
    cluster = Cluster(bootstrap)
    shared, streams, others = _by_kind(cluster, groups)
    described = _describe(cluster, others)
    documents = [_description(cluster, name, found) for name, found in described.items()]
    documents += [shared_description(cluster, name, describe_share_group(cluster, name)) for name in shared]
    documents += [
        streams_description(cluster, name, describe_streams_group(cluster, name), _committed(cluster, name))
        for name in streams
    ]
    if as_json:
        print_json(documents)
        return
    for index, document in enumerate(documents):
        if index:
            print()
        _print_description(document)


def _describe(cluster: Cluster, names: Iterable[str]) -> dict[str, Any]:
    """Every group by name; one that is not there is a Failure."""
    wanted = list(dict.fromkeys(names))
    if not wanted:
        return {}
    found = cluster.wait(cluster.admin.describe_consumer_groups(wanted, request_timeout=REQUEST_TIMEOUT_S))
    for name in wanted:
        if _state(found[name]) == "dead":
            raise Failure(f"group {name} does not exist", hint="penstock group list shows what does")
    return {name: found[name] for name in wanted}


def _by_kind(cluster: Cluster, names: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Share groups, streams groups, and all others, which may not exist."""
    wanted, kinds = list(dict.fromkeys(names)), groups_by_type(cluster)
    special = (SHARE, STREAMS)
    shared, streams = ([name for name in wanted if kinds.get(name) == kind] for kind in special)
    return shared, streams, [name for name in wanted if kinds.get(name) not in special]


def _state(found: Any) -> str:
    if isinstance(found, ShareGroup | StreamsGroup):
        return found.state
    return str(found.state.name).lower().replace("_", "-")


def _type(found: Any) -> str | None:
    """None where the broker does not tell."""
    kind = getattr(getattr(found, "type", None), "name", "UNKNOWN")
    return None if kind == "UNKNOWN" else str(kind).lower()


def _stored(cluster: Cluster, group: str) -> list[Any]:
    from confluent_kafka import ConsumerGroupTopicPartitions

    answer = cluster.admin.list_consumer_group_offsets(
        [ConsumerGroupTopicPartitions(group)], request_timeout=REQUEST_TIMEOUT_S
    )
    stored = cluster.wait(answer)[group].topic_partitions
    return [entry for entry in stored if entry.offset >= 0]


def _committed(cluster: Cluster, group: str) -> dict[Place, int]:
    return {Place(entry.topic, entry.partition): entry.offset for entry in _stored(cluster, group)}


def _description(cluster: Cluster, name: str, found: Any) -> dict[str, Any]:
    committed = _committed(cluster, name)
    owners = {
        Place(entry.topic, entry.partition): member
        for member in found.members
        for entry in member.assignment.topic_partitions
    }
    known = cluster.metadata().topics
    places = sorted(place for place in {*committed, *owners} if place.topic in known)
    _, ends = cluster.ends(places)
    partitions = [_partition(place, committed.get(place), ends[place], owners.get(place)) for place in places]
    return {
        "group": name,
        "state": _state(found),
        "assignor": found.partition_assignor or None,
        "coordinator": found.coordinator.id if found.coordinator else None,
        "members": [_member(member) for member in found.members],
        "lag": sum(part["lag"] or 0 for part in partitions),
        "partitions": partitions,
        "type": _type(found),
        "settings": own_settings(cluster, name),
    }


def _partition(place: Place, committed: int | None, end: int, owner: Any) -> dict[str, Any]:
    """Without a committed offset the lag is not known: where the group would start is its own choice."""
    return {
        "topic": place.topic,
        "partition": place.partition,
        "committed": committed,
        "end": end,
        "lag": None if committed is None else max(0, end - committed),
        "member": owner.member_id if owner else None,
        "client": owner.client_id if owner else None,
        "host": owner.host if owner else None,
    }


def _member(member: Any) -> dict[str, Any]:
    return {
        "member": member.member_id,
        "instance": member.group_instance_id,
        "client": member.client_id,
        "host": member.host,
        "partitions": len(member.assignment.topic_partitions),
    }


def _print_description(document: dict[str, Any]) -> None:
    shown = ("group", "type", "state", "assignor", "coordinator", "lag")
    facts = [*((name, document[name]) for name in shown), ("members", len(document["members"]))]
    print_facts([*facts, *document["settings"].items()])
    if document["type"] == SHARE:
        print_shared_partitions(document)
        return
    columns = ("topic", "partition", "committed", "end", "lag", "client", "host")
    if document["partitions"]:
        print()
        print_table(columns, ([part[column] for column in columns] for part in document["partitions"]))


@app.command()
def reset(
    group: Annotated[str, typer.Argument(metavar="GROUP", show_default=False)],
    topics: OnlyTopics = None,
    to: To = None,
    to_earliest: ToEarliest = False,
    to_latest: ToLatest = False,
    to_offset: ToOffset = None,
    to_timestamp: ToTimestamp = None,
    shift_by: ShiftBy = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    yes: Yes = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """Move the positions of a group that has no running members.

    Shows the plan first and asks before it changes anything.
    """
    target = parse_target(
        to,
        to_earliest=to_earliest,
        to_latest=to_latest,
        to_offset=to_offset,
        to_timestamp=to_timestamp,
        shift_by=shift_by,
    )
    cluster = Cluster(bootstrap)
    is_shared = group in share_group_names(cluster)
    if not is_shared:
        _refuse_sparks(cluster, group)
    committed = start_offsets(cluster, group) if is_shared else _committed(cluster, group)
    named = target.by_place if isinstance(target, Offsets) else {}
    places = _places(cluster, group, [*(topics or []), *_as_options(named)], committed)
    match target:
        case Offsets():
            planned = _given(cluster, places, named)
        case Shift():
            planned = _shifted(cluster, places, committed, target.by)
        case _:
            planned = starting_offsets(cluster, places, target)
    plan = [
        {
            "topic": place.topic,
            "partition": place.partition,
            "from": committed.get(place),
            "to": planned[place],
        }
        for place in places
    ]
    if not as_json:
        print_table(list(plan[0]), (list(row.values()) for row in plan))
    if not dry_run:
        confirm(f"Move {plural(len(plan), 'offset')} of group {group}?", yes=yes)
        (alter_share_offsets if is_shared else _commit)(cluster, group, planned)
    if as_json:
        print_json({"group": group, "applied": not dry_run, "partitions": plan})
    else:
        note("nothing was changed (dry run)" if dry_run else f"group {group} reset")


def _refuse_sparks(cluster: Cluster, group: str) -> None:
    """A query of Spark goes by its checkpoint, and would move the positions back."""
    from penstock.spark.pipelines.declaration import name_of_group
    from penstock.spark.progress import METADATA

    if not any((entry.metadata or "").startswith(METADATA) for entry in _stored(cluster, group)):
        return
    pipeline = name_of_group(group)
    raise Failure(
        f"group {group} shows how far a Spark query has come, and moving it would not move the query",
        hint=f"penstock pipeline reset {pipeline}"
        if pipeline is not None
        else "start the query with another checkpointLocation, and with startingOffsets",
    )


def _places(cluster: Cluster, group: str, topics: list[str], committed: dict[Place, int]) -> list[Place]:
    if not topics:
        if not committed:
            raise Failure(f"group {group} has no committed offsets", hint="name the topics with --topic")
        known = cluster.metadata().topics  # offsets outlive a topic that was deleted
        return sorted(place for place in committed if place.topic in known)
    chosen: set[Place] = set()
    for text in topics:
        name, colon, index = text.partition(":")
        every = cluster.places([name])
        wanted = every if not colon else [place for place in every if str(place.partition) == index]
        if not wanted:
            raise Failure(f"topic {name} has no partition {index}")
        chosen.update(wanted)
    return sorted(chosen)


def _as_options(named: Mapping[tuple[str, int], int]) -> list[str]:
    return [f"{topic}:{partition}" for topic, partition in named]


def _given(cluster: Cluster, places: list[Place], named: Mapping[tuple[str, int], int]) -> dict[Place, int]:
    first, end = cluster.ends(places)
    edges = {EARLIEST: first, LATEST: end}
    planned = {}
    for place in places:
        if place not in named:
            raise Failure(f"--to names no offset for {place}", exit_code=WRONG_USAGE)
        wanted = named[place]
        planned[place] = edges[wanted][place] if wanted < 0 else min(max(wanted, first[place]), end[place])
    return planned


def _shifted(
    cluster: Cluster, places: list[Place], committed: dict[Place, int], shift_by: int
) -> dict[Place, int]:
    first, end = cluster.ends(places)
    for place in places:
        if place not in committed:
            raise Failure(f"{place} has no committed offset to shift from")
    return {place: min(max(committed[place] + shift_by, first[place]), end[place]) for place in places}


def _commit(cluster: Cluster, group: str, offsets: dict[Place, int]) -> None:
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

    wanted = [TopicPartition(place.topic, place.partition, offset) for place, offset in offsets.items()]
    answer = cluster.admin.alter_consumer_group_offsets(
        [ConsumerGroupTopicPartitions(group, wanted)], request_timeout=REQUEST_TIMEOUT_S
    )
    for entry in cluster.wait(answer)[group].topic_partitions:
        if entry.error is not None:
            raise Failure(f"{entry.topic}[{entry.partition}]: {entry.error.str()}")


@app.command()
def delete(
    groups: Names, yes: Yes = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, as_json: AsJson = False
) -> None:
    """Delete groups that have no members, with their positions."""
    cluster = Cluster(bootstrap)
    shared, streams, others = _by_kind(cluster, groups)
    _describe(cluster, others)
    confirm(f"Delete {plural(len(groups), 'group')} ({', '.join(groups)})?", yes=yes)
    if others:
        cluster.wait(cluster.admin.delete_consumer_groups(others, request_timeout=REQUEST_TIMEOUT_S))
    for name in (*shared, *streams):
        delete_group(cluster, name)
    if as_json:
        print_json([{"group": name, "deleted": True} for name in groups])
    else:
        note(f"{', '.join(groups)} deleted")
