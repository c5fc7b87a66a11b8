"""The checkpoint of a pipeline: a folder for each generation, with a log next to them.

It contains the id of the query, and the evaluated rows of a batch in case the batch is repeated. Functions import
pyspark themselves, because commands that start no query import this module.
"""

from __future__ import annotations

import json
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from penstock.client.errors import ClientError
from penstock.spark.exactly_once.decisions import MicroBatch
from penstock.spark.pipelines.status import PipelineStatus

_BATCH_COLUMN: Final = "_batch"
#: Saved evaluations alternate between this many folders.
_SLOTS: Final = 2
_SUCCESS_FILE: Final = "_SUCCESS"


def query_id(spark: Any, checkpoint: str) -> str:
    """Return the id of the query, the same in every run.

    Spark writes it to the checkpoint before the first batch, but does not pass it to `foreachBatch`.
    """
    (line,) = spark.read.text(f"{checkpoint}/metadata").collect()
    return str(json.loads(line[0])["id"])


def save_evaluation(evaluated: Any, folder: str, batch: MicroBatch) -> None:
    """Save the evaluated rows. Overwrites those of two batches ago, or of an earlier run of this batch."""
    from pyspark.sql import functions as f

    marked = evaluated.withColumn(_BATCH_COLUMN, f.lit(_batch_name(batch)))
    marked.write.mode("overwrite").parquet(_slot(folder, batch))


def find_evaluation(spark: Any, folder: str, batch: MicroBatch) -> Any | None:
    """Return the saved rows of this batch, or None if they were not saved completely."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as f

    slot = _slot(folder, batch)
    try:
        spark.read.format("binaryFile").load(f"{slot}/{_SUCCESS_FILE}").schema  # noqa: B018
        kept = spark.read.parquet(slot)
    except AnalysisException:
        return None
    ours = kept.where(f.col(_BATCH_COLUMN) == _batch_name(batch)).drop(_BATCH_COLUMN)
    return ours if ours.limit(1).count() else None


def _slot(folder: str, batch: MicroBatch) -> str:
    return f"{folder}/{batch.number % _SLOTS}"


def _batch_name(batch: MicroBatch) -> str:
    return f"{batch.query}/{batch.number}"


def release_local_checkpoint(held: Any) -> None:
    """Free the storage of a local checkpoint now. Spark itself frees it only when it collects garbage."""
    # A frame of Spark Connect has no plan here. Its server frees the storage when this object is collected.
    with suppress(Exception):
        held._jdf.queryExecution().logical().rdd().unpersist(False)


_URI: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


class CheckpointMoved(ClientError):
    """The pipeline already has a checkpoint in another folder."""


def is_uri(checkpoints: str) -> bool:
    return _URI.match(checkpoints) is not None


def checkpoint_path(checkpoints: str, name: str, generation: int) -> str:
    """Return the absolute path of the folder, or a URI that Spark can access."""
    if is_uri(checkpoints):
        return f"{checkpoints.rstrip('/')}/{name}/{generation}"
    return str(Path(checkpoints).resolve() / name / str(generation))


def log_path(checkpoints: str, name: str) -> Path:
    """Return the path of Spark's log, which is always on this machine."""
    folder = Path(tempfile.gettempdir()) if is_uri(checkpoints) else Path(checkpoints).resolve()
    return folder / name / "spark.log"


def refuse_moved_checkpoint(before: PipelineStatus | None, mine: PipelineStatus) -> None:
    """Raise CheckpointMoved if the pipeline would start over in another folder without a reset."""
    if before is None or before.checkpoint is None or mine.checkpoint is None:
        return
    is_same = before.generation == mine.generation and before.checkpoint != mine.checkpoint
    if is_same and before.batch is not None:
        raise CheckpointMoved(
            f"the checkpoint of {mine.name} is {before.checkpoint} on {before.host}; with {mine.checkpoint} it would "
            f"start over. Name the folder with --checkpoints, or start over with `penstock pipeline reset {mine.name}`"
        )
