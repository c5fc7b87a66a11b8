"""Where a piece of a replay goes: one write of the sink that is done once, however often it is repeated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.spark.decisions import MicroBatch
from penstock.spark.replay.request import ReplayError, Request, Times

#: What is written of a row; the time only where it is kept.
COLUMNS = ("topic", "partition", "key", "value", "headers", "timestamp")


def filtered(rows: Any, where: str | None) -> Any:
    """Raises ReplayError where the condition is none."""
    from pyspark.errors import AnalysisException, ParseException

    if where is None:
        return rows
    try:
        kept = rows.where(where)
        # Where Spark runs elsewhere it looks at the condition only when it has to tell something of it.
        _ = kept.schema
    except (AnalysisException, ParseException) as flaw:
        raise ReplayError(f"where={where}: {_first_line(flaw)}") from None
    return kept


def _first_line(flaw: Exception) -> str:
    return str(flaw).strip().splitlines()[0]


def write_once(
    rows: Any, records: Any, batch: MicroBatch, options: Mapping[str, str], request: Request
) -> int:
    """Write `rows`; returns how many of `records`, which they are made from, were read for that.

    Raises what Spark raises.
    """
    given = {
        **options,
        "contract": "exactly-once",
        "txnAppId": batch.query,
        "txnVersion": str(batch.number),
    }
    if request.times is Times.KEEP:
        given["timestampColumn"] = "timestamp"
    rows.write.format("penstock").mode("append").options(**given).save()
    return int(records.get["records"])


def observed(rows: Any) -> tuple[Any, Any]:
    """The rows, and what counts them on their way."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    counting = Observation()
    return rows.observe(counting, F.count(F.lit(1)).alias("records")), counting


def to_topic(rows: Any, request: Request) -> Any:
    """Records of a topic as they are, to the partition of their key."""
    from pyspark.sql import functions as F

    return rows.select(F.lit(request.to).alias("topic"), "key", "value", "headers", "timestamp")
