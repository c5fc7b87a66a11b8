"""What flows through topics, in windows of time: rates and sizes, retries and dead letters, lag and latency of groups.

Rows, as JSON in a topic and as a Delta table, are of three kinds:
    traffic   of a topic in a window: records, bytes, records_per_s, size_mean, size_max
    failures  of a group in a window: how many records of the topic it sent to its retries and dead letters
    group     of a group at the end of a batch: lag, and latency_s, the age of the oldest record that it has not read

Windows go by the timestamps of records, which are cut off at the present: retries carry the time when they are due.
"""

from __future__ import annotations

import re
from typing import Any, Final

from penstock.protocol.letters import GROUP
from penstock.spark.analytics.metrics_sink import MetricsSink
from penstock.spark.pipelines.declaration import Pipeline, PipelineError, Source, pipeline

TRAFFIC, FAILURES = "traffic", "failures"
_DURATION: Final = re.compile(r"(\d+) (second|minute|hour|day)s?")
_SECONDS: Final = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
_RETRY: Final = r"^(.+)\\.retry\\.[1-9][0-9]{0,2}$"
_DEAD: Final = r"^(.+)\\.dlq$"
_REPLAYED: Final = r"\\.dlq\\.replayed$"
#: What Penstock keeps for itself.
_OURS: Final = r"penstock-.*"


def metrics(
    topics: str = ".*",
    to: str = "",
    table: str = "",
    window: str = "10 seconds",
    late: str = "1 minute",
    starting: str = "latest",
    every: str = "10s",
    name: str = "metrics",
) -> Pipeline:
    """Of all topics whose whole name matches: to the topic `to`, to the Delta table `table`, or to both.

    A window is told of once, when `late` has passed after its end; records that come later still are not counted.
    Raises PipelineError.
    """
    if not to and not table:
        raise PipelineError("metrics go to a topic, a table or both: set to= or table=")
    window_s = _seconds("window", window)
    _seconds("late", late)
    pattern = rf"(?!{_OURS}|{re.escape(to)}$)(?:{topics})(?:\.retry\.[1-9][0-9]{{0,2}}|\.dlq)?"
    declare = pipeline(
        name,
        source=Source(pattern=pattern, starting=starting, letters=True),
        sink=MetricsSink(topic=to or None, table=table or None, topics=topics, window_s=window_s),
        delivery="exactly-once",
        every=every,
        stateful=True,
    )
    return declare(lambda rows: windows(rows, window, window_s, late))


def _seconds(name: str, text: str) -> int:
    match = _DURATION.fullmatch(text)
    if match is None or int(match[1]) < 1:
        raise PipelineError(f"{name}={text!r} must be a time such as 10 seconds")
    return int(match[1]) * _SECONDS[match[2]]


def windows(rows: Any, window: str, window_s: int, late: str) -> Any:
    """`traffic` and `failures`, in windows that are over."""
    from pyspark.sql import functions as F

    sorted_out = rows.select(
        F.least(F.col("timestamp"), F.current_timestamp()).alias("moment"),
        F.expr(_original()).alias("topic"),
        F.expr(_role()).alias("role"),
        F.expr(_group()).alias("group"),
        F.expr("coalesce(length(key), 0) + coalesce(length(value), 0)").cast("bigint").alias("size"),
    ).where("role is not null")
    is_traffic = F.col("role") == TRAFFIC
    size = F.when(is_traffic, F.col("size"))
    found = (
        sorted_out.withWatermark("moment", late)
        .groupBy(F.window("moment", window), "topic", "group")
        .agg(
            F.count_if(is_traffic).alias("records"),
            F.sum(size).alias("bytes"),
            F.avg(size).alias("size_mean"),
            F.max(size).alias("size_max"),
            F.count_if(F.col("role") == "retry").alias("retries"),
            F.count_if(F.col("role") == "dead").alias("dead"),
        )
    )
    return found.select(
        F.when(F.col("records") > 0, F.lit(TRAFFIC)).otherwise(F.lit(FAILURES)).alias("kind"),
        F.col("window.start").alias("window_start"),
        F.col("window.end").alias("window_end"),
        "topic",
        "group",
        "records",
        F.coalesce("bytes", F.lit(0)).alias("bytes"),
        (F.col("records") / F.lit(window_s)).alias("records_per_s"),
        "size_mean",
        "size_max",
        "retries",
        "dead",
    )


def _original() -> str:
    """The topic whose records, retries or dead letters these are."""
    return f"regexp_replace(regexp_replace(topic, '{_RETRY}', '$1'), '{_DEAD}', '$1')"


def _role() -> str:
    """null for what is about letters that were replayed."""
    return (
        f"case when topic rlike '{_REPLAYED}' then null when topic rlike '{_RETRY}' then 'retry' "
        f"when topic rlike '{_DEAD}' then 'dead' else '{TRAFFIC}' end"
    )


def _group() -> str:
    """Which group failed; records that are no letters have none, so that all of a topic are counted together."""
    told = f"try_element_at(filter(headers, h -> h.key = '{GROUP}'), -1).value"
    letter = f"topic rlike '{_RETRY}' or topic rlike '{_DEAD}'"
    return f"case when {letter} then coalesce(cast({told} as string), '') end"
