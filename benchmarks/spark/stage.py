"""What contests are held on: a broker, a folder, and how long everything takes."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.brokers.broker import HOST, Broker
from benchmarks.measure import Metrics
from benchmarks.spark.drivers import Spent
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.settings import ConnectionSettings
from penstock.client.wire.topics import NewTopic, create_topics, delete_topics


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How much is read and written, and how often."""

    #: By the size of values.
    rows_read: dict[int, int]
    rows_written: dict[int, int]
    warm_ups: int
    rounds: int
    batches: int
    batch_rows: int = 1_000
    #: The first batches of a query are those of a cold start.
    batches_left_out: int = 3


FULL = Pace(
    rows_read={100: 6_000_000, 1024: 1_000_000},
    rows_written={100: 2_000_000, 1024: 400_000},
    warm_ups=2,
    rounds=5,
    batches=30,
)
SMOKE = Pace(
    rows_read={100: 40_000, 1024: 4_000},
    rows_written={100: 20_000, 1024: 4_000},
    warm_ups=0,
    rounds=1,
    batches=3,
    batches_left_out=1,
)

#: Of every topic, and so the tasks of every query.
PARTITIONS = 4


@dataclass(slots=True, kw_only=True)
class Stage:
    broker: Broker
    cluster: Cluster
    folder: Path
    pace: Pace
    has_connector: bool
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def bootstrap(self) -> str:
        return bootstrap_of(self.broker)

    @contextmanager
    def topic(self) -> Iterator[str]:
        """A new one, which is gone afterwards."""
        name = f"spark-bench-{next(self._numbers):04}"
        settings = self.broker.topic_configs(fsync=False)
        create_topics(
            self.cluster, [NewTopic(name=name, partitions=PARTITIONS, replicas=1, settings=settings)]
        )
        try:
            yield name
        finally:
            delete_topics(self.cluster, [name])

    def fresh_folder(self) -> Path:
        return self.folder / f"files-{next(self._numbers):04}"


def bootstrap_of(broker: Broker) -> str:
    return f"{HOST}:{broker.port}"


def connect(broker: Broker) -> Cluster:
    """As soon as the broker listens."""
    broker.connect().__exit__()
    return Cluster(ConnectionSettings.parse({"bootstrap.servers": bootstrap_of(broker)}))


def rates(rows: int, seconds: float, row_bytes: int, spent: Spent) -> Metrics:
    """Rates go by the time of the query, costs by what all processes used meanwhile."""
    millions = rows / 1e6
    return {
        "rows_per_s": rows / seconds,
        "mb_per_s": rows * row_bytes / seconds / 1e6,
        "cpu_s_per_million": (spent.spark_s + spent.broker_s) / millions,
        "spark_cpu_s_per_million": spent.spark_s / millions,
        "broker_cpu_s_per_million": spent.broker_s / millions,
        "seconds": seconds,
        "other_cores": spent.other_cores,
    }
