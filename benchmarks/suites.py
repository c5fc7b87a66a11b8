"""The suites: one broker, or a cluster of three; what is measured on them, at which pace, after which warm-up."""

from dataclasses import dataclass

from benchmarks.brokers import PenstockBroker, Subject
from benchmarks.measure import Timing, WarmUp
from benchmarks.peer_kafka import KafkaBroker
from benchmarks.scenarios import SCENARIOS
from benchmarks.scenarios.scenario import FULL, QUICK, Pace, Scenario
from benchmarks.scenarios.unbatched import FLAT_OUT
from benchmarks.workload import Client, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    scenarios: tuple[Scenario, ...]
    ours: type[Subject]
    peer: type[Subject]
    full: Pace
    quick: Pace
    #: What has to be hot before anything counts: both kinds of clients, large and small requests.
    warm_up: tuple[Workload, ...]


def single() -> Suite:
    return Suite(
        scenarios=SCENARIOS,
        ours=PenstockBroker,
        peer=KafkaBroker,
        full=FULL,
        quick=QUICK,
        warm_up=(Workload(value_bytes=100), Workload(value_bytes=1024, client=Client.LIBRDKAFKA), FLAT_OUT),
    )


def cluster() -> Suite:
    from benchmarks.clusters import PenstockCluster
    from benchmarks.peer_kafka_cluster import KafkaCluster
    from benchmarks.scenarios import failover, replicated

    batched = Workload(value_bytes=1024, partitions=6, producers=1, consumers=0)
    unbatched = Workload(
        value_bytes=1024, partitions=6, batched=False, producers=1, consumers=0, connections=4
    )
    return Suite(
        # Fail-over comes first, while no other cluster runs beside the one that is broken.
        scenarios=(*failover.SCENARIOS, *replicated.SCENARIOS),
        ours=PenstockCluster,
        peer=KafkaCluster,
        full=Pace(
            timing=Timing(2, 8), warm_up=WarmUp(8, 1_000_000_000, 60_000), rounds=3, faults=5, idle_s=20
        ),
        quick=Pace(
            timing=Timing(0.5, 1.5),
            warm_up=WarmUp(2, 150_000_000, 5_000),
            rounds=1,
            faults=1,
            idle_s=3,
            hits_controllers=False,
        ),
        warm_up=(batched, unbatched),
    )
