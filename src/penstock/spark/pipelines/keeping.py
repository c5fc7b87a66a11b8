"""What is in a checkpoint: the query's id, and an evaluated batch for the case that the batch is done again."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, Final

from penstock.spark.decisions import MicroBatch

_BATCH: Final = "_batch"
#: Places that are used in turn.
_SLOTS: Final = 2
_DONE: Final = "_SUCCESS"


def query_id(spark: Any, checkpoint: str) -> str:
    """The same in every run. Spark writes it down before the first batch, and tells `foreachBatch` nothing of it."""
    (line,) = spark.read.text(f"{checkpoint}/metadata").collect()
    return str(json.loads(line[0])["id"])


def keep(evaluated: Any, folder: str, batch: MicroBatch) -> None:
    """What was kept there is of the batch before the last, or of this one as it was before."""
    from pyspark.sql import functions as f

    marked = evaluated.withColumn(_BATCH, f.lit(_name(batch)))
    marked.write.mode("overwrite").parquet(_slot(folder, batch))


def find(spark: Any, folder: str, batch: MicroBatch) -> Any | None:
    """None unless this very batch was kept, all of it."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as f

    slot = _slot(folder, batch)
    try:
        spark.read.format("binaryFile").load(f"{slot}/{_DONE}").schema  # noqa: B018
        kept = spark.read.parquet(slot)
    except AnalysisException:
        return None
    ours = kept.where(f.col(_BATCH) == _name(batch)).drop(_BATCH)
    return ours if ours.limit(1).count() else None


def _slot(folder: str, batch: MicroBatch) -> str:
    return f"{folder}/{batch.number % _SLOTS}"


def _name(batch: MicroBatch) -> str:
    return f"{batch.query}/{batch.number}"


def release(held: Any) -> None:
    """Give back what a local checkpoint holds, which Spark itself does only when it collects garbage."""
    # A frame of Spark Connect has no plan here; its server forgets it when this object is gone.
    with suppress(Exception):
        held._jdf.queryExecution().logical().rdd().unpersist(False)
