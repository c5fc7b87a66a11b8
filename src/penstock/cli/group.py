"""`penstock group`: list, describe, reset and delete groups of every type, and change their settings."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from penstock.cli.cluster_client import REQUEST_TIMEOUT_S, LibrdkafkaCluster, PartitionName, resolve_offsets
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.group_descriptions import (
    SHARE,
    STREAMS,
    STREAMS_ASSIGNOR,
    ShareGroup,
    StreamsGroup,
    alter,
    alter_share_offsets,
    delete_group,
    describe_share_group,
    describe_streams_group,
    group_settings,
    list_group_types,
    print_share_partitions,
    share_group_document,
    share_group_names,
    share_start_offsets,
    streams_group_document,
)
from penstock.cli.options import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    OffsetShift,
    OnlyTopics,
    PartitionOffsets,
    ShiftBy,
    To,
    ToEarliest,
    ToLatest,
    ToOffset,
    ToTimestamp,
    Yes,
    parse_reset_target,
)
from penstock.cli.output import confirm, note, plural, print_facts, print_json, print_table

#: Special values of per-partition offsets: the beginning and the end of the log.
EARLIEST, LATEST = -2, -1

app = typer.Typer(help="List, describe, alter, reset and delete groups.", no_args_is_help=True)

app.command()(alter)

GroupNames = Annotated[list[str], typer.Argument(metavar="GROUP", show_default=False)]


@app.command("list")
def list_groups(bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, as_json: AsJson = False) -> None:
    """List groups with their type, state and members."""
    cluster = LibrdkafkaCluster(bootstrap)
    kinds = list_group_types(cluster)
    listed = cluster.wait({"groups": cluster.admin.list_consumer_groups(request_timeout=REQUEST_TIMEOUT_S)})
    described = _describe_groups(
        cluster,
        sorted(
            entry.group_id
            for entry in listed["groups"].valid
            if kinds.get(entry.group_id) not in (SHARE, STREAMS)
        ),
    )
    rows = [
        _group_row(name, _group_type(found), found, found.partition_assignor)
        for name, found in described.items()
    ]
    for name, kind in kinds.items():
        if kind == SHARE:
            shared = describe_share_group(cluster, name)
            rows.append(_group_row(name, SHARE, shared, shared.assignor))
        elif kind == STREAMS:
            rows.append(_group_row(name, STREAMS, describe_streams_group(cluster, name), STREAMS_ASSIGNOR))
    rows.sort(key=lambda row: str(row["group"]))
    if as_json:
        print_json(rows)
    elif rows:
        print_table(list(rows[0]), (list(row.values()) for row in rows))
    else:
        note("no groups yet")


def _group_row(name: str, kind: str | None, found: Any, assignor: str | None) -> dict[str, Any]:
    return {
        "group": name,
        "state": _group_state(found),
        "members": len(found.members),
        "assignor": assignor or None,
        "type": kind,
    }


@app.command()
def describe(groups: GroupNames, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, as_json: AsJson = False) -> None:
    """Show the members, offsets, lag and own settings of groups."""
    cluster = LibrdkafkaCluster(bootstrap)
    shared, streams, others = _split_by_type(cluster, groups)
    described = _describe_groups(cluster, others)
    documents = [_group_document(cluster, name, found) for name, found in described.items()]
    documents += [share_group_document(cluster, name, describe_share_group(cluster, name)) for name in shared]
    documents += [
        streams_group_document(
            cluster, name, describe_streams_group(cluster, name), _committed_offsets(cluster, name)
        )
        for name in streams
    ]
    if as_json:
        print_json(documents)
        return
    for index, document in enumerate(documents):
        if index:
            print()
        _print_description(document)


def _describe_groups(cluster: LibrdkafkaCluster, names: Iterable[str]) -> dict[str, Any]:
    """The description of each group by name. Raises CommandError for a group that does not exist."""
    wanted = list(dict.fromkeys(names))
    if not wanted:
        return {}
    found = cluster.wait(cluster.admin.describe_consumer_groups(wanted, request_timeout=REQUEST_TIMEOUT_S))
    for name in wanted:
        if _group_state(found[name]) == "dead":
            raise CommandError(f"group {name} does not exist", hint="penstock group list shows what does")
    return {name: found[name] for name in wanted}


def _split_by_type(
    cluster: LibrdkafkaCluster, names: Iterable[str]
) -> tuple[list[str], list[str], list[str]]:
    """Share groups, streams groups, and all others, which may not exist."""
    wanted, kinds = list(dict.fromkeys(names)), list_group_types(cluster)
    special = (SHARE, STREAMS)
    shared, streams = ([name for name in wanted if kinds.get(name) == kind] for kind in special)
    return shared, streams, [name for name in wanted if kinds.get(name) not in special]


def _group_state(found: Any) -> str:
    if isinstance(found, ShareGroup | StreamsGroup):
        return found.state
    return str(found.state.name).lower().replace("_", "-")


def _group_type(found: Any) -> str | None:
    """None if the broker does not report it."""
    kind = getattr(getattr(found, "type", None), "name", "UNKNOWN")
    return None if kind == "UNKNOWN" else str(kind).lower()


def _committed_entries(cluster: LibrdkafkaCluster, group: str) -> list[Any]:
    from confluent_kafka import ConsumerGroupTopicPartitions

    answer = cluster.admin.list_consumer_group_offsets(
        [ConsumerGroupTopicPartitions(group)], request_timeout=REQUEST_TIMEOUT_S
    )
    stored = cluster.wait(answer)[group].topic_partitions
    return [entry for entry in stored if entry.offset >= 0]


def _committed_offsets(cluster: LibrdkafkaCluster, group: str) -> dict[PartitionName, int]:
    return {
        PartitionName(entry.topic, entry.partition): entry.offset
        for entry in _committed_entries(cluster, group)
    }


def _group_document(cluster: LibrdkafkaCluster, name: str, found: Any) -> dict[str, Any]:
    committed = _committed_offsets(cluster, name)
    owners = {
        PartitionName(entry.topic, entry.partition): member
        for member in found.members
        for entry in member.assignment.topic_partitions
    }
    known = cluster.metadata().topics
    places = sorted(place for place in {*committed, *owners} if place.topic in known)
    _, ends = cluster.ends(places)
    partitions = [
        _partition_document(place, committed.get(place), ends[place], owners.get(place)) for place in places
    ]
    return {
        "group": name,
        "state": _group_state(found),
        "assignor": found.partition_assignor or None,
        "coordinator": found.coordinator.id if found.coordinator else None,
        "members": [_member_document(member) for member in found.members],
        "lag": sum(part["lag"] or 0 for part in partitions),
        "partitions": partitions,
        "type": _group_type(found),
        "settings": group_settings(cluster, name),
    }


def _partition_document(place: PartitionName, committed: int | None, end: int, owner: Any) -> dict[str, Any]:
    """Without a committed offset the lag is unknown: the consumers' own settings decide where they start."""
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


