"""`penstock cluster`: assembles its verbs, and implements the short ones: `info`, `features`, `unregister`,
`voters list` and `voters remove`.

`start`, `stop`, `restart`, `status` and `rebalance` have their own modules.
"""

from typing import Annotated, Any

import typer

from penstock.cli.cluster import rebalance, start, status
from penstock.cli.cluster.description import ClusterDescription, describe_cluster
from penstock.cli.cluster.status import QUORUM_TIMEOUT_S, lost_voters
from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import AsJson, Yes, expand_options, parse_pairs
from penstock.cli.output import confirm, human_bytes, note, plural, print_facts, print_json, print_table
from penstock.client.admin import cluster as admin
from penstock.client.admin.cluster import FeatureLevels, QuorumReplica
from penstock.client.errors import ClientError, Refused
from penstock.client.wire.cluster import Cluster

app = typer.Typer(help="Start, watch and rebalance a cluster.", no_args_is_help=True)

app.command()(start.start)
app.command()(start.stop)
app.command("restart")(start.restart_node)
app.command()(expand_options(status.status))
app.command()(expand_options(rebalance.rebalance))


@app.command()
@expand_options
def unregister(
    broker_id: Annotated[int, typer.Argument(metavar="ID", help="The broker's id.")],
    connection: ConnectionOptions,
    yes: Yes = False,
) -> None:
    """Remove the registration of a broker that will not come back.

    Move its replicas first: penstock cluster rebalance --remove-broker ID.
    """
    with open_cluster(connection) as cluster:
        held = sum(
            broker_id in part.replicas for topic in cluster.topics().values() for part in topic.partitions
        )
        if held:
            note(f"broker {broker_id} still holds {plural(held, 'replica')}, which stay assigned to it")
        confirm(f"Remove the registration of broker {broker_id}?", yes=yes)
        try:
            cluster.call_any(lambda broker: admin.unregister_broker(broker, broker_id))
        except Refused as error:
            raise CommandError(f"broker {broker_id} was not unregistered: {error}") from None
    note(f"broker {broker_id} unregistered")


@app.command()
@expand_options
def info(connection: ConnectionOptions, as_json: AsJson = False) -> None:
    """Show nodes, controller, features, topics and sizes."""
    with open_cluster(connection) as cluster:
        document = _info_document(cluster)
    if as_json:
        print_json(document)
    else:
        _print_info(document)


def _info_document(cluster: Cluster) -> dict[str, Any]:
    topics = cluster.topics()
    found = cluster.call_any(admin.describe_cluster)
    features = cluster.call_any(admin.describe_features)
    nodes = [
        {
            "node": broker.id,
            "host": broker.host,
            "port": broker.port,
            "rack": broker.rack,
            "controller": broker.id == found.controller_id,
            "bytes": _node_bytes(cluster, broker.id),
        }
        for broker in found.brokers
        if not broker.fenced
    ]
    sizes = [node["bytes"] for node in nodes]
    return {
        "cluster_id": found.cluster_id,
        "controller": None if found.controller_id < 0 else found.controller_id,
        "nodes": nodes,
        "features": {name: feature.level for name, feature in features.items() if feature.level},
        "topics": len(topics),
        "partitions": sum(len(topic.partitions) for topic in topics.values()),
        "bytes": None if None in sizes else sum(sizes),
    }


def _node_bytes(cluster: Cluster, node_id: int) -> int | None:
    try:
        return sum(admin.replica_sizes(cluster.connection(node_id)).values())
    except ClientError:
        return None


def _print_info(document: dict[str, Any]) -> None:
    print_facts(
        [
            ("cluster", document["cluster_id"]),
            ("controller", document["controller"]),
            ("topics", document["topics"]),
            ("partitions", document["partitions"]),
            ("size", human_bytes(document["bytes"])),
            (
                "features",
                ", ".join(f"{name} {level}" for name, level in sorted(document["features"].items())) or None,
            ),
        ]
    )
    rows = ([*list(node.values())[:-1], human_bytes(node["bytes"])] for node in document["nodes"])
    print()
    print_table(["node", "host", "port", "rack", "controller", "size"], rows)


