"""`penstock group`: list, describe, reset and delete groups of every type, and change their settings.

A share group is described by its start offsets and lag, because it has no committed offsets.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.connection.offsets import (
    PartitionName,
    existing_topics,
    log_ends,
    partition_names,
    resolve_offsets,
)
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import (
    AsJson,
    DeletedConfigs,
    OffsetShift,
    PartitionOffsets,
    ResetOptions,
    ResetTarget,
    Yes,
    config_changes,
    expand_options,
)
from penstock.cli.output import confirm, note, plural, print_facts, print_json, print_rows, print_table
from penstock.client.admin.groups import (
    DEAD_STATE,
    SHARE,
    STREAMS,
    GroupDescription,
    MemberDescription,
    ShareOffset,
    alter_share_offsets,
    delete_group,
    describe_group,
    share_offsets,
)
from penstock.client.errors import Refused, UnsupportedVersion
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicPartition
from penstock.client.wire.offsets import (
    EARLIEST,
    LATEST,
    CommittedOffset,
    commit_offsets,
    committed_offsets,
    list_groups,
)
from penstock.client.wire.topics import ConfigResourceType, ConfigSource, alter_configs, describe_configs
from penstock.protocol.errors import ErrorCode

app = typer.Typer(help="List, describe, alter, reset and delete groups.", no_args_is_help=True)

GroupName = Annotated[str, typer.Argument(metavar="GROUP", show_default=False)]
GroupNames = Annotated[list[str], typer.Argument(metavar="GROUP", show_default=False)]
#: Scripts know these two states by the names that confluent-kafka gives them.
_STATE_NAMES = {
    "preparing-rebalance": "preparing-rebalancing",
    "completing-rebalance": "completing-rebalancing",
}


@app.command("list")
@expand_options
def list_all(connection: ConnectionOptions, as_json: AsJson = False) -> None:
    """List groups with their type, state and members."""
    with open_cluster(connection) as cluster:
        described = [describe_group(cluster, found.group, found.kind) for found in list_groups(cluster)]
    rows = [
        {
            "group": found.group,
            "state": _state_text(found),
            "members": len(found.members),
            "assignor": found.assignor,
            "type": found.kind or None,
        }
        for found in described
        if found.state != DEAD_STATE
    ]
    print_rows(rows, as_json=as_json, if_none="no groups yet")


@app.command()
@expand_options
def describe(groups: GroupNames, connection: ConnectionOptions, as_json: AsJson = False) -> None:
    """Show the members, offsets, lag and own settings of groups."""
    with open_cluster(connection) as cluster:
        documents = [
            _share_group_document(cluster, found) if found.kind == SHARE else _group_document(cluster, found)
            for found in _existing_groups(cluster, groups)
        ]
    print_rows(documents, as_json=as_json, print_one=_print_description)


def _existing_groups(cluster: Cluster, names: Iterable[str]) -> list[GroupDescription]:
    """Raises CommandError for a group that does not exist."""
    kinds = {found.group: found.kind for found in list_groups(cluster)}
    described = []
    for name in dict.fromkeys(names):
        found = describe_group(cluster, name, kinds[name]) if name in kinds else None
        if found is None or found.state == DEAD_STATE:
            raise CommandError(f"group {name} does not exist", hint="`penstock group list` shows all groups")
        described.append(found)
    return described


def _state_text(found: GroupDescription) -> str:
    """PreparingRebalance as preparing-rebalancing."""
    text = "".join(f"-{each.lower()}" if each.isupper() else each for each in found.state).lstrip("-")
    return _STATE_NAMES.get(text, text)


def _group_document(cluster: Cluster, found: GroupDescription) -> dict[str, Any]:
    """Without a committed offset the lag is unknown: the consumers' own settings decide where they start."""
    committed = committed_offsets(cluster, found.group, stable=False)
    assigned = {partition for member in found.members for partition in member.partitions}
    topics = cluster.topics({*found.readers, *(topic for topic, _ in {*committed, *assigned})})
    read_by_tasks = partition_names({name: topics[name] for name in found.readers if name in topics})
    partitions = sorted(
        partition for partition in {*committed, *assigned, *read_by_tasks} if partition[0] in topics
    )
    _, ends = log_ends(cluster, partitions)
    rows = []
    for topic, index in partitions:
        offset, end = committed.get((topic, index)), ends[topic, index]
        owner = found.owner(topic, index)
        rows.append(
            {
                "topic": topic,
                "partition": index,
                "committed": None if offset is None else offset.offset,
                "end": end,
                "lag": None if offset is None else max(0, end - offset.offset),
                "member": owner.id if owner else None,
                "client": owner.client_id if owner else None,
                "host": owner.host if owner else None,
            }
        )
    return _document(cluster, found, rows)


