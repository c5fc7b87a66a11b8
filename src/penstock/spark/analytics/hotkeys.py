"""Finds the hot keys of a topic: those with the most records in each partition.

`penstock.client.salting` spreads a hot key over several partitions; its documentation lists the costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.client.hotkeys import HOT_SHARE, display_key, salting_advice
from penstock.spark.pipelines.declaration import JobContext, PipelineError
from penstock.spark.replay.request import parse_time_ms


def heaviest_keys(
    spark: Any,
    topic: str,
    *,
    bootstrap: str,
    top: int = 10,
    since_ms: int | None = None,
    connection: Mapping[str, str] | None = None,
) -> Any:
    """Return a DataFrame with the keys that have the most records in each partition.

    Columns: partition, key, records, bytes (of keys and values), share (of the partition's records), bytes_share.
    """
    given = {"kafka.bootstrap.servers": bootstrap, "subscribe": topic}
    given |= {f"kafka.{name}": value for name, value in (connection or {}).items()}
    if since_ms is not None:
        given |= {"startingTimestamp": str(since_ms), "startingOffsetsByTimestampStrategy": "latest"}
    rows = spark.read.format("penstock").schema(_COLUMNS).options(**given).load()
    return ranked(rows, top)


#: The source decodes only the columns in the schema, so these are the ones that `ranked` needs.
_COLUMNS: Final = "key binary, value binary, partition int"


def ranked(rows: Any, top: int) -> Any:
    # A command that lists pipelines imports this module, and needs no pyspark.
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    size = F.coalesce(F.length("key"), F.lit(0)) + F.coalesce(F.length("value"), F.lit(0))
    by_key = rows.groupBy("partition", "key").agg(
        F.count(F.lit(1)).alias("records"), F.sum(size.cast("bigint")).alias("bytes")
    )
    whole = Window.partitionBy("partition")
    # Records without a key count towards the partition's total, but rank last: the partitioner can place them anywhere.
    order = whole.orderBy(F.col("key").isNull(), F.desc("records"), F.desc("bytes"), "key")
    return (
        by_key.withColumns(
            {
                "share": F.col("records") / F.sum("records").over(whole),
                "bytes_share": F.col("bytes") / F.greatest(F.sum("bytes").over(whole), F.lit(1)),
                "rank": F.row_number().over(order),
            }
        )
        .where((F.col("rank") <= top) & F.col("key").isNotNull())
        .orderBy("partition", "rank")
        .drop("rank")
    )


def hotkeys(topic: str, top: str = "5", since: str = "") -> HotKeys:
    """Return a job that shows the `top` keys of each partition, of all records or of those `since` a time.

    Raises PipelineError, OptionError.
    """
    if not top.isdecimal() or int(top) < 1:
        raise PipelineError(f"top={top}: must be a whole number of at least 1")
    return HotKeys(topic=topic, top=int(top), since_ms=parse_time_ms("since", since))


@dataclass(frozen=True, slots=True, kw_only=True)
class HotKeys:
    """The hot keys job. Implements `pipelines.declaration.Job`."""

    topic: str
    top: int = 5
    since_ms: int | None = None

    @property
    def name(self) -> str:
        return f"hotkeys-{self.topic}"

    def describe(self) -> str:
        return f"the heaviest keys of {self.topic}"

    def run(self, context: JobContext) -> None:
        context.progress(0, 1)
        found = heaviest_keys(
            context.spark,
            self.topic,
            bootstrap=context.run.bootstrap,
            top=self.top,
            since_ms=self.since_ms,
            connection=context.run.connection,
        )
        context.note(format_table(self.topic, found.collect()))
        context.progress(1, 1)


def format_table(topic: str, rows: list[Any]) -> str:
    """Return a text table of the keys, followed by advice on salting if any key is hot."""
    if not rows:
        return f"{topic} has no records with keys"
    lines = [("PARTITION", "KEY", "RECORDS", "BYTES", "SHARE")]
    lines += [
        (
            str(row["partition"]),
            display_key(bytes(row["key"])),
            str(row["records"]),
            str(row["bytes"]),
            f"{row['share']:.1%}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    advice = salting_advice(sum(row["share"] >= HOT_SHARE for row in rows))
    return "\n".join([*table, advice] if advice else table)
