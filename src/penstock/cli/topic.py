"""`penstock topic`: create, list, describe, alter and delete topics, and find the heaviest keys of each partition
in a sample.
"""

import base64
import random
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.connection.offsets import existing_topics, log_ends, partition_names
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import AsJson, DeletedConfigs, Yes, config_changes, expand_options, parse_pairs
from penstock.cli.output import Cell, confirm, note, plural, print_facts, print_json, print_rows, print_table
from penstock.cli.record_formats import bytes_to_json
from penstock.client.admin.topic_drops import topic_drops
from penstock.client.errors import Refused
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import NO_LEADER, TopicInfo
from penstock.client.wire.topics import (
    BROKER_DEFAULT,
    ConfigResourceType,
    ConfigSource,
    NewTopic,
    alter_topic_settings,
    create_partitions,
    create_topics,
    delete_topics,
    describe_configs,
)
from penstock.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.client.hotkeys import HotKey, PartitionKeys

#: Every broker of Penstock describes this setting of a topic; others do not have it.
OVERFLOW = "penstock.overflow"
_OVERFLOW_PREFIXES = (OVERFLOW, "penstock.shed.")

SAMPLE_RECORDS = 100_000
SAMPLE_RECORDS_MAX = 10_000_000

app = typer.Typer(
    help="Create, list, describe, alter and delete topics; find their heaviest keys.", no_args_is_help=True
)

TopicName = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]
TopicNames = Annotated[list[str], typer.Argument(metavar="TOPIC", show_default=False)]
TopicConfigs = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="NAME=VALUE",
        help="A topic setting, such as retention.ms=60000. Repeatable.",
    ),
]


@app.command()
@expand_options
def create(
    topics: TopicNames,
    connection: ConnectionOptions,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions",
            "-p",
            metavar="N",
            min=1,
            help="Number of partitions. Default: the broker decides.",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas",
            "-r",
            metavar="N",
            min=1,
            help="Replicas of each partition. Default: the broker decides.",
        ),
    ] = None,
    config: TopicConfigs = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Succeed if the topic already exists.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check whether the topics could be created.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create topics."""
    settings = parse_pairs(config or (), "--config")
    created: dict[str, bool] = {}
    refused: list[Refused] = []
    with open_cluster(connection) as cluster:
        for name in topics:
            topic = NewTopic(
                name=name,
                partitions=partitions or BROKER_DEFAULT,
                replicas=replicas or BROKER_DEFAULT,
                settings=settings,
            )
            try:
                create_topics(cluster, [topic], validate_only=dry_run)
                created[name] = True
            except Refused as error:
                created[name] = False
                if not if_not_exists or error.code is not ErrorCode.topic_already_exists:
                    refused.append(error)
        if refused:
            raise refused[0]
    if as_json:
        print_json([{"topic": name, "created": is_new and not dry_run} for name, is_new in created.items()])
        return
    for name, is_new in created.items():
        note(f"{name} {'already exists' if not is_new else 'would be created' if dry_run else 'created'}")


@app.command("list")
@expand_options
def list_topics(
    connection: ConnectionOptions,
    internal: Annotated[bool, typer.Option("--internal", help="Also list internal topics.")] = False,
    as_json: AsJson = False,
) -> None:
    """List topics with their partitions and records."""
    with open_cluster(connection) as cluster:
        found = cluster.topics()
        topics = {name: found[name] for name in sorted(found) if internal or not name.startswith("__")}
        first, end = log_ends(cluster, partition_names(topics))
    rows: list[dict[str, Any]] = [
        {
            "topic": name,
            "partitions": len(topic.partitions),
            "replicas": max((len(part.replicas) for part in topic.partitions), default=0),
            "records": sum(end[name, part.index] - first[name, part.index] for part in topic.partitions),
        }
        for name, topic in topics.items()
    ]
    print_rows(rows, as_json=as_json, if_none="no topics yet; `penstock topic create NAME` creates one")


@app.command()
@expand_options
def describe(
    topics: TopicNames,
    connection: ConnectionOptions,
    all_settings: Annotated[
        bool, typer.Option("--all-settings", "-a", help="Also show settings that have their default.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the partitions and settings of topics."""
    with open_cluster(connection) as cluster:
        documents = [
            _topic_document(cluster, topic, all_settings)
            for topic in existing_topics(cluster, topics).values()
        ]
    print_rows(documents, as_json=as_json, print_one=_print_description)


