"""Fail-over: kill -9 closes every socket, which helps clients; a freeze and a network cut do not."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.brokers.cluster import Cluster
from benchmarks.load.failover import DefaultProducer, Probe, gap_between_epochs_s, longest_gap_s, running
from benchmarks.measure import Metrics, next_topic_name
from benchmarks.reports.stats import median
from benchmarks.scenarios.scenario import Measure, Scenario, Site
from benchmarks.wire.raw_client import Shape, create_topic, delete_topic

_SETTLE_S = 1.0
#: Where in the interval between two heartbeats a fault strikes is left to chance.
_HEARTBEAT_S = 2.0
_ACKS_BEFORE = 50
_TIMEOUT_S = 240.0


class Fault(NamedTuple):
    name: str
    title: str
    strike: Callable[[Cluster, int], None]
    repair: Callable[[Cluster, int], None]
    needs_proxy: bool = False


FAULTS = (
    Fault("kill", "kill -9", Cluster.kill_node, Cluster.start_node),
    Fault("freeze", "freeze", lambda c, node: c.nodes[node].freeze(), lambda c, node: c.nodes[node].thaw()),
    Fault("cut", "cut network", Cluster.cut_off, lambda c, _: c.heal(), needs_proxy=True),
)


class Target(NamedTuple):
    """A partition whose leader is to fail."""

    topic: str
    partition: int
    node_id: int


def _probed(fault: Fault) -> Measure:
    def measure(site: Site) -> Metrics:
        chance = random.Random(fault.name)
        leader_s: list[float] = []
        controller_s: list[float] = []
        with _cluster(site, fault) as cluster:
            for _ in range(site.pace.faults):
                leader_s.append(_probe(cluster, fault, chance, is_controller=False))
                if site.pace.hits_controllers:
                    controller_s.append(_probe(cluster, fault, chance, is_controller=True))
        return {**_summary("failover", leader_s), **_summary("failover_controller", controller_s)}

    return measure


def _seen_by_default_client(fault: Fault) -> Measure:
    def measure(site: Site) -> Metrics:
        chance = random.Random(fault.name)
        with _cluster(site, fault) as cluster:
            return _summary("failover_default_client", [_watch_default_client(cluster, fault, chance)])

    return measure


def _summary(prefix: str, values: list[float]) -> Metrics:
    if not values:
        return {}
    each = {f"{prefix}_{number}_s": value for number, value in enumerate(values, 1)}
    return {f"{prefix}_s": median(values), f"{prefix}_worst_s": max(values), **each}


@contextmanager
def _cluster(site: Site, fault: Fault) -> Iterator[Cluster]:
    assert issubclass(site.kind, Cluster)
    with (
        TemporaryDirectory(dir=site.folder) as folder,
        site.kind(Path(folder) / "cluster", cuttable=fault.needs_proxy) as cluster,
    ):
        cluster.start()
        yield cluster


@contextmanager
def _target(cluster: Cluster, *, is_controller: bool) -> Iterator[Target]:
    """Each node leads one partition of a new topic, so one of them has the leader that is wanted."""
    ids = sorted(cluster.nodes)
    assignments = [ids[first:] + ids[:first] for first in range(len(ids))]
    name = next_topic_name()
    with cluster.connect() as admin:
        create_topic(admin, name, Shape(assignments=assignments), cluster.topic_configs(fsync=True))
    cluster.wait_until_whole(name)
    controller = cluster.controller_id()
    node_id = controller if is_controller else next(i for i in ids if i != controller)
    yield Target(name, ids.index(node_id), node_id)
    cluster.wait_until_whole(name)
    with cluster.connect() as admin:
        delete_topic(admin, name)


def _probe(cluster: Cluster, fault: Fault, chance: random.Random, *, is_controller: bool) -> float:
    with _target(cluster, is_controller=is_controller) as target:
        probe = Probe(_addresses(cluster), target.topic, target.partition)
        with running(probe):
            probe.wait_for(lambda: len(probe.acks) >= _ACKS_BEFORE, _TIMEOUT_S, "nothing is acknowledged")
            _wait_for_the_moment(chance)
            epoch = probe.acks[-1].leader_epoch
            fault.strike(cluster, target.node_id)
            try:
                probe.wait_for(
                    lambda: probe.acks[-1].leader_epoch > epoch,
                    _TIMEOUT_S,
                    f"no new leader after {fault.title}",
                )
            finally:
                fault.repair(cluster, target.node_id)
        return gap_between_epochs_s(probe.acks)


def _watch_default_client(cluster: Cluster, fault: Fault, chance: random.Random) -> float:
    with _target(cluster, is_controller=False) as target:
        producer = DefaultProducer(_addresses(cluster), target.topic, target.partition)
        with running(producer):
            producer.wait_for(
                lambda: len(producer.acks) >= _ACKS_BEFORE, _TIMEOUT_S, "nothing is acknowledged"
            )
            _wait_for_the_moment(chance)
            struck_s = time.monotonic()
            fault.strike(cluster, target.node_id)
            try:
                producer.wait_for(
                    lambda: producer.acked_sent_s > struck_s + _SETTLE_S,
                    _TIMEOUT_S,
                    f"no acknowledgement after {fault.title}",
                )
            finally:
                fault.repair(cluster, target.node_id)
        return longest_gap_s(producer.acks, struck_s)


def _wait_for_the_moment(chance: random.Random) -> None:
    time.sleep(_SETTLE_S + chance.uniform(0, _HEARTBEAT_S))


def _addresses(cluster: Cluster) -> dict[int, tuple[str, int]]:
    return {node_id: place.advertised for node_id, place in cluster.places.items()}


def _scenarios(fault: Fault) -> tuple[Scenario, Scenario]:
    return (
        Scenario(
            name=f"failover-{fault.name}",
            title=f"fail-over, {fault.title}",
            measure=_probed(fault),
            shown=(
                "failover_s",
                "failover_worst_s",
                "failover_controller_s",
                "failover_controller_worst_s",
            ),
            # A freeze and a cut look alike from outside, and a quick look has not much time.
            quick=fault.name != "freeze",
            rounds_max=1,
            needs_warm=False,
        ),
        Scenario(
            name=f"failover-{fault.name}-librdkafka",
            title=f"fail-over, {fault.title}, librdkafka",
            measure=_seen_by_default_client(fault),
            shown=("failover_default_client_s",),
            rounds_max=1,
            needs_warm=False,
        ),
    )


SCENARIOS = tuple(chain.from_iterable(_scenarios(fault) for fault in FAULTS))