def _member_document(member: Any) -> dict[str, Any]:
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
        print_share_partitions(document)
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
    """Move the committed offsets of a group that has no running members.

    Shows the plan first and asks before it changes anything.
    """
    target = parse_reset_target(
        to,
        to_earliest=to_earliest,
        to_latest=to_latest,
        to_offset=to_offset,
        to_timestamp=to_timestamp,
        shift_by=shift_by,
    )
    cluster = LibrdkafkaCluster(bootstrap)
    is_shared = group in share_group_names(cluster)
    if not is_shared:
        _reject_spark_group(cluster, group)
    committed = share_start_offsets(cluster, group) if is_shared else _committed_offsets(cluster, group)
    named = target.by_partition if isinstance(target, PartitionOffsets) else {}
    places = _select_partitions(cluster, group, [*(topics or []), *_topic_options(named)], committed)
    match target:
        case PartitionOffsets():
            planned = _given_offsets(cluster, places, named)
        case OffsetShift():
            planned = _shifted_offsets(cluster, places, committed, target.by)
        case _:
            planned = resolve_offsets(cluster, places, target)
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
        (alter_share_offsets if is_shared else _commit_offsets)(cluster, group, planned)
    if as_json:
        print_json({"group": group, "applied": not dry_run, "partitions": plan})
    else:
        note("nothing was changed (dry run)" if dry_run else f"group {group} reset")