def _topic_document(cluster: Cluster, topic: TopicInfo, all_settings: bool) -> dict[str, Any]:
    from penstock.cli.pipeline.status import (
        blocking_transactions,
    )  # loads much that other commands do not need

    partitions = partition_names({topic.name: topic})
    first, end = log_ends(cluster, partitions)
    configs = cluster.call_any(
        lambda connection: describe_configs(connection, ConfigResourceType.TOPIC, topic.name)
    )
    return {
        "topic": topic.name,
        "topic_id": _uuid_text(topic.id),
        "internal": topic.is_internal,
        "partitions": [
            {
                "partition": part.index,
                "leader": None if part.leader_id == NO_LEADER else part.leader_id,
                "replicas": list(part.replicas),
                "in_sync": list(part.in_sync),
                "first_offset": first[topic.name, part.index],
                "next_offset": end[topic.name, part.index],
                "records": end[topic.name, part.index] - first[topic.name, part.index],
            }
            for part in topic.partitions
        ],
        "settings": {
            name: entry.value
            for name, entry in sorted(configs.items())
            if all_settings or entry.source == ConfigSource.DYNAMIC_TOPIC
        },
        "dropped": _dropped(cluster, topic.name) if OVERFLOW in configs else None,
        "held_back_by": blocking_transactions(cluster, partitions),
    }


def _dropped(cluster: Cluster, topic: str) -> dict[str, Any]:
    found = topic_drops(cluster, topic)
    return {
        "records": found.counts.total(),
        "by": [
            {"policy": policy, "reason": reason, "records": count}
            for (policy, reason), count in sorted(found.counts.items())
        ],
        "unknown_of_nodes": list(found.silent_nodes),
    }


def _dropped_text(dropped: dict[str, Any]) -> str:
    parts = [f"{by['records']} by {by['policy']} ({by['reason']})" for by in dropped["by"]]
    if dropped["unknown_of_nodes"]:
        nodes = ", ".join(map(str, dropped["unknown_of_nodes"]))
        parts.append(f"unknown of node {nodes}, which does not answer")
    return ", ".join(parts) or "0"


def _uuid_text(topic_id: UUID | None) -> str | None:
    """As Kafka's tools print it: base64 for URLs, without padding."""
    return None if topic_id is None else base64.urlsafe_b64encode(topic_id.bytes).decode().rstrip("=")


def _print_description(document: dict[str, Any]) -> None:
    from penstock.cli.pipeline.status import blocking_text  # loads much that other commands do not need

    partitions, held_back_by = document["partitions"], document["held_back_by"]
    dropped = document["dropped"]
    is_dropping = dropped is not None and (
        dropped["by"] or any(name.startswith(_OVERFLOW_PREFIXES) for name in document["settings"])
    )
    print_facts(
        [
            ("topic", document["topic"]),
            ("id", document["topic_id"]),
            ("partitions", len(partitions)),
            ("records", sum(part["records"] for part in partitions)),
            *((name, value) for name, value in document["settings"].items()),
            *([("dropped", _dropped_text(dropped))] if is_dropping else []),
            *([("held back by", blocking_text(held_back_by))] if held_back_by else []),
        ]
    )
    rows = (
        [",".join(map(str, cell)) if isinstance(cell, list) else cell for cell in part.values()]
        for part in partitions
    )
    print()
    print_table([column.replace("_", " ") for column in partitions[0]], rows)


@app.command()
@expand_options
def alter(
    topic: TopicName,
    connection: ConnectionOptions,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions", "-p", metavar="N", min=1, help="Increase the number of partitions to N."
        ),
    ] = None,
    config: TopicConfigs = None,
    delete_config: DeletedConfigs = None,
) -> None:
    """Change the settings of a topic, or add partitions.

    New partitions change which partition a key is sent to.
    """
    changes = config_changes(config, delete_config)
    if not partitions and not changes:
        raise CommandError(
            "nothing to change", hint="give --partitions, --config or --delete-config", exit_code=EXIT_USAGE
        )
    with open_cluster(connection) as cluster:
        existing_topics(cluster, [topic])
        if changes:
            alter_topic_settings(cluster, topic, changes)
        if partitions:
            create_partitions(cluster, topic, partitions)
    note(f"{topic} altered")


