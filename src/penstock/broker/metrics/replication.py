"""The metrics of replication and of the quorum on one node: lag, in-sync sets, elections, offline partitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.metrics.counters import Labels, MetricFamily, counter, gauge
from penstock.broker.partition.leader_replica import monotonic_ms

if TYPE_CHECKING:
    from penstock.broker.metrics.sources import MetricSources
    from penstock.broker.partition.partition import Partition

_REPLICA_LABELS: Final = ("topic", "partition", "replica")


class FollowerLag(NamedTuple):
    """The lag of a follower as its leader sees it."""

    labels: Labels
    lag_messages: int
    lag_seconds: float


class PartitionCounts(NamedTuple):
    """Counts of the partitions on this node, by role and by problem."""

    replicas: int = 0
    led: int = 0
    under_replicated: int = 0
    under_min_isr: int = 0
    offline: int = 0

    def plus_partition(self, partition: Partition) -> PartitionCounts:
        leads = partition.is_leader
        return PartitionCounts(
            self.replicas + 1,
            self.led + leads,
            self.under_replicated + (leads and partition.isr_size < len(partition.replicas)),
            self.under_min_isr + (leads and not partition.has_enough_replicas),
            self.offline + (not partition.is_leader and partition.leader_id < 0),
        )


def follower_lags(partition: Partition) -> list[FollowerLag]:
    if partition.leading is None:
        return []
    return [
        FollowerLag(
            (partition.topic, str(partition.index), str(lag.replica)),
            lag.records,
            lag.since_caught_up_ms / 1000,
        )
        for lag in partition.leading.rules.lags(monotonic_ms())
    ]


def replication_families(
    sources: MetricSources, counted: PartitionCounts, rows: list[FollowerLag]
) -> Iterator[MetricFamily]:
    yield gauge("penstock_replicas", "Partitions of which this node has a replica.", counted.replicas)
    yield gauge("penstock_partitions_led", "Partitions that this node leads.", counted.led)
    text = "Partitions led here that not all replicas are in sync with."
    yield gauge("penstock_partitions_under_replicated", text, counted.under_replicated)
    text = "Partitions led here with fewer replicas in sync than min.insync.replicas."
    yield gauge("penstock_partitions_under_min_isr", text, counted.under_min_isr)
    text = "Partitions without a leader that have a replica on this node."
    offline = counted.offline + len(
        sources.partitions.refused | sources.partitions.missing | sources.partitions.lost.keys
    )
    yield gauge("penstock_partitions_offline", text, offline)
    lags = [(row.labels, float(row.lag_messages)) for row in rows if row.lag_messages >= 0]
    text = "Messages that a follower of a partition led here does not have yet."
    yield MetricFamily("gauge", "penstock_replica_lag_messages", text, _REPLICA_LABELS, lags)
    text = "Time since a follower of a partition led here last had everything."
    seconds = [(row.labels, row.lag_seconds) for row in rows]
    yield MetricFamily("gauge", "penstock_replica_lag_seconds", text, _REPLICA_LABELS, seconds)
    metrics = sources.metrics
    yield counter(
        "penstock_isr_shrinks", "Followers that fell out of in-sync sets here.", metrics.isr_shrinks
    )
    yield counter("penstock_isr_expands", "Followers that joined in-sync sets here.", metrics.isr_expands)
    yield counter(
        "penstock_unclean_leaderships",
        "Partitions that this node came to lead by an unclean election.",
        metrics.unclean_leaderships,
    )
    yield counter(
        "penstock_replicas_lost", "Copies here that were found gone or damaged.", metrics.replicas_lost
    )
    yield from _fetcher_families(sources)
    yield from _controller_families(sources)


def _fetcher_families(sources: MetricSources) -> Iterator[MetricFamily]:
    fetchers = sources.fetchers()
    yield counter("penstock_replica_in_bytes", "Bytes fetched from leaders.", fetchers.bytes_fetched)
    text = "Bytes fetched for replicas that are being moved here."
    yield counter("penstock_replica_moved_bytes", text, fetchers.bytes_moved)
    text = "Times that a log here was cut back to what its leader has."
    yield counter("penstock_replica_truncations", text, fetchers.truncations)
    text = "Committed messages given up here because of unclean elections."
    yield counter("penstock_committed_messages_lost", text, fetchers.records_lost)
    lags = [
        ((lag.topic, str(lag.partition), str(lag.leader)), float(lag.records))
        for lag in fetchers.lags()
        if lag.records >= 0
    ]
    text = "Committed messages that a replica here does not have yet."
    yield MetricFamily(
        "gauge", "penstock_follower_lag_messages", text, ("topic", "partition", "leader"), lags
    )


def _controller_families(sources: MetricSources) -> Iterator[MetricFamily]:
    metrics, quorum = sources.metrics, sources.quorum
    text = "1 on the node that decides for the cluster."
    yield gauge("penstock_controller_active", text, sources.metadata.is_active)
    yield gauge("penstock_quorum_epoch", "The quorum's epoch as this node knows it.", quorum.epoch)
    text = "The quorum's leader as this node knows it; -1 while there is none."
    yield gauge("penstock_quorum_leader", text, quorum.leader_id)
    text = "The last metadata record that this node follows."
    yield gauge("penstock_metadata_applied_offset", text, sources.metadata.applied_offset)
    text = "Times that this node became the active controller."
    yield counter("penstock_controller_elections", text, metrics.controller_elections)
    text = "Brokers that this node, as controller, has given up because they were silent."
    yield counter("penstock_brokers_fenced", text, metrics.brokers_fenced)
    text = "Leaders that this node, as controller, has elected although they may lack records."
    yield counter("penstock_unclean_elections", text, metrics.unclean_elections)
