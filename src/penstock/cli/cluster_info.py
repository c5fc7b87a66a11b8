"""`penstock cluster info`: what a cluster is made of."""

from typing import Any

from penstock.cli.client import REQUEST_TIMEOUT_S, Cluster
from penstock.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap
from penstock.cli.output import human_bytes, print_facts, print_json, print_table


def info(bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, as_json: AsJson = False) -> None:
    """Show nodes, controller, features, topics and sizes."""
    document = _document(Cluster(bootstrap))
    if as_json:
        print_json(document)
    else:
        _print(document)


def _document(cluster: Cluster) -> dict[str, Any]:
    topics = cluster.metadata().topics
    found = cluster.wait({"cluster": cluster.admin.describe_cluster(request_timeout=REQUEST_TIMEOUT_S)})[
        "cluster"
    ]
    controller = found.controller.id if found.controller else None
    nodes = [_node(node, controller) for node in sorted(found.nodes, key=lambda node: int(node.id))]
    sizes = [node["bytes"] for node in nodes]
    return {
        "cluster_id": found.cluster_id,
        "controller": controller,
        "nodes": nodes,
        "features": _features(nodes),
        "topics": len(topics),
        "partitions": sum(len(topic.partitions) for topic in topics.values()),
        "bytes": None if None in sizes else sum(sizes),
    }


def _node(node: Any, controller: int | None) -> dict[str, Any]:
    return {
        "node": node.id,
        "host": node.host,
        "port": node.port,
        "rack": node.rack,
        "controller": node.id == controller,
        "bytes": _stored_bytes(node.host, node.port),
    }


def _stored_bytes(host: str, port: int) -> int | None:
    from penstock.cli.wire import stored_bytes

    try:
        return stored_bytes((host, port))
    except OSError:
        return None


def _features(nodes: list[dict[str, Any]]) -> dict[str, int]:
    from penstock.cli.wire import features

    for node in nodes:
        try:
            found = features((node["host"], node["port"]))
            return {name: feature.level for name, feature in found.items() if feature.level}
        except OSError:
            continue
    return {}


def _print(document: dict[str, Any]) -> None:
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