def _share_group_document(cluster: Cluster, found: GroupDescription) -> dict[str, Any]:
    offsets = share_offsets(cluster, found.group)
    assigned = [partition for member in found.members for partition in member.partitions]
    partitions = sorted({*offsets, *assigned})
    _, ends = log_ends(cluster, partitions)
    rows = []
    for topic, index in partitions:
        offset = offsets.get((topic, index), ShareOffset())
        rows.append(
            {
                "topic": topic,
                "partition": index,
                "start": offset.start,
                "end": ends[topic, index],
                "lag": offset.lag,
                "members": assigned.count((topic, index)),
            }
        )
    return _document(cluster, found, rows)


def _document(cluster: Cluster, found: GroupDescription, partitions: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "group": found.group,
        "state": _state_text(found),
        "assignor": found.assignor,
        "coordinator": found.coordinator_id,
        "members": [_member_document(member, found.kind) for member in found.members],
        "lag": sum(part["lag"] or 0 for part in partitions),
        "partitions": partitions,
        "type": found.kind or None,
        "settings": _group_settings(cluster, found.group),
    }


def _member_document(member: MemberDescription, kind: str) -> dict[str, Any]:
    document = {
        "member": member.id,
        "instance": member.instance_id,
        "client": member.client_id,
        "host": member.host,
    }
    if kind != STREAMS:
        return {**document, "partitions": len(member.partitions)}
    return {
        **document,
        "process": member.process,
        "active_tasks": sorted(f"{name}_{number}" for name, number in member.active_tasks),
        "standby_tasks": sorted(f"{name}_{number}" for name, number in member.standby_tasks),
    }


def _group_settings(cluster: Cluster, group: str) -> dict[str, str | None]:
    """The settings of this group itself; empty if the cluster does not support group settings."""
    try:
        found = cluster.call_any(
            lambda connection: describe_configs(connection, ConfigResourceType.GROUP, group)
        )
    except (Refused, UnsupportedVersion):
        return {}
    return {
        name: entry.value
        for name, entry in sorted(found.items())
        if entry.source == ConfigSource.DYNAMIC_GROUP
    }


def _print_description(document: dict[str, Any]) -> None:
    shown = ("group", "type", "state", "assignor", "coordinator", "lag")
    facts = [*((name, document[name]) for name in shown), ("members", len(document["members"]))]
    print_facts([*facts, *document["settings"].items()])
    partitions = document["partitions"]
    if partitions:
        columns = [column for column in partitions[0] if column != "member"]
        print()
        print_table(columns, ([part[column] for column in columns] for part in partitions))


@app.command()
@expand_options
def alter(
    group: GroupName,
    connection: ConnectionOptions,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-c", metavar="NAME=VALUE", help="A setting of the group. Repeatable."),
    ] = None,
    delete_config: DeletedConfigs = None,
) -> None:
    """Change the settings of a group. The group need not exist yet."""
    changes = config_changes(config, delete_config)
    if not changes:
        raise CommandError("nothing to change", hint="give --config or --delete-config", exit_code=EXIT_USAGE)
    with open_cluster(connection) as cluster:
        alter_configs(cluster, ConfigResourceType.GROUP, group, changes)
    note(f"{group} altered")


@app.command()
@expand_options
def reset(
    group: GroupName, options: ResetOptions, connection: ConnectionOptions, as_json: AsJson = False
) -> None:
    """Move the committed offsets of a group that has no running members.

    Shows the plan and asks for confirmation before it changes anything.
    """
    target = options.target()
    with open_cluster(connection) as cluster:
        is_shared = any(found.group == group and found.kind == SHARE for found in list_groups(cluster))
        current = _share_start_offsets(cluster, group) if is_shared else _committed_offsets(cluster, group)
        planned = _plan_offsets(cluster, group, target, options.topics or [], current)
        plan = [
            {"topic": topic, "partition": index, "from": current.get((topic, index)), "to": offset}
            for (topic, index), offset in planned.items()
        ]
        if not as_json:
            print_table(["topic", "partition", "from", "to"], (list(row.values()) for row in plan))
        if not options.dry_run:
            confirm(f"Move {plural(len(plan), 'offset')} of group {group}?", yes=options.yes)
            (alter_share_offsets if is_shared else commit_offsets)(cluster, group, planned)
    if as_json:
        print_json({"group": group, "applied": not options.dry_run, "partitions": plan})
    else:
        note("nothing was changed (dry run)" if options.dry_run else f"group {group} reset")


