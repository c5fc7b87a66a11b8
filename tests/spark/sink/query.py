"""A driver in its own process: one run of a query on a checkpoint, with JSON arguments.

It may be killed at any time, with its JVM and all of its workers: they are one session of processes.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.spark.sink.ambushed import NAME, AmbushedDataSource

from penstock.spark.session import session

QUIET = {"spark.log.level": "OFF", "spark.sql.shuffle.partitions": "2"}


def slowly(twins: str) -> Callable[[Any], Any]:
    """Slow down the first attempt at the first task, so that Spark starts a speculative attempt."""

    def passed(batches: Any) -> Any:
        from pyspark import TaskContext

        context = TaskContext.get()
        if context.attemptNumber() > 0:
            with open(twins, "ab") as file:
                file.write(b".")
        for batch in batches:
            if context.partitionId() == 0 and context.attemptNumber() == 0:
                time.sleep(4)
            yield batch

    return passed


def run(given: dict[str, Any]) -> None:
    spark = session("ambushed", master=given["master"], settings={**QUIET, **given["settings"]})
    spark.dataSource.register(AmbushedDataSource)
    frame = spark.readStream.format(NAME).options(**given["source"]).load().select("key", "value")
    if given["twins"]:
        frame = frame.mapInArrow(slowly(given["twins"]), frame.schema)
    writer = frame.writeStream.format(NAME).options(**given["sink"])
    writer = writer.option("checkpointLocation", given["checkpoint"]).trigger(availableNow=True)
    writer.start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
