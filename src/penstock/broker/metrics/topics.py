"""The metrics of topics and of the logs of their partitions on one node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.metrics.counters import Labels, MetricFamily, gauge, histogram_snapshot

if TYPE_CHECKING:
    from penstock.broker.metrics.sources import MetricSources
    from penstock.broker.partition.partition import Partition

#: Attribute of TopicMetrics, metric name, help text.
_TOPIC_METRICS: Final = (
    ("bytes_in", "penstock_topic_in_bytes", "Bytes appended, as they are stored."),
    ("bytes_out", "penstock_topic_out_bytes", "Bytes read by clients, as they are stored."),
    ("messages_in", "penstock_topic_in_messages", "Messages appended."),
    ("messages_out", "penstock_topic_out_messages", "Messages read by clients, by the offsets they span."),
    ("fetches", "penstock_topic_reads", "Reads by clients that returned something."),
    ("replica_bytes_out", "penstock_topic_replica_out_bytes", "Bytes read by followers."),
)


def topic_families(sources: MetricSources) -> Iterator[MetricFamily]:
    topics = list(sources.metrics.topics.items())
    for attribute, name, text in _TOPIC_METRICS:
        samples = [((topic,), getattr(traffic, attribute)) for topic, traffic in topics]
        yield MetricFamily("counter", name, text, ("topic",), samples)
    text = "Time from an acks=all append to its acknowledgement: the longest of those acknowledged together."
    acks = [((topic,), histogram_snapshot(traffic.acks)) for topic, traffic in topics]
    yield MetricFamily("histogram", "penstock_topic_ack_seconds", text, ("topic",), acks)


class PartitionRow(NamedTuple):
    labels: Labels
    start_offset: int
    end_offset: int
    high_watermark: int
    last_stable_offset: int
    size_bytes: int
    segments: int


#: Attribute of PartitionRow, metric name, help text.
_PARTITION_METRICS: Final = (
    ("start_offset", "penstock_partition_start_offset", "First offset that can be read."),
    ("end_offset", "penstock_partition_end_offset", "Offset that the next message gets."),
    ("high_watermark", "penstock_partition_high_watermark_offset", "Offset up to which clients may read."),
    (
        "last_stable_offset",
        "penstock_partition_last_stable_offset",
        "The last stable offset: read_committed consumers read up to it. A transaction that hangs holds it back.",
    ),
    ("size_bytes", "penstock_partition_size_bytes", "Size of the log files."),
    ("segments", "penstock_partition_segments", "Number of log files."),
)


def partition_row(partition: Partition) -> PartitionRow:
    log = partition.log
    return PartitionRow(
        (partition.topic, str(partition.index)),
        log.start_offset,
        log.end_offset,
        partition.high_watermark,
        partition.last_stable_offset,
        log.size_bytes,
        len(log.segments),
    )


def partition_families(rows: list[PartitionRow]) -> Iterator[MetricFamily]:
    for attribute, name, text in _PARTITION_METRICS:
        samples = [(row.labels, getattr(row, attribute)) for row in rows]
        yield MetricFamily("gauge", name, text, ("topic", "partition"), samples)


class DamageCounts:
    """Counts the partitions and offsets that cannot be served because their stored bytes are damaged."""

    def __init__(self) -> None:
        self._partitions = self._offsets = 0

    def add(self, partition: Partition) -> None:
        damages = partition.log.damages
        if damages:
            self._partitions += 1
            self._offsets += sum(item.end_offset - item.start_offset for item in damages)

    def families(self, sources: MetricSources) -> Iterator[MetricFamily]:
        text = "Partitions that cannot be opened, or whose folder is gone."
        not_open = len(sources.store.failed) + len(sources.partitions.missing)
        yield gauge("penstock_partitions_failed", text, not_open)
        text = "Partitions with damaged records that are refused to readers."
        yield gauge("penstock_partitions_damaged", text, self._partitions)
        yield gauge("penstock_damaged_offsets", "Offsets refused because of damage.", self._offsets)
