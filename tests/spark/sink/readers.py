"""What read_committed consumers see, and whether they have to wait."""

from tests.spark.source.topics import Topics
from tests.waiting import eventually

from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import IsolationLevel, TopicPartition
from penstock.client.wire.offsets import EARLIEST, LATEST, list_offsets
from penstock.spark.offsets import OffsetRange
from penstock.spark.source.options import SourceOptions
from penstock.spark.source.task import RangeReader


def is_at_rest(cluster: Cluster, partitions: list[TopicPartition]) -> bool:
    """Wait until the last stable offsets are the ends of the logs."""
    wanted = dict.fromkeys(partitions, LATEST)
    ends = [list_offsets(cluster, wanted, isolation=each) for each in IsolationLevel]
    return all(ends[0][tp].offset == ends[1][tp].offset for tp in partitions)


def await_rest(cluster: Cluster, partitions: list[TopicPartition], within_s: float = 120) -> None:
    """Retry, because markers are written shortly after a transaction has ended."""
    eventually(lambda: is_at_rest(cluster, partitions), within_s=within_s, what="the end of all transactions")


def committed_numbers(topics: Topics, cluster: Cluster, partitions: list[TopicPartition]) -> list[int]:
    """Return all committed numbers, sorted, including duplicates."""
    return sorted(number for tp in partitions for number in _numbers(topics, cluster, tp))


def _numbers(topics: Topics, cluster: Cluster, tp: TopicPartition) -> list[int]:
    topic, partition = tp
    given = topics.given(subscribe=topic, **{"kafka.isolation.level": "read_committed"})
    options = SourceOptions.parse(given, streaming=False)
    start, end = (list_offsets(cluster, {tp: edge})[tp].offset for edge in (EARLIEST, LATEST))
    wanted = OffsetRange(topic, None, partition, start, end)
    batches = RangeReader(cluster, wanted, options).read(["value"])
    return [int(value.as_py()) for batch in batches for value in batch.column(0)]