@app.command("features")
@expand_options
def show_or_set_features(
    connection: ConnectionOptions,
    levels: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=LEVEL", help="The level to set, for example transaction.version=2."),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show the levels of the cluster's features, or set some of them, all or nothing.

    Clients see the new levels at their next connection. Lowering a level removes capabilities and asks for
    confirmation.
    """
    wanted = parse_pairs(levels or [], "a feature")
    for name, level in wanted.items():
        if not (level.isascii() and level.isdigit()):
            raise CommandError(f"{name}={level}: a level is a whole number", exit_code=EXIT_USAGE)
    with open_cluster(connection) as cluster:
        known = cluster.call_any(admin.describe_features)
        if wanted:
            _set_levels(cluster, known, {name: int(level) for name, level in wanted.items()}, yes=yes)
            known = cluster.call_any(admin.describe_features)
    rows: list[dict[str, Any]] = [
        {"feature": name, "level": one.level, "lowest": one.level_min, "highest": one.level_max}
        for name, one in sorted(known.items())
    ]
    if as_json:
        print_json(rows)
    else:
        print_table(["feature", "level", "lowest", "highest"], (list(row.values()) for row in rows))


def _set_levels(
    cluster: Cluster, known: dict[str, FeatureLevels], wanted: dict[str, int], *, yes: bool
) -> None:
    for name, level in wanted.items():
        _check_level(known, name, level)
    lowered = [name for name, level in wanted.items() if level < known[name].level]
    if lowered:
        confirm(f"Lower {', '.join(lowered)}?", yes=yes)
    try:
        cluster.call_any(lambda broker: admin.update_features(broker, wanted, lowered))
    except Refused as error:
        raise CommandError(f"nothing was changed: {error}") from None
    note("set " + ", ".join(f"{name} {level}" for name, level in wanted.items()))


def _check_level(known: dict[str, FeatureLevels], name: str, level: int) -> None:
    feature = known.get(name)
    if feature is None:
        hint = f"the features are {', '.join(sorted(known))}" if known else None
        raise CommandError(f"there is no feature {name}", hint=hint, exit_code=EXIT_USAGE)
    if not feature.level_min <= level <= feature.level_max:
        levels = f"{feature.level_min} to {feature.level_max}"
        raise CommandError(f"{name} has levels {levels}, not {level}", exit_code=EXIT_USAGE)


voters_app = typer.Typer(
    help="List the voters of the quorum, and remove one that is gone.", no_args_is_help=True
)
app.add_typer(voters_app, name="voters")


@voters_app.command("list")
@expand_options
def list_voters(connection: ConnectionOptions, as_json: AsJson = False) -> None:
    """List the voters with their state (leader, voter or gone) and lag."""
    with open_cluster(connection) as cluster:
        view = _describe_with_quorum(cluster)
    assert view.quorum is not None
    gone = lost_voters(view)
    rows = [_voter_row(view, voter, is_gone=voter.id in gone) for voter in view.quorum.voters]
    if as_json:
        print_json(rows)
    else:
        print_table(list(rows[0]), (list(row.values()) for row in rows))


def _voter_row(view: ClusterDescription, voter: QuorumReplica, *, is_gone: bool) -> dict[str, Any]:
    assert view.quorum is not None
    is_leader = voter.id == view.quorum.leader
    return {
        "node": voter.id,
        "state": "leader" if is_leader else "gone" if is_gone else "voter",
        "lag": None if voter.end_offset < 0 else max(0, view.quorum.high_watermark - voter.end_offset),
        "directory": str(voter.directory),
    }


@voters_app.command("remove")
@expand_options
def remove_voter(
    voter_id: Annotated[int, typer.Argument(metavar="ID", help="The node's id.")],
    connection: ConnectionOptions,
    yes: Yes = False,
) -> None:
    """Remove a voter from the quorum when it will not come back.

    The majority is then counted over the remaining voters. A running node would join the voters again by itself.
    """
    with open_cluster(connection) as cluster:
        view = _describe_with_quorum(cluster)
        assert view.quorum is not None
        voters = {voter.id: voter for voter in view.quorum.voters}
        if voter_id not in voters:
            raise CommandError(
                f"node {voter_id} is not a voter", hint=f"the voters are {', '.join(map(str, voters))}"
            )
        if voter_id not in lost_voters(view):
            raise CommandError(
                f"voter {voter_id} is alive, and would join the voters again", hint="stop that node first"
            )
        left = len(voters) - 1
        confirm(
            f"Remove voter {voter_id}? {plural(left, 'voter')} remain, and {left // 2 + 1} of them form a majority.",
            yes=yes,
        )
        try:
            cluster.call_any(
                lambda broker: admin.remove_raft_voter(broker, view.cluster_id, voters[voter_id])
            )
        except Refused as error:
            raise CommandError(f"voter {voter_id} was not removed: {error}") from None
    note(f"voter {voter_id} removed")


def _describe_with_quorum(cluster: Cluster) -> ClusterDescription:
    """Raises CommandError when no controller answers."""
    view = describe_cluster(cluster, quorum_timeout_s=QUORUM_TIMEOUT_S)
    if view.quorum is None:
        raise CommandError(
            "no controller answers, because no majority of the voters is running",
            hint="start enough nodes for a majority; only then can a voter be removed",
        )
    return view
