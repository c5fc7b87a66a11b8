"""Where a piece of a replay goes: one write of the sink that is done once, however often it is repeated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.spark.decisions import MicroBatch
from penstock.spark.replay.request import ReplayError, Request, Times

_FORMAT: Final = "penstock"


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


def write_once(rows: Any, batch: MicroBatch, options: Mapping[str, str], request: Request) -> None:
    """Nothing where that batch is written already. Raises what Spark raises."""
    given = {
        **options,
        "contract": "exactly-once",
        "txnAppId": batch.query,
        "txnVersion": str(batch.number),
    }
    if request.times is Times.KEEP or request.is_to_group:
        given["timestampColumn"] = "timestamp"
    rows.write.format(_FORMAT).mode("append").options(**given).save()


def to_topic(rows: Any, request: Request) -> Any:
    """Records as they are, to the partition of their key."""
    from pyspark.sql import functions as F

    return rows.select(F.lit(request.to).alias("topic"), "key", "value", "headers", "timestamp")
