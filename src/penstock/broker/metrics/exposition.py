"""The Prometheus exposition of a node's metrics.

A scrape first copies numbers on the event loop, in bounded chunks, and then renders them as text in a thread. The
first scrape loads the Prometheus library; the measured code never uses it. Labels are limited to what operators create
(topics, partitions, groups, listeners) and to the APIs and errors of the protocol.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from penstock import __version__
from penstock.broker.config.logging import suppressed_lines
from penstock.broker.metrics.access import audit_families, tenant_families
from penstock.broker.metrics.coordinators import coordinator_families
from penstock.broker.metrics.counters import (
    LATENCY_BUCKETS,
    HistogramSnapshot,
    MetricFamily,
    counter,
    gauge,
    histogram_snapshot,
)
from penstock.broker.metrics.groups import RemoteEndOffsets, group_families, read_groups
from penstock.broker.metrics.network import client_families, connection_families, request_families
from penstock.broker.metrics.overflow import overflow_families
from penstock.broker.metrics.replication import (
    FollowerLag,
    PartitionCounts,
    follower_lags,
    replication_families,
)
from penstock.broker.metrics.topics import (
    DamageCounts,
    PartitionRow,
    partition_families,
    partition_row,
    topic_families,
)
from penstock.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.broker.metrics.sources import MetricSources

#: Partitions that are copied before the scrape yields to the event loop.
_PARTITIONS_PER_CHUNK: Final = 200


class Exposition:
    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, sources: MetricSources) -> None:
        self._sources = sources
        self._ends = RemoteEndOffsets(sources)
        self._scrape: asyncio.Future[bytes] | None = None

    async def scrape(self) -> bytes:
        """Return the metrics as text. Concurrent callers share one scrape, so that frequent scrapes cost little."""
        if self._scrape is None:
            self._scrape = asyncio.ensure_future(self._scrape_once())
            self._scrape.add_done_callback(self._finished)
        return await asyncio.shield(self._scrape)

    async def _scrape_once(self) -> bytes:
        families = await collect_metrics(self._sources, self._ends)
        return await self._sources.threads.in_thread(render, families)

    def _finished(self, scrape: asyncio.Future[bytes]) -> None:
        self._scrape = None
        if not scrape.cancelled():
            scrape.exception()  # marks it as retrieved; callers that still wait get the exception


# -- on the event loop: copy numbers ---------------------------------------------------------------------


async def collect_metrics(
    sources: MetricSources, ends: RemoteEndOffsets | None = None
) -> Iterator[MetricFamily]:
    """Copy all numbers now. The families of partitions and groups are built when the caller iterates over them."""
    families = [
        *_node_families(sources),
        *connection_families(sources),
        *client_families(sources),
        *request_families(sources),
        *topic_families(sources),
        *audit_families(sources.audit),
        *tenant_families(sources.tenants),
        *overflow_families(sources.overflow, sources.metrics, sources.metadata.image, sources.group_drops),
    ]
    partitions: list[PartitionRow] = []
    followers: list[FollowerLag] = []
    counted, damaged = PartitionCounts(), DamageCounts()
    for piece in _chunks(list(sources.partitions), _PARTITIONS_PER_CHUNK):
        for partition in piece:
            partitions.append(partition_row(partition))
            followers += follower_lags(partition)
            counted = counted.plus_partition(partition)
            damaged.add(partition)
        await asyncio.sleep(0)
    families += replication_families(sources, counted, followers)
    families += damaged.families(sources)
    families += coordinator_families(
        transactions=sources.transactions.existing,
        share_state=sources.share_state.existing,
        share=sources.share.existing,
        schedule=sources.schedule.existing,
    )
    groups = await read_groups(sources, ends)
    return chain(families, partition_families(partitions), group_families(groups))


def _node_families(sources: MetricSources) -> Iterator[MetricFamily]:
    build = (__version__, "{}.{}.{}".format(*sys.version_info[:3]))
    yield MetricFamily("gauge", "penstock_build_info", "What runs here.", ("version", "python"), [(build, 1)])
    identity = (str(sources.settings.node_id), sources.store.cluster_id)
    yield MetricFamily(
        "gauge",
        "penstock_node_info",
        "The ids of this node and its cluster, as labels; always 1.",
        ("node_id", "cluster_id"),
        [(identity, 1)],
    )
    yield gauge("penstock_ready", "1 while the node serves its listeners.", sources.is_serving())
    yield counter(
        "penstock_internal_errors",
        "Requests that failed because of a mistake in this software.",
        sources.metrics.internal_errors,
    )
    yield counter(
        "penstock_storage_errors",
        "Requests that failed because of an error of the disk.",
        sum(
            count
            for (_, error), count in sources.metrics.errors.items()
            if error == ErrorCode.kafka_storage_error.name
        )
        - sources.metrics.held_producers,
    )
    yield MetricFamily(
        "histogram",
        "penstock_flush_seconds",
        "Time to sync a log.",
        (),
        [((), histogram_snapshot(sources.metrics.flushes))],
    )
    yield counter(
        "penstock_log_lines_suppressed", "Lines left out of the node's own log.", suppressed_lines()
    )


def _chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


# -- in a thread: render text ----------------------------------------------------------------------------


def render(families: Iterable[MetricFamily]) -> bytes:
    """Blocking: loads the Prometheus library, and takes a while with many partitions."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Collector:
    """Passes our metric families to the Prometheus library, through its collector interface."""

    def __init__(self, families: Iterable[MetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        return map(_prometheus_family, self._families)


def _prometheus_family(family: MetricFamily) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    metric = kinds[family.kind](family.name, family.help, labels=family.labels)
    for labels, value in family.samples:
        if isinstance(value, HistogramSnapshot):
            metric.add_metric(labels, buckets=_cumulative(value), sum_value=value.total_seconds)
        else:
            metric.add_metric(labels, value)
    return metric


def _cumulative(timings: HistogramSnapshot) -> list[tuple[str, float]]:
    bounds = [*map(str, LATENCY_BUCKETS), "+Inf"]
    total, buckets = 0, []
    for bound, count in zip(bounds, timings.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
