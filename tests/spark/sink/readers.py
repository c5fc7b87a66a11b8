"""What those see who read only what is committed, and whether anything keeps them waiting."""

from tests.spark.source.topics import Topics
from tests.waiting import eventually

from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import IsolationLevel, TopicPartition
from penstock.client.wire.offsets import EARLIEST, LATEST, list_offsets
from penstock.spark.offsets import OffsetRange
from penstock.spark.source.options import SourceOptions
from penstock.spark.source.task import RangeReader


def is_at_rest(cluster: Cluster, places: list[TopicPartition]) -> bool:
    """The last stable offsets are the ends of the logs."""
    wanted = dict.fromkeys(places, LATEST)
    ends = [list_offsets(cluster, wanted, isolation=each) for each in IsolationLevel]
    return all(ends[0][place].offset == ends[1][place].offset for place in places)


def await_rest(cluster: Cluster, places: list[TopicPartition], within_s: float = 120) -> None:
    """Markers are written a moment after a transaction has ended."""
    eventually(lambda: is_at_rest(cluster, places), within_s=within_s, what="the end of all transactions")


def committed_numbers(topics: Topics, cluster: Cluster, places: list[TopicPartition]) -> list[int]:
    """All of them, with those that are there twice, sorted."""
    return sorted(number for place in places for number in _numbers(topics, cluster, place))


def _numbers(topics: Topics, cluster: Cluster, place: TopicPartition) -> list[int]:
    topic, partition = place
    given = topics.given(subscribe=topic, **{"kafka.isolation.level": "read_committed"})
    options = SourceOptions.parse(given, streaming=False)
    start, end = (list_offsets(cluster, {place: edge})[place].offset for edge in (EARLIEST, LATEST))
    wanted = OffsetRange(topic, None, partition, start, end)
    batches = RangeReader(cluster, wanted, options).read(["value"])
    return [int(value.as_py()) for batch in batches for value in batch.column(0)]