def _reject_spark_group(cluster: LibrdkafkaCluster, group: str) -> None:
    """Raises CommandError for a Spark query's group: the query resumes from its checkpoint and commits over a reset."""
    from penstock.spark.offsets import GROUP_METADATA
    from penstock.spark.pipelines.declaration import pipeline_of_group

    if not any(
        (entry.metadata or "").startswith(GROUP_METADATA) for entry in _committed_entries(cluster, group)
    ):
        return
    pipeline = pipeline_of_group(group)
    raise CommandError(
        f"group {group} shows how far a Spark query has come, and moving it would not move the query",
        hint=f"penstock pipeline reset {pipeline}"
        if pipeline is not None
        else "start the query with another checkpointLocation, and with startingOffsets",
    )


def _select_partitions(
    cluster: LibrdkafkaCluster, group: str, topics: list[str], committed: dict[PartitionName, int]
) -> list[PartitionName]:
    if not topics:
        if not committed:
            raise CommandError(f"group {group} has no committed offsets", hint="name the topics with --topic")
        known = cluster.metadata().topics  # offsets outlive a topic that was deleted
        return sorted(place for place in committed if place.topic in known)
    chosen: set[PartitionName] = set()
    for text in topics:
        name, colon, index = text.partition(":")
        every = cluster.places([name])
        wanted = every if not colon else [place for place in every if str(place.partition) == index]
        if not wanted:
            raise CommandError(f"topic {name} has no partition {index}")
        chosen.update(wanted)
    return sorted(chosen)


def _topic_options(named: Mapping[tuple[str, int], int]) -> list[str]:
    return [f"{topic}:{partition}" for topic, partition in named]


def _given_offsets(
    cluster: LibrdkafkaCluster, places: list[PartitionName], named: Mapping[tuple[str, int], int]
) -> dict[PartitionName, int]:
    first, end = cluster.ends(places)
    edges = {EARLIEST: first, LATEST: end}
    planned = {}
    for place in places:
        if place not in named:
            raise CommandError(f"--to names no offset for {place}", exit_code=EXIT_USAGE)
        wanted = named[place]
        planned[place] = edges[wanted][place] if wanted < 0 else min(max(wanted, first[place]), end[place])
    return planned


def _shifted_offsets(
    cluster: LibrdkafkaCluster,
    places: list[PartitionName],
    committed: dict[PartitionName, int],
    shift_by: int,
) -> dict[PartitionName, int]:
    first, end = cluster.ends(places)
    for place in places:
        if place not in committed:
            raise CommandError(f"{place} has no committed offset to shift from")
    return {place: min(max(committed[place] + shift_by, first[place]), end[place]) for place in places}


def _commit_offsets(cluster: LibrdkafkaCluster, group: str, offsets: dict[PartitionName, int]) -> None:
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

    wanted = [TopicPartition(place.topic, place.partition, offset) for place, offset in offsets.items()]
    answer = cluster.admin.alter_consumer_group_offsets(
        [ConsumerGroupTopicPartitions(group, wanted)], request_timeout=REQUEST_TIMEOUT_S
    )
    for entry in cluster.wait(answer)[group].topic_partitions:
        if entry.error is not None:
            raise CommandError(f"{entry.topic}[{entry.partition}]: {entry.error.str()}")


@app.command()
def delete(
    groups: GroupNames, yes: Yes = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, as_json: AsJson = False
) -> None:
    """Delete groups that have no members, with their committed offsets."""
    cluster = LibrdkafkaCluster(bootstrap)
    shared, streams, others = _split_by_type(cluster, groups)
    _describe_groups(cluster, others)
    confirm(f"Delete {plural(len(groups), 'group')} ({', '.join(groups)})?", yes=yes)
    if others:
        cluster.wait(cluster.admin.delete_consumer_groups(others, request_timeout=REQUEST_TIMEOUT_S))
    for name in (*shared, *streams):
        delete_group(cluster, name)
    if as_json:
        print_json([{"group": name, "deleted": True} for name in groups])
    else:
        note(f"{', '.join(groups)} deleted")
