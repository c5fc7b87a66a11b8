"""The metrics of overflow policies and shedding, and of what groups have lost to drop-oldest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.broker.metrics.counters import MetricFamily

if TYPE_CHECKING:
    from penstock.broker.metrics.counters import Metrics
    from penstock.broker.metrics.group_drops import GroupDrops
    from penstock.broker.partition.overflow import OverflowManager
    from penstock.cluster.image import ClusterImage


def overflow_families(
    overflow: OverflowManager, metrics: Metrics, image: ClusterImage, groups: GroupDrops
) -> Iterator[MetricFamily]:
    labels = ("topic", "policy", "reason")
    dropped: Counter[tuple[str, str, str]] = Counter()
    for (topic_id, _), counts in overflow.drops:
        topic = image.topics_by_id.get(topic_id)
        if topic is not None:
            for (by, reason), count in counts.items():
                dropped[topic.name, by.value, reason.value] += count
    yield MetricFamily(
        "counter",
        "penstock_topic_dropped_records",
        "Records that this node dropped while it led a partition, by what dropped them and why; kept across restarts. "
        "The sum over all nodes is what was dropped.",
        labels,
        list(dropped.items()),
    )
    yield MetricFamily(
        "counter",
        "penstock_topic_refused_records",
        "Records of batches that had to wait (block) or were rejected. A batch that is sent again counts again.",
        labels,
        [
            ((topic, policy, reason), count)
            for topic, traffic in list(metrics.topics.items())
            for (policy, reason), count in traffic.refused.items()
        ],
    )
    yield MetricFamily(
        "counter",
        "penstock_group_dropped_records",
        "Records that drop-oldest deleted before the group had committed them, for groups that this node coordinates. "
        "Sampled every two seconds: what a group skips within that time may be missing.",
        ("group", "topic"),
        list(groups.dropped.items()),
    )
