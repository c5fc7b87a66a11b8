"""The suites: one broker, a cluster of three, or what coordinators do; at which pace, after which warm-up."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.brokers.broker import PenstockBroker, Subject
from benchmarks.brokers.kafka import KafkaBroker
from benchmarks.load.workload import Client, Workload
from benchmarks.measure import Timing, WarmUp, warm_up
from benchmarks.scenarios import SCENARIOS
from benchmarks.scenarios.scenario import FULL, QUICK, Pace, Scenario, Warm
from benchmarks.scenarios.unbatched import FLAT_OUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    name: str
    scenarios: tuple[Scenario, ...]
    ours: type[Subject]
    #: By the name that the command line knows them by.
    peers: Mapping[str, type[Subject]]
    full: Pace
    quick: Pace
    #: What has to be hot before anything counts: both kinds of clients, large and small requests.
    warm_up: tuple[Warm, ...] = ()


def _load(workload: Workload) -> Warm:
    return lambda broker, pace: warm_up(broker, workload, pace.warm_up)


def single() -> Suite:
    loads = (Workload(value_bytes=100), Workload(value_bytes=1024, client=Client.LIBRDKAFKA), FLAT_OUT)
    return Suite(
        name="single",
        scenarios=SCENARIOS,
        ours=PenstockBroker,
        peers={"kafka": KafkaBroker},
        full=FULL,
        quick=QUICK,
        warm_up=tuple(map(_load, loads)),
    )


def cluster() -> Suite:
    from benchmarks.brokers.cluster import PenstockCluster
    from benchmarks.brokers.kafka_cluster import KafkaCluster
    from benchmarks.scenarios import failover, replicated

    batched = Workload(value_bytes=1024, partitions=6, producers=1, consumers=0)
    unbatched = Workload(
        value_bytes=1024, partitions=6, batched=False, producers=1, consumers=0, connections=4
    )
    return Suite(
        name="cluster",
        # Fail-over comes first, while no other cluster runs beside the one that is broken.
        scenarios=(*failover.SCENARIOS, *replicated.SCENARIOS),
        ours=PenstockCluster,
        peers={"kafka": KafkaCluster},
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
        warm_up=(_load(batched), _load(unbatched)),
    )


def secure() -> Suite:
    from benchmarks.scenarios.secure import SCENARIOS as SECURE

    return Suite(
        name="secure",
        scenarios=SECURE,
        ours=PenstockBroker,
        peers={"kafka": KafkaBroker},
        full=Pace(timing=Timing(2, 8), warm_up=WarmUp(8, 1_000_000_000, 200_000), rounds=3),
        quick=Pace(timing=Timing(0.5, 1.5), warm_up=WarmUp(2, 150_000_000, 20_000), rounds=1),
    )


def neighbours() -> Suite:
    from benchmarks.scenarios.neighbours import SCENARIOS as NEIGHBOURS

    return Suite(
        name="neighbours",
        scenarios=NEIGHBOURS,
        ours=PenstockBroker,
        peers={"kafka": KafkaBroker},
        full=Pace(timing=Timing(2, 20), warm_up=WarmUp(10, 0, 200_000), rounds=3),
        quick=Pace(timing=Timing(0.5, 4), warm_up=WarmUp(2, 0, 20_000), rounds=1),
    )


def queue() -> Suite:
    from benchmarks.brokers.nats import NatsServer
    from benchmarks.scenarios import rebalance, share, transactions

    return Suite(
        name="queue",
        scenarios=(*transactions.SCENARIOS, *rebalance.SCENARIOS, *share.SCENARIOS),
        ours=PenstockBroker,
        peers={"kafka": KafkaBroker, "nats": NatsServer},
        full=Pace(timing=Timing(1, 3), warm_up=WarmUp(6, 500_000_000, 60_000), rounds=3),
        quick=Pace(timing=Timing(0.5, 1.5), warm_up=WarmUp(2, 150_000_000, 5_000), rounds=1),
    )