def _share_start_offsets(cluster: Cluster, group: str) -> dict[TopicPartition, int]:
    return {
        partition: offset.start
        for partition, offset in share_offsets(cluster, group).items()
        if offset.start is not None
    }


def _committed_offsets(cluster: Cluster, group: str) -> dict[TopicPartition, int]:
    committed = committed_offsets(cluster, group, stable=False)
    _reject_spark_group(group, committed.values())
    return {partition: found.offset for partition, found in committed.items()}


def _reject_spark_group(group: str, committed: Iterable[CommittedOffset]) -> None:
    """Raises CommandError for a Spark query's group: the query resumes from its checkpoint and commits over a reset."""
    # Loads much that other commands do not need.
    from penstock.spark.offsets import GROUP_METADATA
    from penstock.spark.pipelines.declaration import pipeline_of_group

    if not any(found.metadata.startswith(GROUP_METADATA) for found in committed):
        return
    pipeline = pipeline_of_group(group)
    raise CommandError(
        f"group {group} only shows the progress of a Spark query, so a reset would not move the query",
        hint=f"use `penstock pipeline reset {pipeline}`"
        if pipeline is not None
        else "start the query with another checkpointLocation and with startingOffsets",
    )


def _plan_offsets(
    cluster: Cluster,
    group: str,
    target: ResetTarget,
    topics: list[str],
    current: Mapping[TopicPartition, int],
) -> dict[TopicPartition, int]:
    named = target.by_partition if isinstance(target, PartitionOffsets) else {}
    partitions = _select_partitions(
        cluster, group, [*topics, *(f"{topic}:{partition}" for topic, partition in named)], current
    )
    if not isinstance(target, PartitionOffsets | OffsetShift):
        return resolve_offsets(cluster, partitions, target)
    first, end = log_ends(cluster, partitions)
    planned: dict[TopicPartition, int] = {}
    for partition in partitions:
        if isinstance(target, OffsetShift):
            if partition not in current:
                raise CommandError(
                    f"{partition} has no committed offset to shift",
                    hint="give another target than --shift-by",
                )
            wanted = current[partition] + target.by
        elif partition not in named:
            raise CommandError(f"--to has no offset for {partition}", exit_code=EXIT_USAGE)
        else:
            wanted = {EARLIEST: first, LATEST: end}.get(named[partition], named)[partition]
        planned[partition] = min(max(wanted, first[partition]), end[partition])
    return planned


def _select_partitions(
    cluster: Cluster, group: str, topics: list[str], current: Mapping[TopicPartition, int]
) -> list[PartitionName]:
    if not topics:
        if not current:
            raise CommandError(f"group {group} has no committed offsets", hint="name the topics with --topic")
        known = cluster.topics({topic for topic, _ in current})  # offsets outlive a topic that was deleted
        return sorted(PartitionName(*partition) for partition in current if partition[0] in known)
    chosen: set[PartitionName] = set()
    for text in topics:
        name, colon, index = text.partition(":")
        every = partition_names(existing_topics(cluster, [name]))
        wanted = every if not colon else [each for each in every if str(each.partition) == index]
        if not wanted:
            raise CommandError(f"topic {name} has no partition {index}")
        chosen.update(wanted)
    return sorted(chosen)


@app.command()
@expand_options
def delete(
    groups: GroupNames, connection: ConnectionOptions, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Delete groups that have no members, with their committed offsets."""
    with open_cluster(connection) as cluster:
        _existing_groups(cluster, groups)
        confirm(f"Delete {plural(len(groups), 'group')} ({', '.join(groups)})?", yes=yes)
        for name in groups:
            try:
                delete_group(cluster, name)
            except Refused as error:
                if error.code is ErrorCode.non_empty_group:
                    raise CommandError(f"group {name} has members", hint="stop them first") from None
                raise
    if as_json:
        print_json([{"group": name, "deleted": True} for name in groups])
    else:
        note(f"{', '.join(groups)} deleted")
