"""Counting the rows of a batch while it is written, without running anything twice."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final

from penstock.client.cluster import Cluster
from penstock.client.errors import ClientError
from penstock.spark.decisions import MicroBatch
from penstock.spark.pipelines.evaluation import DEAD, DROPPED, FATE, FOREIGN, GOOD, RETRIED

if TYPE_CHECKING:
    from penstock.spark.pipelines.status import Counts

_LOG: Final = logging.getLogger("penstock.spark")
#: Spark tells what it has observed a moment after the job; where there was no job, it never does.
_WAIT_S: Final = 5.0
_FATES: Final = {"good": GOOD, "retried": RETRIED, "dead": DEAD, "dropped": DROPPED, "foreign": FOREIGN}


class Tally:
    """Counts what goes through a frame when it is run."""

    def __init__(self, frame: Any, **conditions: Any) -> None:
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        self._observation = Observation()
        counted = [f.count_if(condition).alias(name) for name, condition in conditions.items()]
        self.frame = frame.observe(self._observation, *counted)

    @classmethod
    def of_fates(cls, evaluated: Any) -> Tally:
        from pyspark.sql import functions as f

        return cls(evaluated, **{name: f.col(FATE) == fate for name, fate in _FATES.items()})

    @classmethod
    def of_rows(cls, rows: Any) -> Tally:
        from pyspark.sql import functions as f

        return cls(rows, rows=f.lit(True))

    def found(self) -> dict[str, int]:
        """After it was run; empty where it was not."""
        told: dict[str, int] = {}

        def wait() -> None:
            told.update({name: int(number or 0) for name, number in self._observation.get.items()})

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(_WAIT_S)
        return dict(told)


def fates_in(held: Any) -> dict[str, int]:
    """Counted by asking: where letters depend on it, what Spark happens to tell is not enough."""
    rows = held.groupBy(FATE).count().collect()
    numbers = {int(row[FATE]): int(row["count"]) for row in rows}
    return {name: numbers.get(fate, 0) for name, fate in _FATES.items()}


def counts_of(fates: dict[str, int], rows_out: int) -> Counts:
    from penstock.spark.pipelines.status import Counts

    return Counts(
        rows_in=sum(number for name, number in fates.items() if name != "foreign"),
        rows_out=rows_out,
        retried=fates.get("retried", 0),
        dead=fates.get("dead", 0),
    )


def tell(cluster: Cluster, name: str, batch: MicroBatch, counts: Counts) -> None:
    """On the board. A batch does not fail because nobody can be told of it."""
    from penstock.spark.pipelines.status import add_counts

    try:
        add_counts(cluster, name, batch, counts)
    except ClientError as trouble:
        _LOG.warning("%s: what it counted is not on the board: %s", batch, trouble)
