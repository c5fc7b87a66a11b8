"""Where metrics go: a topic and a table, each batch once in each, with how groups are at that moment added to it."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any, Final

from penstock.spark.analytics.groups import GroupState, group_states
from penstock.spark.decisions import MicroBatch
from penstock.spark.pipelines.settings import RunSettings

GROUP: Final = "group"
#: Columns of what is written, after those of windows.
_ADDED: Final = {"lag": "bigint", "latency_s": "double"}
_SAMPLE: Final = (
    "kind string, window_start timestamp, window_end timestamp, topic string, group string, "
    "lag bigint, latency_s double"
)


class MetricsSink:
    """`pipelines.declaration.BatchSink`."""

    def __init__(self, *, topic: str | None, table: str | None, topics: str, window_s: int) -> None:
        self.topic = topic
        self.table = table
        self.topics = topics
        self.window_s = window_s
        self._run: RunSettings | None = None
        self._delta: Any = None

    def describe(self) -> str:
        return " and ".join(each for each in (self.topic, self.table and f"Delta table {self.table}") if each)

    def prepare(self, spark: Any, run: RunSettings) -> None:
        """Raises ArchiveError, ClientError."""
        from penstock.spark.archive.sink import DeltaSink

        self._run = run
        if self.table is not None:
            self._delta = DeltaSink(self.table, partition_by="day")
            self._delta.prepare(spark, run)

    def write(self, rows: Any, batch: MicroBatch) -> None:
        """What a batch tells of groups may differ between topic and table, should it be done again in between."""
        assert self._run is not None, "prepare comes first"
        whole = self._with_groups(rows, self._run)
        if self.topic is not None:
            self._to_topic(whole, batch, self._run, self.topic)
        if self._delta is not None:
            from pyspark.sql import functions as F

            self._delta.write(whole.withColumn("day", F.to_date("window_start")), batch)

    def _with_groups(self, rows: Any, run: RunSettings) -> Any:
        from pyspark.sql import functions as F

        with run.cluster() as cluster:
            states = group_states(cluster, re.compile(self.topics), now_ms=int(time.time() * 1000))
        samples = rows.sparkSession.createDataFrame(self._samples(states, time.time()), _SAMPLE)
        whole = rows.withColumns({name: F.lit(None).cast(kind) for name, kind in _ADDED.items()})
        return whole.unionByName(samples, allowMissingColumns=True)

    def _samples(self, states: list[GroupState], now_s: float) -> list[tuple[Any, ...]]:
        """In the window of now."""
        start_s = int(now_s) // self.window_s * self.window_s
        start, end = (datetime.fromtimestamp(each, UTC) for each in (start_s, start_s + self.window_s))
        return [(GROUP, start, end, each.topic, each.group, each.lag, each.latency_s) for each in states]

    def _to_topic(self, rows: Any, batch: MicroBatch, run: RunSettings, topic: str) -> None:
        from pyspark.sql import functions as F

        from penstock.spark.pipelines.shaping import JSON_FORMAT

        value = F.to_json(F.struct(*[F.col(f"`{name}`") for name in rows.columns]), JSON_FORMAT)
        records = rows.select(F.col("topic").alias("key"), value.alias("value"))
        given = {
            **run.options(),
            "topic": topic,
            "contract": "exactly-once",
            "txnAppId": batch.query,
            "txnVersion": str(batch.number),
        }
        records.write.format("penstock").mode("append").options(**given).save()