@app.command()
@expand_options
def delete(
    topics: TopicNames, connection: ConnectionOptions, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Delete topics and all of their records."""
    with open_cluster(connection) as cluster:
        existing_topics(cluster, topics)
        confirm(
            f"Delete {plural(len(topics), 'topic')} ({', '.join(topics)})? All records are lost.", yes=yes
        )
        delete_topics(cluster, topics)
    if as_json:
        print_json([{"topic": name, "deleted": True} for name in topics])
    else:
        note(f"{', '.join(topics)} deleted")


@app.command()
@expand_options
def hotkeys(
    topic: TopicName,
    connection: ConnectionOptions,
    sample: Annotated[
        int,
        typer.Option(
            "--sample",
            "-n",
            metavar="N",
            min=1,
            max=SAMPLE_RECORDS_MAX,
            help="About how many records to read.",
        ),
    ] = SAMPLE_RECORDS,
    top: Annotated[
        int,
        typer.Option(
            "--top", "-t", metavar="K", min=1, max=1000, help="How many keys to show per partition."
        ),
    ] = 5,
    partition: Annotated[
        list[int] | None,
        typer.Option("--partition", "-p", metavar="P", min=0, help="Only this partition. Repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the heaviest keys of each partition, and their share of its records and bytes.

    Samples records across each partition. With 95 % confidence, a share is off by no more than the figure after ±.
    """
    from penstock.client.hotkeys import sample_keys  # loads much that other commands do not need

    with open_cluster(connection) as cluster:
        info = existing_topics(cluster, [topic])[topic]
        for each in partition or ():
            if info.partition(each) is None:
                raise CommandError(
                    f"topic {topic} has no partition {each}",
                    hint=f"it has {plural(len(info.partitions), 'partition')}",
                )
        found = list(
            sample_keys(cluster, info, sample=sample, top=top, chance=random.Random(), partitions=partition)
        )
    if as_json:
        print_json({"topic": topic, "partitions": [_partition_keys_document(each) for each in found]})
    else:
        _print_hot_keys(topic, found)


def _print_hot_keys(topic: str, found: list["PartitionKeys"]) -> None:
    from penstock.client.hotkeys import salting_advice

    sampled = sum(each.sampled for each in found)
    if not sampled:
        note(f"{topic} is empty")
        return
    rows = [_hot_key_row(each, key) for each in found for key in each.keys]
    if not rows:
        note(f"none of the {plural(sampled, 'sampled record')} has a key")
        return
    print_table(["partition", "key", "records", "bytes", "share of records", "share of bytes"], rows)
    if any(key.share_error or key.bytes_share_error for each in found for key in each.keys):
        total = sum(each.next_offset - each.first_offset for each in found)
        note(
            f"read {sampled} of about {plural(total, 'record')}: shares are exact to within ± with 95 % confidence; "
            "--sample reads more"
        )
    else:
        note(f"read all {plural(sampled, 'record')}: shares are exact")
    advice = salting_advice(sum(key.is_hot for each in found for key in each.keys))
    if advice is not None:
        note(advice)


def _hot_key_row(found: "PartitionKeys", key: "HotKey") -> list[Cell]:
    from penstock.client.hotkeys import display_key

    return [
        found.partition,
        display_key(key.key),
        key.records,
        key.bytes,
        _share_text(key.share, key.share_error),
        _share_text(key.bytes_share, key.bytes_share_error),
    ]


def _share_text(share: float, error: float) -> str:
    return f"{share:.1%}" + (f" ± {error:.1%}" if error else "")


def _partition_keys_document(found: "PartitionKeys") -> dict[str, Any]:
    return {
        "partition": found.partition,
        "first_offset": found.first_offset,
        "next_offset": found.next_offset,
        "sampled": found.sampled,
        "without_key": found.keyless,
        "whole": found.is_whole,
        "keys": [
            {
                "key": bytes_to_json(key.key),
                "records": key.records,
                "bytes": key.bytes,
                "share": key.share,
                "share_error": key.share_error,
                "bytes_share": key.bytes_share,
                "bytes_share_error": key.bytes_share_error,
                "hot": key.is_hot,
            }
            for key in found.keys
        ],
    }
