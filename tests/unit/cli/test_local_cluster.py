"""The plan of a local cluster: which node has which role, and how nodes find each other."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.cluster.local_cluster import (
    ClusterDirectory,
    LocalCluster,
    LocalNode,
    grow_cluster,
    local_nodes,
    node_flags,
    quorum_flags,
)
from penstock.cli.errors import CommandError


def members(count: int) -> list[LocalNode]:
    ports = range(9001, 9001 + count)
    return local_nodes(Path("/d"), count, ports, [None] * count, [port + 10_000 for port in ports])


def founded(count: int) -> LocalCluster:
    return replace(grow_cluster(None, count, members(count)), cluster_id="known")


@pytest.mark.parametrize(("count", "controllers"), [(1, [1]), (2, [1]), (3, [1, 2, 3]), (5, [1, 2, 3])])
def test_three_nodes_are_controllers_or_one(count: int, controllers: list[int]) -> None:
    cluster = founded(count)
    assert [node.id for node in cluster.nodes if "controller" in node.roles] == controllers
    assert all("broker" in node.roles for node in cluster.nodes)


def test_founders_name_each_other_and_others_join_them() -> None:
    cluster = founded(4)
    voters = "1@127.0.0.1:19001,2@127.0.0.1:19002,3@127.0.0.1:19003"
    assert quorum_flags(cluster.nodes[0], cluster) == ["--voters", voters]
    assert quorum_flags(cluster.nodes[3], cluster) == [
        "--join",
        "127.0.0.1:19001,127.0.0.1:19002,127.0.0.1:19003",
    ]


def test_a_node_alone_founds_its_cluster_by_itself() -> None:
    cluster = founded(1)
    assert quorum_flags(cluster.nodes[0], cluster) == []


def test_a_grown_cluster_is_never_founded_a_second_time() -> None:
    """The first node without its disk would found another cluster if it knew no other node."""
    cluster = grow_cluster(founded(1), 3, members(3))
    assert [node.founder for node in cluster.nodes] == [True, False, False]
    assert quorum_flags(cluster.nodes[0], cluster) == ["--join", "127.0.0.1:19002,127.0.0.1:19003"]
    assert quorum_flags(cluster.nodes[1], cluster) == ["--join", "127.0.0.1:19001,127.0.0.1:19003"]
    assert [len(node.roles) for node in cluster.nodes] == [2, 2, 2]


def test_nodes_keep_their_addresses() -> None:
    moved = local_nodes(Path("/d"), 3, [1, 2, 3], [None] * 3, [4, 5, 6])
    nodes = grow_cluster(founded(2), 3, moved).nodes
    assert [node.address for node in nodes] == ["127.0.0.1:9001", "127.0.0.1:9002", "127.0.0.1:3"]
    assert [node.peer_address for node in nodes] == ["127.0.0.1:19001", "127.0.0.1:19002", "127.0.0.1:6"]


def test_nodes_of_a_cluster_have_a_listener_of_their_own_and_a_node_alone_has_none() -> None:
    words = node_flags(founded(3).nodes[1], founded(3), None, {})
    listeners = [word for word, flag in zip(words[1:], words, strict=False) if flag == "--listen"]
    assert listeners == ["PLAINTEXT://127.0.0.1:9002", "NODES://127.0.0.1:19002"]
    assert "inter.broker.listener.name=NODES" in words
    assert not any("NODES" in word for word in node_flags(founded(1).nodes[0], founded(1), None, {}))


def test_a_cluster_of_an_earlier_release_goes_on_sharing_its_listeners() -> None:
    """Its voters are recorded with the clients' addresses, under which they would refuse each other."""
    before = founded(3)
    before = replace(before, nodes=tuple(replace(node, peer_address=None) for node in before.nodes))
    cluster = grow_cluster(before, 4, members(4))
    assert [node.peer_address for node in cluster.nodes] == [None] * 4
    assert "inter.broker.listener.name=PLAINTEXT" in node_flags(cluster.nodes[3], cluster, None, {})
    alone = replace(founded(1), nodes=(replace(founded(1).nodes[0], peer_address=None),))
    assert all(node.peer_address for node in grow_cluster(alone, 3, members(3)).nodes)


def test_a_cluster_that_was_never_founded_is_planned_again() -> None:
    never = replace(founded(1), cluster_id=None)
    assert [node.founder for node in grow_cluster(never, 3, members(3)).nodes] == [True, True, True]


def test_a_cluster_does_not_lose_nodes_by_starting() -> None:
    with pytest.raises(CommandError, match="cannot remove 2"):
        grow_cluster(founded(3), 1, members(1))


def test_writes_survive_a_node_wherever_there_are_three_and_the_user_has_the_last_word() -> None:
    words = node_flags(founded(3).nodes[0], founded(3), None, {"min.insync.replicas": "3"})
    assert "default.replication.factor=3" in words
    assert "min.insync.replicas=3" in words
    assert "min.insync.replicas=2" in node_flags(founded(3).nodes[0], founded(3), None, {})
    assert "min.insync.replicas=1" in node_flags(founded(1).nodes[0], founded(1), None, {})


def test_the_folder_remembers_and_lets_one_in(tmp_path: Path) -> None:
    folder = ClusterDirectory(tmp_path)
    assert folder.load() is None
    assert not folder.is_running
    cluster = replace(founded(3).running({1: 11, 3: 13}), settings={"a": "b"}, supervisor=7, first_port=9001)
    folder.save(cluster)
    assert folder.load() == cluster
    folder.lock()
    assert folder.is_running
    with pytest.raises(CommandError, match="is running"):
        ClusterDirectory(tmp_path).lock()


def test_a_file_that_says_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"nodes": [{"id": 1}]}')
    with pytest.raises(CommandError, match=r"cannot read .*cluster.json"):
        ClusterDirectory(tmp_path).load()
