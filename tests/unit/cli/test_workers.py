"""`serve --workers`: which nodes a host runs, and the flags of each."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.cli.cluster.local_cluster import LocalCluster
from penstock.cli.cluster.workers import plan_workers, worker_count, worker_flags
from penstock.cli.errors import CommandError
from penstock.cli.serve import Flags, settings_from_flags


def plan(count: int, flags: Flags, known: LocalCluster | None = None) -> LocalCluster:
    return plan_workers(settings_from_flags(flags, {}), count, known)


def flags_of(count: int, number: int, flags: Flags) -> dict[str, list[str]]:
    """What worker `number` (the first is 0) is started with."""
    settings = settings_from_flags(flags, {})
    cluster = plan_workers(settings, count, None)
    written = worker_flags(cluster.nodes[number], cluster, settings, flags)
    found: dict[str, list[str]] = {}
    for name, value in zip(written, [*written[1:], ""], strict=True):
        if name.startswith("--"):
            found.setdefault(name, []).append(value)
    return found


WITH_NODES = ["host:9000", "NODES://host:9100"]
FIRST: Flags = {
    "--listen": ["host:9000"],
    "--node-id": ["10"],
    "--data-dir": ["/d"],
    "--set": ["num.partitions=7"],
}


def test_ids_ports_and_folders_count_up() -> None:
    last = flags_of(4, 3, {**FIRST, "--http": ["host:9600"]})
    assert last["--node-id"] == ["13"]
    assert last["--listen"] == ["PLAINTEXT://host:9003", "NODES://127.0.0.1:19003"]
    assert last["--data-dir"] == ["/d/worker-4"]
    assert last["--http"] == ["host:9603"]
    assert last["--set"] == ["num.partitions=7"]
    assert last["--roles"] == ["broker"]
    assert last["--join"] == ["127.0.0.1:19000,127.0.0.1:19001,127.0.0.1:19002"]
    voters = ["10@127.0.0.1:19000,11@127.0.0.1:19001,12@127.0.0.1:19002"]
    assert flags_of(4, 0, FIRST)["--voters"] == voters


def test_every_listener_and_advertised_address_counts_up() -> None:
    given: Flags = {"--listen": ["A://:9000", "B://:9100"], "--advertise": ["A://a:9000", "B://b:19100"]}
    second = flags_of(2, 1, given)
    assert second["--listen"] == ["A://:9001", "B://:9101", "NODES://127.0.0.1:19001"]
    assert second["--advertise"] == ["A://a:9001", "B://b:19101"]
    second = flags_of(2, 1, {**given, "--set": ["inter.broker.listener.name=B"]})
    assert second["--listen"] == ["A://:9001", "B://:9101"]
    assert second["--join"] == ["b:19100"]


def test_all_share_the_rack_of_their_host() -> None:
    racks = {flags_of(3, number, FIRST)["--rack"][0] for number in range(3)}
    assert len(racks) == 1
    assert flags_of(3, 2, {**FIRST, "--rack": ["zone-a"]})["--rack"] == ["zone-a"]


@pytest.mark.parametrize(
    ("flags", "controllers"),
    [
        ({}, [10, 11, 12]),
        ({"--join": ["other:9092"], "--listen": WITH_NODES}, []),
        ({"--roles": ["broker"], "--join": ["other:9092"], "--listen": WITH_NODES}, []),
        (
            {"--roles": ["broker,controller"], "--join": ["other:9092"], "--listen": WITH_NODES},
            [10, 11, 12, 13],
        ),
        ({"--voters": ["10@host:9100,20@b:9100,30@c:9100"]}, [10]),
    ],
)
def test_who_is_a_controller(flags: dict[str, Sequence[str]], controllers: list[int]) -> None:
    cluster = plan(4, {**FIRST, **{name: list(values) for name, values in flags.items()}})
    assert [node.id for node in cluster.nodes if "controller" in node.roles] == controllers


def test_a_cluster_over_several_hosts_is_joined_as_told() -> None:
    joining = flags_of(2, 1, {**FIRST, "--listen": WITH_NODES, "--join": ["a:1,b:2"]})
    assert joining["--join"] == ["a:1,b:2"]
    voters = "10@host:9100,20@b:9100,30@c:9100"
    second = flags_of(2, 1, {**FIRST, "--voters": [voters]})
    assert second["--voters"] == [voters]
    assert second["--listen"] == joining["--listen"] == ["PLAINTEXT://host:9001", "NODES://host:9101"]


def test_free_ports_are_chosen_once() -> None:
    free: Flags = {"--listen": ["127.0.0.1:0"]}
    first = replace(plan(3, free), cluster_id="known")
    assert len({node.address for node in first.nodes}) == 3
    assert [node.address for node in plan(3, free, first).nodes] == [node.address for node in first.nodes]


def test_more_workers_join_those_that_founded_the_cluster() -> None:
    first = replace(plan(1, FIRST), cluster_id="known")
    more = plan(3, FIRST, first)
    assert [node.founder for node in more.nodes] == [True, False, False]


@pytest.mark.parametrize("text", ["0", "65", "x", "-1"])
def test_a_number_of_workers_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(CommandError, match="--workers takes a number from 1 to 64"):
        worker_count({"--workers": [text]})
