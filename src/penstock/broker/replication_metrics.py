"""Replication in numbers: lag of followers, in-sync sets, leaders, and what unclean elections have cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.leading import monotonic_ms

if TYPE_CHECKING:
    from penstock.broker.exposition import Family
    from penstock.broker.node import Node
    from penstock.broker.partition import Partition

Labels = tuple[str, ...]

_LABELS: Final = ("topic", "partition", "replica")


class FollowerRow(NamedTuple):
    """A follower as its leader sees it."""

    labels: Labels
    lag_messages: int
    lag_seconds: float


class Counted(NamedTuple):
    """Partitions on this node by what is the matter with them."""

    replicas: int = 0
    led: int = 0
    under_replicated: int = 0
    under_min_isr: int = 0
    offline: int = 0

    def and_also(self, partition: Partition) -> Counted:
        leads = partition.is_leader
        return Counted(
            self.replicas + 1,
            self.led + leads,
            self.under_replicated + (leads and partition.isr_size < len(partition.replicas)),
            self.under_min_isr + (leads and not partition.has_enough_replicas),
            self.offline + (not partition.is_leader and partition.leader_id < 0),
        )


def follower_rows(partition: Partition) -> list[FollowerRow]:
    if partition.leading is None:
        return []
    return [
        FollowerRow(
            (partition.topic, str(partition.index), str(lag.replica)),
            lag.records,
            lag.since_caught_up_ms / 1000,
        )
        for lag in partition.leading.rules.lags(monotonic_ms())
    ]


def replication_families(node: Node, counted: Counted, rows: list[FollowerRow]) -> Iterator[Family]:
    from penstock.broker.exposition import Family, counter, gauge

    yield gauge("penstock_replicas", "Partitions of which this node has a replica.", counted.replicas)
    yield gauge("penstock_partitions_led", "Partitions that this node leads.", counted.led)
    text = "Partitions led here that not all replicas are in sync with."
    yield gauge("penstock_partitions_under_replicated", text, counted.under_replicated)
    text = "Partitions led here with fewer replicas in sync than min.insync.replicas."
    yield gauge("penstock_partitions_under_min_isr", text, counted.under_min_isr)
    text = "Partitions with a replica here that nobody leads."
    offline = counted.offline + len(
        node.partitions.refused | node.partitions.missing | node.partitions.lost.keys
    )
    yield gauge("penstock_partitions_offline", text, offline)
    lags = [(row.labels, float(row.lag_messages)) for row in rows if row.lag_messages >= 0]
    text = "Messages that a follower of a partition led here does not have yet."
    yield Family("gauge", "penstock_replica_lag_messages", text, _LABELS, lags)
    text = "Time since a follower of a partition led here last had everything."
    seconds = [(row.labels, row.lag_seconds) for row in rows]
    yield Family("gauge", "penstock_replica_lag_seconds", text, _LABELS, seconds)
    metrics = node.metrics
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
    yield from _fetcher_families(node)
    yield from _controller_families(node)


def _controller_families(node: Node) -> Iterator[Family]:
    from penstock.broker.exposition import counter, gauge

    metrics, quorum = node.metrics, node.quorum
    text = "1 on the node that decides for the cluster."
    yield gauge("penstock_controller_active", text, node.metadata.is_active)
    yield gauge("penstock_quorum_epoch", "The quorum's epoch as this node knows it.", quorum.epoch)
    text = "The quorum's leader as this node knows it; -1 while there is none."
    yield gauge("penstock_quorum_leader", text, quorum.leader_id)
    text = "The last metadata record that this node follows."
    yield gauge("penstock_metadata_applied_offset", text, node.metadata.applied_offset)
    text = "Times that this node became the active controller."
    yield counter("penstock_controller_elections", text, metrics.controller_elections)
    text = "Brokers that this node, as controller, has given up because they were silent."
    yield counter("penstock_brokers_fenced", text, metrics.brokers_fenced)
    text = "Leaders that this node, as controller, has elected although they may lack records."
    yield counter("penstock_unclean_elections", text, metrics.unclean_elections)


def _fetcher_families(node: Node) -> Iterator[Family]:
    from penstock.broker.exposition import Family, counter

    fetchers = getattr(node, "fetchers", None)
    if fetchers is None:
        return  # it has not come so far yet
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
    yield Family("gauge", "penstock_follower_lag_messages", text, ("topic", "partition", "leader"), lags)
