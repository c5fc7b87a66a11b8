"""Archiving: a topic to a Delta table, beside the connector's stream to plain Parquet files by day."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.spark.contest import CONNECTOR, OURS, Contest, Round, Turn, WrongRows
from benchmarks.spark.drivers import Driver
from benchmarks.spark.rows import KEY_BYTES, fill
from benchmarks.spark.stage import Stage, rates
from penstock.protocol.compression import Codec

_SHOWN = ("rows_per_s", "cpu_s_per_million")

#: The operation and what it is to be told, for a folder of its own.
Job = Callable[[str], tuple[str, dict[str, Any]]]


@contextmanager
def _prepared(value_bytes: int, stage: Stage, driver: Driver) -> Iterator[list[Turn]]:
    rows = stage.pace.rows_written[value_bytes]
    with stage.topic() as topic:
        fill(stage.cluster, topic, rows, value_bytes, Codec.NONE)
        jobs = _jobs(stage, topic)
        yield [Turn(who, partial(_take, stage, driver, rows, value_bytes, job)) for who, job in jobs.items()]


def _jobs(stage: Stage, topic: str) -> dict[str, Job]:
    options = {
        "kafka.bootstrap.servers": stage.bootstrap,
        "subscribe": topic,
        "startingOffsets": "earliest",
    }

    def ours(folder: str) -> tuple[str, dict[str, Any]]:
        # Every round is another pipeline, so that none goes on where the last one ended.
        name = f"archive-{folder.rpartition('-')[2]}"
        return "archive", {"bootstrap": stage.bootstrap, "topic": topic, "name": name}

    def theirs(_folder: str) -> tuple[str, dict[str, Any]]:
        return "archive_files", {"source": "kafka", "options": options}

    return {OURS: ours, CONNECTOR: theirs} if stage.has_connector else {OURS: ours}


def _take(stage: Stage, driver: Driver, rows: int, value_bytes: int, job: Job) -> Round:
    folder = str(stage.fresh_folder())
    operation, arguments = job(folder)
    answer, spent = driver.watch(stage.broker, operation, **arguments, folder=folder)
    if answer["rows"] != rows:
        raise WrongRows(f"{operation} has kept {answer['rows']} rows of {rows}")
    return Round(rates(rows, answer["seconds"], value_bytes + KEY_BYTES, spent), answer["hash"])


def _contest(value_bytes: int) -> Contest:
    size = "1 KB" if value_bytes == 1024 else f"{value_bytes} B"
    return Contest(
        name=f"archive-{size.replace(' ', '')}",
        title=f"Archive {size}, 2 cores",
        cores=2,
        contenders=(OURS, CONNECTOR),
        shown=_SHOWN,
        prepare=partial(_prepared, value_bytes),
    )


CONTESTS = (_contest(100), _contest(1024))
