"""Runs replays in tests, and collects their notes, their progress and the records in topics."""

from typing import Any

from tests.spark.sink.readers import await_rest
from tests.spark.source.topics import Topics

from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicPartition
from penstock.client.wire.offsets import EARLIEST, LATEST, list_offsets
from penstock.spark.offsets import OffsetRange
from penstock.spark.pipelines.declaration import JobContext, RunSettings
from penstock.spark.replay import Replay, parse_request
from penstock.spark.source.options import SourceOptions
from penstock.spark.source.task import RangeReader

COMMITTED = {"kafka.isolation.level": "read_committed", "includeHeaders": "true"}
COLUMNS = ("topic", "partition", "offset", "key", "value", "headers", "timestamp")


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Replays:
    def __init__(self, spark: Any, topics: Topics) -> None:
        self.spark = spark
        self.topics = topics
        self.clock = Clock()
        self.notes: list[str] = []
        #: The progress of replays, with the time.
        self.progress: list[tuple[int, int | None]] = []
        self.progress_times_s: list[float] = []
        #: Stop after this many offsets.
        self.stops_at: int | None = None

    def run(self, **settings: str) -> str:
        """Run a replay, and return its notes."""
        self.notes, self.progress, self.progress_times_s = [], [], []
        request = parse_request(**settings)
        Replay(request=request, clock=self.clock, sleep=self.clock.sleep).run(self.context())
        return "; ".join(self.notes)

    def context(self) -> JobContext:
        return JobContext(
            spark=self.spark,
            run=RunSettings(
                bootstrap=self.topics.bootstrap,
                checkpoint="unused",
                connection={"topic.metadata.propagation.max.ms": "300"},
            ),
            progress=self._note_progress,
            should_stop=self._should_stop,
            note=self.notes.append,
        )

    def _note_progress(self, done: int, total: int | None) -> None:
        self.progress.append((done, total))
        self.progress_times_s.append(self.clock.now_s)

    def _should_stop(self) -> bool:
        return self.stops_at is not None and bool(self.progress) and self.progress[-1][0] >= self.stops_at

    # Committed records

    def rows(self, topic: str) -> list[dict[str, Any]]:
        with self.topics.cluster() as cluster:
            partitions = [(topic, part.index) for part in cluster.await_topic(topic).partitions]
            await_rest(cluster, partitions)
            return [row for tp in partitions for row in self._of(cluster, tp)]

    def numbers(self, topic: str) -> list[int]:
        return sorted(int(row["value"]) for row in self.rows(topic))

    def _of(self, cluster: Cluster, tp: TopicPartition) -> list[dict[str, Any]]:
        options = SourceOptions.parse(self.topics.given(subscribe=tp[0], **COMMITTED), streaming=False)
        start, end = (list_offsets(cluster, {tp: edge})[tp] for edge in (EARLIEST, LATEST))
        assert start is not None
        assert end is not None
        wanted = OffsetRange(tp[0], None, tp[1], start.offset, end.offset)
        batches = RangeReader(cluster, wanted, options).read(COLUMNS)
        return [row for batch in batches for row in batch.to_pylist()]
