"""`penstock topic`: create, list, describe, alter and delete topics; `hotkeys` has a file of its own."""

from typing import Annotated, Any

import typer

from penstock.cli.client import REQUEST_TIMEOUT_S, Cluster, Place
from penstock.cli.failure import WRONG_USAGE, Failure
from penstock.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Yes, pairs
from penstock.cli.output import confirm, note, plural, print_facts, print_json, print_table
from penstock.cli.topic_hotkeys import hotkeys

app = typer.Typer(
    help="Create, list, describe, alter and delete topics; find their heaviest keys.", no_args_is_help=True
)

Names = Annotated[list[str], typer.Argument(metavar="TOPIC", show_default=False)]
Configs = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="NAME=VALUE", help="A topic setting, as retention.ms=60000."),
]


@app.command()
def create(
    topics: Names,
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions", "-p", metavar="N", min=1, help="How many; the broker's default if not given."
        ),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option("--replicas", "-r", metavar="N", min=1, help="Copies of each partition.")
    ] = None,
    config: Configs = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="An existing topic is fine.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check whether it would work.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """Create topics."""
    from confluent_kafka.admin import NewTopic

    settings = pairs(config or (), "--config")
    cluster = Cluster(bootstrap)
    wanted = [
        NewTopic(name, num_partitions=partitions or -1, replication_factor=replicas or -1, config=settings)
        for name in topics
    ]
    futures = cluster.admin.create_topics(wanted, validate_only=dry_run, request_timeout=REQUEST_TIMEOUT_S)
    outcomes = cluster.wait_each(futures)
    done = {name: _created(outcomes[name], if_not_exists) for name in topics}
    verb = {True: "would be created" if dry_run else "created", False: "existed already"}
    if as_json:
        print_json([{"topic": name, "created": is_new and not dry_run} for name, is_new in done.items()])
    else:
        for name, is_new in done.items():
            note(f"{name} {verb[is_new]}")


def _created(outcome: Any, if_not_exists: bool) -> bool:
    from confluent_kafka import KafkaError

    if not isinstance(outcome, Failure):
        return True
    if if_not_exists and outcome.kafka_code == KafkaError.TOPIC_ALREADY_EXISTS:
        return False
    raise outcome


@app.command("list")
def list_topics(
    internal: Annotated[bool, typer.Option("--internal", help="Show the broker's own topics too.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """List topics with their partitions and records."""
    cluster = Cluster(bootstrap)
    known = cluster.metadata().topics
    names = sorted(name for name in known if internal or not name.startswith("__"))
    places = [Place(name, index) for name in names for index in known[name].partitions]
    first, end = cluster.ends(places)
    rows = [
        {
            "topic": name,
            "partitions": len(known[name].partitions),
            "replicas": max((len(part.replicas) for part in known[name].partitions.values()), default=0),
            "records": sum(end[place] - first[place] for place in places if place.topic == name),
        }
        for name in names
    ]
    if as_json:
        print_json(rows)
    elif rows:
        print_table(list(rows[0]), (list(row.values()) for row in rows))
    else:
        note("no topics yet; penstock topic create NAME makes one")


@app.command()
def describe(
    topics: Names,
    all_settings: Annotated[
        bool, typer.Option("--all-settings", "-a", help="Show settings that are at their default too.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    as_json: AsJson = False,
) -> None:
    """Show the partitions and settings of topics."""
    cluster = Cluster(bootstrap)
    cluster.topics(topics)
    documents = [_description(cluster, name, all_settings) for name in dict.fromkeys(topics)]
    if as_json:
        print_json(documents)
        return
    for index, document in enumerate(documents):
        if index:
            print()
        _print_description(document)


def _description(cluster: Cluster, name: str, all_settings: bool) -> dict[str, Any]:
    from confluent_kafka import TopicCollection

    found = cluster.wait(
        cluster.admin.describe_topics(TopicCollection([name]), request_timeout=REQUEST_TIMEOUT_S)
    )[name]
    first, end = cluster.ends(Place(name, part.id) for part in found.partitions)
    return {
        "topic": name,
        "topic_id": str(found.topic_id),
        "internal": found.is_internal,
        "partitions": [_partition(Place(name, part.id), part, first, end) for part in found.partitions],
        "settings": _settings(cluster, name, all_settings),
        "held_back_by": _held_back_by(cluster, name, len(found.partitions)),
    }


def _held_back_by(cluster: Cluster, name: str, partitions: int) -> list[dict[str, Any]]:
    """Open transactions that readers of committed records wait for."""
    from penstock.cli.held_back import holding_back  # loads much that other commands do not need
    from penstock.cli.raw import open_cluster

    with open_cluster(cluster.bootstrap) as raw:
        return holding_back(raw, [(name, index) for index in range(partitions)])


def _partition(place: Place, part: Any, first: dict[Place, int], end: dict[Place, int]) -> dict[str, Any]:
    return {
        "partition": place.partition,
        "leader": part.leader.id if part.leader else None,
        "replicas": [node.id for node in part.replicas],
        "in_sync": [node.id for node in part.isr],
        "first_offset": first[place],
        "next_offset": end[place],
        "records": end[place] - first[place],
    }


def _settings(cluster: Cluster, name: str, all_settings: bool) -> dict[str, str | None]:
    from confluent_kafka.admin import ConfigResource, ConfigSource

    resource = ConfigResource(ConfigResource.Type.TOPIC, name)
    answer = cluster.admin.describe_configs([resource], request_timeout=REQUEST_TIMEOUT_S)
    entries = cluster.wait({name: answer[resource]})[name]
    own = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    return {
        entry.name: entry.value
        for entry in sorted(entries.values(), key=lambda entry: str(entry.name))
        if all_settings or _source(entry) == own
    }


def _source(entry: Any) -> int:
    return int(getattr(entry.source, "value", entry.source))


def _print_description(document: dict[str, Any]) -> None:
    partitions = document["partitions"]
    print_facts(
        [
            ("topic", document["topic"]),
            ("id", document["topic_id"]),
            ("partitions", len(partitions)),
            ("records", sum(part["records"] for part in partitions)),
            *((name, value) for name, value in document["settings"].items()),
            *_held_back_facts(document["held_back_by"]),
        ]
    )
    rows = (
        [",".join(map(str, cell)) if isinstance(cell, list) else cell for cell in part.values()]
        for part in partitions
    )
    print()
    print_table([column.replace("_", " ") for column in partitions[0]], rows)


def _held_back_facts(rows: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    from penstock.cli.held_back import sentence

    return [("held back by", sentence(rows))] if rows else []


@app.command()
def alter(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)],
    partitions: Annotated[
        int | None,
        typer.Option(
            "--partitions", "-p", metavar="N", min=1, help="Raise the number of partitions to this."
        ),
    ] = None,
    config: Configs = None,
    delete_config: Annotated[
        list[str] | None,
        typer.Option("--delete-config", "-d", metavar="NAME", help="Return a setting to its default."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Change the settings of a topic, or add partitions.

    More partitions change which partition a key goes to.
    """
    settings = pairs(config or (), "--config")
    if not partitions and not settings and not delete_config:
        raise Failure(
            "nothing to change", hint="give --partitions, --config or --delete-config", exit_code=WRONG_USAGE
        )
    cluster = Cluster(bootstrap)
    cluster.topics([topic])
    if settings or delete_config:
        cluster.alter_settings("TOPIC", topic, settings, delete_config or [])
    if partitions:
        _add_partitions(cluster, topic, partitions)
    note(f"{topic} altered")


def _add_partitions(cluster: Cluster, topic: str, partitions: int) -> None:
    from confluent_kafka.admin import NewPartitions

    wanted = [NewPartitions(topic, partitions)]
    cluster.wait(cluster.admin.create_partitions(wanted, request_timeout=REQUEST_TIMEOUT_S))


@app.command()
def delete(
    topics: Names, yes: Yes = False, bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, as_json: AsJson = False
) -> None:
    """Delete topics and everything in them."""
    cluster = Cluster(bootstrap)
    cluster.topics(topics)
    confirm(f"Delete {plural(len(topics), 'topic')} for good ({', '.join(topics)})?", yes=yes)
    cluster.wait(cluster.admin.delete_topics(topics, request_timeout=REQUEST_TIMEOUT_S))
    if as_json:
        print_json([{"topic": name, "deleted": True} for name in topics])
    else:
        note(f"{', '.join(topics)} deleted")


app.command()(hotkeys)
