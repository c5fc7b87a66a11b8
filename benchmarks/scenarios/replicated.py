"""A cluster at work: three replicas, two of them needed, every request acknowledged by all in-sync ones.

Each load is run twice: with the flush policy as shipped (ours syncs before it acknowledges, on every in-sync replica;
Kafka leaves it to the kernel) and with the page cache on both sides.
"""

import time
from dataclasses import replace
from itertools import chain

from benchmarks.load.workload import Client, Workload
from benchmarks.measure import Metrics, next_topic_name, run_workload
from benchmarks.scenarios.scenario import Measure, Scenario, Site
from benchmarks.wire.raw_client import Shape, create_topic, delete_topic

MANY = 1000
RATE = 500.0
_IDLE_SETTLE_S = 3.0
_THROUGHPUT = ("mb_per_s", "records_per_s", "cluster_cpu_s_per_gb")
_LATENCY = ("produce_p50_ms", "produce_p99_ms", "produce_p999_ms", "cluster_cpu_us_per_request")
#: By what is appended to a scenario's name: what its title says, and whether ours syncs.
_FLUSHES = {"": ("as shipped", True), "-never": ("page cache", False)}
#: Partitions by name: what the title says, their number, and producers per node that leads some.
_SPREADS = {"1p": ("1 partition", 1, 2), "1000p": (f"{MANY:,} partitions", MANY, 1)}


def _replicated(workload: Workload) -> Measure:
    """Cost is that of all nodes together, by what producers sent."""

    def measure(site: Site) -> Metrics:
        metrics = run_workload(site.broker, workload, site.pace.timing)
        for name in ("cpu_s_per_gb", "cpu_us_per_request"):
            if name in metrics:
                metrics[f"cluster_{name}"] = metrics.pop(name)
        return metrics

    return measure


def _throughput(spread: str, flush: str) -> Scenario:
    where, partitions, producers = _SPREADS[spread]
    how, fsync = _FLUSHES[flush]
    workload = Workload(
        value_bytes=1024, partitions=partitions, producers=producers, consumers=0, fsync=fsync
    )
    return Scenario(
        name=f"rf3-{spread}{flush}",
        title=f"1 KB in 64 KB batches, {where}, {how}",
        measure=_replicated(workload),
        shown=_THROUGHPUT,
        quick=spread == "1p",
    )


def _native(flush: str) -> Scenario:
    how, fsync = _FLUSHES[flush]
    workload = Workload(
        value_bytes=1024, client=Client.LIBRDKAFKA, partitions=6, producers=1, consumers=0, fsync=fsync
    )
    return Scenario(
        name=f"rf3-librdkafka{flush}",
        title=f"1 KB, librdkafka, 6 partitions, {how}",
        measure=_replicated(workload),
        shown=_THROUGHPUT,
    )


def _latency(spread: str, flush: str) -> Scenario:
    where, partitions, _ = _SPREADS[spread]
    how, fsync = _FLUSHES[flush]
    paced = Workload(value_bytes=1024, batched=False, rate=RATE, producers=1, consumers=0, connections=4)
    # End to end only where one reader can follow everything.
    consumers = 1 if partitions == 1 else 0
    return Scenario(
        name=f"rf3-latency-{spread}{flush}",
        title=f"{RATE:,.0f} x 1 KB/s, {where}, {how}",
        measure=_replicated(replace(paced, partitions=partitions, consumers=consumers, fsync=fsync)),
        shown=(*_LATENCY, "end_to_end_p99_ms") if consumers else _LATENCY,
        quick=spread == "1p",
    )


def _idle(site: Site) -> Metrics:
    """Without producers and consumers; followers only fetch."""
    cluster, name = site.broker, next_topic_name()
    with cluster.connect() as admin:
        began = time.monotonic()
        create_topic(admin, name, Shape(MANY, cluster.replication_factor), cluster.topic_configs(fsync=True))
        created_s = time.monotonic() - began
        time.sleep(_IDLE_SETTLE_S)
        before_s, cpu_before_s = time.monotonic(), cluster.cpu_seconds()
        time.sleep(site.pace.idle_s)
        cpu_s, wall_s = cluster.cpu_seconds() - cpu_before_s, time.monotonic() - before_s
        rss, _ = cluster.memory_bytes()
        delete_topic(admin, name)
    return {
        "create_topic_s": created_s,
        "idle_cpu_percent": 100 * cpu_s / wall_s,
        "idle_rss_mb": rss / 1e6,
    }


_IDLE = Scenario(
    name="rf3-idle-1000p",
    title=f"idle, {MANY:,} partitions, all nodes",
    measure=_idle,
    shown=("idle_cpu_percent", "idle_rss_mb", "create_topic_s"),
    quick=True,
)

SCENARIOS = (
    *(_throughput(spread, flush) for spread in _SPREADS for flush in _FLUSHES),
    *(_native(flush) for flush in _FLUSHES),
    *chain.from_iterable((_latency(spread, flush) for flush in _FLUSHES) for spread in _SPREADS),
    _IDLE,
)
