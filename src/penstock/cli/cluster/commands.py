"""`penstock cluster`: assembles its verbs, and implements the short ones: `info`, `features`, `unregister`,
`voters list` and `voters remove`.

`start`, `stop`, `restart`, `status` and `rebalance` have their own modules.
"""

from typing import Annotated, Any

import typer

from penstock.cli.cluster import rebalance, start, status
from penstock.cli.cluster.description import (
    ClusterDescription,
    QuorumReplica,
    RequestRefused,
    describe_cluster,
    reachable_address,
    remove_raft_voter,
    update_features,
)
from penstock.cli.cluster.description import unregister_broker as ask_to_unregister
from penstock.cli.cluster.status import QUORUM_TIMEOUT_S, lost_voters
from penstock.cli.cluster_client import (
    REQUEST_TIMEOUT_S,
    Address,
    FeatureLevels,
    LibrdkafkaCluster,
    describe_features,
)
from penstock.cli.errors import EXIT_USAGE, CommandError
from penstock.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Yes, parse_pairs
from penstock.cli.output import confirm, human_bytes, note, plural, print_facts, print_json, print_table


def info(bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, as_json: AsJson = False) -> None:
    """Show nodes, controller, features, topics and sizes."""
    document = _info_document(LibrdkafkaCluster(bootstrap))
    if as_json:
        print_json(document)
    else:
        _print_info(document)


def _info_document(cluster: LibrdkafkaCluster) -> dict[str, Any]:
    topics = cluster.metadata().topics
    found = cluster.wait({"cluster": cluster.admin.describe_cluster(request_timeout=REQUEST_TIMEOUT_S)})[
        "cluster"
    ]
    controller = found.controller.id if found.controller else None
    nodes = [_node_document(node, controller) for node in sorted(found.nodes, key=lambda node: int(node.id))]
    sizes = [node["bytes"] for node in nodes]
    return {
        "cluster_id": found.cluster_id,
        "controller": controller,
        "nodes": nodes,
        "features": _feature_levels(nodes),
        "topics": len(topics),
        "partitions": sum(len(topic.partitions) for topic in topics.values()),
        "bytes": None if None in sizes else sum(sizes),
    }


def _node_document(node: Any, controller: int | None) -> dict[str, Any]:
    return {
        "node": node.id,
        "host": node.host,
        "port": node.port,
        "rack": node.rack,
        "controller": node.id == controller,
        "bytes": _node_bytes(node.host, node.port),
    }


def _node_bytes(host: str, port: int) -> int | None:
    from penstock.cli.cluster_client import broker_bytes

    try:
        return broker_bytes((host, port))
    except OSError:
        return None


def _feature_levels(nodes: list[dict[str, Any]]) -> dict[str, int]:
    from penstock.cli.cluster_client import describe_features

    for node in nodes:
        try:
            found = describe_features((node["host"], node["port"]))
            return {name: feature.level for name, feature in found.items() if feature.level}
        except OSError:
            continue
    return {}


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


