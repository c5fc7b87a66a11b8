"""Reading: every row is hashed, from our source, from Spark's own connector, and from Parquet of the same rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.spark.contest import CONNECTOR, OURS, Contest, Round, Turn, WrongRows
from benchmarks.spark.drivers import Driver
from benchmarks.spark.rows import KEY_BYTES, fill
from benchmarks.spark.stage import PARTITIONS, Stage, rates
from penstock.protocol.compression import Codec

#: Our source with a schema of two columns, which is how a query says that it needs no others.
NARROW = "penstock-narrow"
PARQUET = "parquet"
_SCHEMA = "key BINARY, value BINARY"
#: What Parquet calls the codecs.
_PARQUET_CODECS = {Codec.NONE: "uncompressed", Codec.LZ4: "lz4_raw", Codec.ZSTD: "zstd"}
_SHOWN = ("rows_per_s", "cpu_s_per_million")


@contextmanager
def _prepared(value_bytes: int, codec: Codec, stage: Stage, driver: Driver) -> Iterator[list[Turn]]:
    rows = stage.pace.rows_read[value_bytes]
    with stage.topic() as topic:
        fill(stage.cluster, topic, rows, value_bytes, codec)
        asked = _queries(stage, topic)
        path = str(stage.fresh_folder())
        codec_name = _PARQUET_CODECS[codec]
        driver.ask("save_parquet", **asked[OURS], path=path, codec=codec_name)
        asked[PARQUET] = {"format": "parquet", "options": {"path": path}}
        for who, query in asked.items():
            _check_tasks(driver, who, query)
        yield [
            Turn(who, partial(_take, stage, driver, rows, value_bytes, query)) for who, query in asked.items()
        ]


def _queries(stage: Stage, topic: str) -> dict[str, dict[str, Any]]:
    options = {"kafka.bootstrap.servers": stage.bootstrap, "subscribe": topic}
    ours = {"format": "penstock", "options": options}
    queries = {OURS: ours, NARROW: {**ours, "schema": _SCHEMA}}
    return {**queries, CONNECTOR: {**ours, "format": "kafka"}} if stage.has_connector else queries


def _check_tasks(driver: Driver, who: str, query: dict[str, Any]) -> None:
    tasks = driver.ask("count_tasks", **query)["tasks"]
    if tasks != PARTITIONS:
        raise WrongRows(f"{who} reads with {tasks} tasks, where {PARTITIONS} are wanted")


def _take(stage: Stage, driver: Driver, rows: int, value_bytes: int, query: dict[str, Any]) -> Round:
    answer, spent = driver.watch(stage.broker, "read", **query)
    if answer["rows"] != rows:
        raise WrongRows(f"{query['format']} has read {answer['rows']} rows of {rows}")
    return Round(rates(rows, answer["seconds"], value_bytes + KEY_BYTES, spent), answer["hash"])


def _contest(value_bytes: int, codec: Codec, cores: int = 2) -> Contest:
    size = "1 KB" if value_bytes == 1024 else f"{value_bytes} B"
    name = f"read-{size.replace(' ', '')}-{codec.name.lower()}"
    return Contest(
        name=name if cores == 2 else f"{name}-{cores}-core",
        title=f"Read {size}, {codec.name.lower()}, {cores} core{'s' if cores > 1 else ''}",
        cores=cores,
        contenders=(OURS, NARROW, CONNECTOR, PARQUET),
        shown=_SHOWN,
        prepare=partial(_prepared, value_bytes, codec),
    )


CONTESTS = (
    *(_contest(size, codec) for size in (100, 1024) for codec in (Codec.NONE, Codec.LZ4, Codec.ZSTD)),
    _contest(100, Codec.NONE, cores=1),
)
