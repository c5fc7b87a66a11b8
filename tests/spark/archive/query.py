"""A driver in its own process: one run of an archive's pipeline on a checkpoint, with JSON arguments.

It may be killed at any time, with its JVM and all of its workers: they are one session of processes.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.spark.sink.ambushed import kill_session

from penstock.spark.archive import archive, maintenance, sink
from penstock.spark.archive.delta_table import ArchiveTable
from penstock.spark.archive.sink import DeltaSink
from penstock.spark.pipelines.assembly import start
from penstock.spark.pipelines.declaration import RunSettings
from penstock.spark.session import session

QUIET = {"spark.log.level": "OFF", "spark.sql.shuffle.partitions": "2", "spark.driver.memory": "1g"}
#: Point -> the function there, and whether the process dies before or after it.
POINTS: dict[str, tuple[Any, str, str]] = {
    "before the files": (DeltaSink, "_write_files", "before"),
    "files written": (DeltaSink, "_write_files", "after"),
    "committed": (ArchiveTable, "append", "after"),
    "before the checkpoint": (DeltaSink, "write", "after"),
    "before joining": (maintenance, "compact_files", "before"),
    "files joined": (maintenance, "compact_files", "after"),
}


def ambushed(real: Callable[..., Any], when: str, number: int, sprung: str) -> Callable[..., Any]:
    """Wrap `real` so that the process dies at the n-th call."""
    calls = []

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if when == "before" and len(calls) == number:
            die(sprung)
        result = real(*args, **kwargs)
        if when == "after" and len(calls) == number:
            die(sprung)
        return result

    return dying


def die(sprung: str) -> None:
    Path(sprung).touch()
    kill_session(os.getsid(0))


def lay(given: dict[str, Any]) -> None:
    if given["point"] is not None:
        owner, name, when = POINTS[given["point"]]
        dying = ambushed(getattr(owner, name), when, given["number"], given["sprung"])
        mock.patch.object(owner, name, dying).start()


def run(given: dict[str, Any]) -> None:
    spark = session("archive", master="local[2,4]", settings=QUIET)
    # Compact after every batch. A real sink waits for more files.
    mock.patch.object(sink, "_COMPACTION_EVERY_MS", 0).start()
    mock.patch.object(maintenance, "_FAN_IN", 2).start()
    declared = archive(given["topic"], given["table"], name="archive", compact_mb=1)
    options = {"maxOffsetsPerTrigger": "60", "minPartitions": str(given["tasks"])}
    declared = replace(declared, source=replace(declared.source, options=options))
    lay(given)
    settings = RunSettings(
        bootstrap=given["bootstrap"],
        checkpoint=given["checkpoint"],
        connection={"topic.metadata.propagation.max.ms": "300"},
        once=True,
    )
    for query in start(spark, declared, settings):
        query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
