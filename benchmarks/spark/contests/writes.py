"""Writing to a topic: the same rows through our sink, both contracts, and through the connector's."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.spark.contest import CONNECTOR, OURS, Contest, Round, Turn, WrongRows
from benchmarks.spark.drivers import Driver
from benchmarks.spark.rows import KEY_BYTES, chunks, count_committed
from benchmarks.spark.stage import PARTITIONS, Stage, rates
from penstock.protocol.compression import Codec

EXACTLY_ONCE = "penstock-exactly-once"
#: The same job without a sink: what no sink can be faster than.
NOWHERE = "nowhere"
_SHOWN = ("rows_per_s", "cpu_s_per_million")


@contextmanager
def _prepared(value_bytes: int, codec: Codec, stage: Stage, driver: Driver) -> Iterator[list[Turn]]:
    rows = stage.pace.rows_written[value_bytes]
    path = _save(stage, rows, value_bytes)
    expected = driver.ask("read", format="parquet", options={"path": path})["hash"]
    sinks = _sinks(stage, codec)

    def take(who: str) -> Round:
        with stage.topic() as topic:
            options = {**sinks[who]["options"], **({"topic": topic} if who != NOWHERE else {})}
            sink = {"format": sinks[who]["format"], "options": options}
            answer, spent = driver.watch(stage.broker, "write", path=path, **sink)
            metrics = rates(rows, answer["seconds"], value_bytes + KEY_BYTES, spent)
            return Round(metrics, expected if who == NOWHERE else _verified(stage, driver, topic, rows))

    yield [Turn(who, partial(take, who)) for who in sinks]


def _save(stage: Stage, rows: int, value_bytes: int) -> str:
    """A table of files with the rows, one file for each task."""
    folder = stage.fresh_folder()
    folder.mkdir()
    held = list(chunks(rows, value_bytes))
    table = pa.Table.from_batches(held)
    for part in range(PARTITIONS):
        first, end = (rows * each // PARTITIONS for each in (part, part + 1))
        path = folder / f"{part}.parquet"
        pq.write_table(table.slice(first, end - first), path, compression="none", use_dictionary=False)
    return str(folder)


def _sinks(stage: Stage, codec: Codec) -> dict[str, dict[str, Any]]:
    options = {"kafka.bootstrap.servers": stage.bootstrap, "kafka.compression.type": codec.name.lower()}
    ours = {"format": "penstock", "options": options}
    once = {"format": "penstock", "options": {**options, "contract": "exactly-once"}}
    sinks = {OURS: ours, EXACTLY_ONCE: once}
    if stage.has_connector:
        sinks[CONNECTOR] = {"format": "kafka", "options": options}
    return {**sinks, NOWHERE: {"format": "noop", "options": {}}}


def _verified(stage: Stage, driver: Driver, topic: str, rows: int) -> object:
    """The hash of what is there now, read by a reader of committed records."""
    count = count_committed(stage.cluster, topic)
    if count != rows:
        raise WrongRows(f"{topic} holds {count} committed records, and {rows} were written")
    options = {
        "kafka.bootstrap.servers": stage.bootstrap,
        "kafka.isolation.level": "read_committed",
        "subscribe": topic,
    }
    return driver.ask("read", format="penstock", options=options)["hash"]


def _contest(value_bytes: int, codec: Codec) -> Contest:
    size = "1 KB" if value_bytes == 1024 else f"{value_bytes} B"
    return Contest(
        name=f"write-{size.replace(' ', '')}-{codec.name.lower()}",
        title=f"Write {size}, {codec.name.lower()}, 2 cores",
        cores=2,
        contenders=(OURS, EXACTLY_ONCE, CONNECTOR, NOWHERE),
        shown=_SHOWN,
        prepare=partial(_prepared, value_bytes, codec),
    )


CONTESTS = (_contest(100, Codec.NONE), _contest(100, Codec.ZSTD), _contest(1024, Codec.NONE))