def show_or_set_features(
    levels: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=LEVEL]...", help="The level to set, for example transaction.version=2."
        ),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show the levels of the cluster's features, or set some of them, all or nothing.

    Clients see the new levels at their next connection. Lowering a level removes capabilities, and asks first.
    """
    wanted = _parse_levels(levels or [])
    address = reachable_address(LibrdkafkaCluster(bootstrap))
    known = _known_features(address)
    if wanted:
        _set_levels(address, known, wanted, yes=yes)
        known = _known_features(address)
    _print_features(known, as_json=as_json)


def _parse_levels(words: list[str]) -> dict[str, int]:
    wanted = parse_pairs(words, "a feature")
    for name, level in wanted.items():
        if not (level.isascii() and level.isdigit()):
            raise CommandError(f"{name}={level}: a level is a whole number", exit_code=EXIT_USAGE)
    return {name: int(level) for name, level in wanted.items()}


def _known_features(address: Address) -> dict[str, FeatureLevels]:
    try:
        return describe_features(address)
    except OSError as error:
        raise CommandError(f"the broker does not answer: {error}") from None


def _set_levels(
    address: Address, known: dict[str, FeatureLevels], wanted: dict[str, int], *, yes: bool
) -> None:
    for name, level in wanted.items():
        _check_level(known, name, level)
    lowered = [name for name, level in wanted.items() if level < known[name].level]
    if lowered:
        confirm(f"Lower {', '.join(lowered)}?", yes=yes)
    try:
        update_features(address, wanted, lowered)
    except RequestRefused as error:
        raise CommandError(f"nothing was changed: {error}") from None
    except OSError as error:
        raise CommandError(f"the controller does not answer: {error}") from None
    note("set " + ", ".join(f"{name} {level}" for name, level in wanted.items()))


def _check_level(known: dict[str, FeatureLevels], name: str, level: int) -> None:
    feature = known.get(name)
    if feature is None:
        hint = f"there are {', '.join(sorted(known))}" if known else None
        raise CommandError(f"no feature {name}", hint=hint, exit_code=EXIT_USAGE)
    if not feature.level_min <= level <= feature.level_max:
        spelled = f"{feature.level_min} to {feature.level_max}"
        raise CommandError(f"{name} has levels {spelled}, not {level}", exit_code=EXIT_USAGE)


def _print_features(known: dict[str, FeatureLevels], *, as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {"feature": name, "level": one.level, "lowest": one.level_min, "highest": one.level_max}
        for name, one in sorted(known.items())
    ]
    if as_json:
        print_json(rows)
    else:
        print_table(["feature", "level", "lowest", "highest"], (list(row.values()) for row in rows))


def unregister(
    broker_id: Annotated[int, typer.Argument(metavar="ID", help="The broker's id.")],
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    yes: Yes = False,
) -> None:
    """Remove the registration of a broker that will not come back.

    Move its replicas first: penstock cluster rebalance --remove-broker ID.
    """
    cluster = LibrdkafkaCluster(bootstrap)
    held = _count_replicas(cluster, broker_id)
    if held:
        note(f"broker {broker_id} still holds {plural(held, 'replica')}; they stay assigned to it")
    confirm(f"Forget broker {broker_id}?", yes=yes)
    try:
        ask_to_unregister(reachable_address(cluster), broker_id)
    except RequestRefused as error:
        raise CommandError(f"broker {broker_id} was not unregistered: {error}") from None
    except OSError as error:
        raise CommandError(f"the controller does not answer: {error}") from None
    note(f"broker {broker_id} unregistered")


def _count_replicas(cluster: LibrdkafkaCluster, broker_id: int) -> int:
    return sum(
        broker_id in partition.replicas
        for topic in cluster.metadata().topics.values()
        for partition in topic.partitions.values()
    )


voters_app = typer.Typer(
    help="List the voters of the quorum, and remove one that is gone.", no_args_is_help=True
)


@voters_app.command("list")
def list_voters(bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, as_json: AsJson = False) -> None:
    """List the voters with their state (leader, voter or gone) and lag."""
    view = _describe_with_quorum(LibrdkafkaCluster(bootstrap))
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
def remove_voter(
    voter_id: Annotated[int, typer.Argument(metavar="ID", help="The node's id.")],
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    yes: Yes = False,
) -> None:
    """Remove a voter from the quorum when it will not come back.

    The majority is then counted over the remaining voters. A running node would join the voters again by itself.
    """
    cluster = LibrdkafkaCluster(bootstrap)
    view = _describe_with_quorum(cluster)
    assert view.quorum is not None
    voters = {voter.id: voter for voter in view.quorum.voters}
    if voter_id not in voters:
        named = ", ".join(map(str, voters))
        raise CommandError(f"node {voter_id} is no voter", hint=f"the voters are {named}")
    if voter_id not in lost_voters(view):
        raise CommandError(
            f"voter {voter_id} is alive, and would join again", hint="stop that node first, or let it be"
        )
    left = len(voters) - 1
    confirm(f"Remove voter {voter_id}? {left} are left, of which {left // 2 + 1} must be there", yes=yes)
    try:
        remove_raft_voter(reachable_address(cluster), view.cluster_id, voters[voter_id])
    except RequestRefused as error:
        raise CommandError(f"voter {voter_id} was not removed: {error}") from None
    except OSError as error:
        raise CommandError(f"the controller does not answer: {error}") from None
    note(f"voter {voter_id} removed")


def _describe_with_quorum(cluster: LibrdkafkaCluster) -> ClusterDescription:
    """Raises CommandError when no controller answers."""
    view = describe_cluster(cluster, quorum_timeout_s=QUORUM_TIMEOUT_S)
    if view.quorum is None:
        raise CommandError(
            "no controller answers: a majority of the voters is not there",
            hint="a voter can be removed only by the majority; bring back as many nodes as that takes",
        )
    return view


app = typer.Typer(help="Start, watch and rebalance a cluster.", no_args_is_help=True)

app.command()(start.start)
app.command()(start.stop)
app.command("restart")(start.restart_node)
app.command()(status.status)
app.command()(rebalance.rebalance)
app.command()(unregister)
app.command()(info)
app.command("features")(show_or_set_features)
app.add_typer(voters_app, name="voters")
