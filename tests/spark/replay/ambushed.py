"""Replays that die: a driver in its own process, or the process of the sink that reaches a point.

python -m tests.spark.replay.ambushed '{"bootstrap": ..., "settings": {...}, "ambush": {...}}'
"""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from pyspark.sql.datasource import DataSourceArrowWriter
from tests.spark.replay.replays import Replays
from tests.spark.sink.ambushed import WRITER_POINTS, Ambush, AmbushedDataSource
from tests.spark.source.topics import Topics

from penstock.spark.replay import runs
from penstock.spark.session import session

NAME = "penstock_ambushed_replay"
QUIET = {"spark.log.level": "OFF", "spark.sql.shuffle.partitions": "2", "spark.driver.memory": "1g"}


class AmbushedWriter(DataSourceArrowWriter):
    def __init__(self, ambush: Ambush, real: Any) -> None:
        self.ambush, self.real = ambush, real

    def write(self, iterator: Any) -> Any:
        with self.ambush.laid(WRITER_POINTS):
            return self.real.write(iterator)

    def commit(self, messages: Any) -> None:
        with self.ambush.laid(WRITER_POINTS):
            self.real.commit(messages)

    def abort(self, messages: Any) -> None:
        self.real.abort(messages)


class AmbushedReplaySource(AmbushedDataSource):
    @classmethod
    def name(cls) -> str:
        return NAME

    def writer(self, schema: Any, overwrite: bool) -> AmbushedWriter:
        return AmbushedWriter(Ambush(self.options), self._real().writer(schema, overwrite))


@contextmanager
def ambushed(spark: Any, options: Mapping[str, str]) -> Iterator[None]:
    """Make the replays of this process write with that ambush."""
    spark.dataSource.register(AmbushedReplaySource)
    real = runs.write_once

    def write_once(rows: Any, batch: Any, given: Mapping[str, str], request: Any) -> None:
        real(rows, batch, {**given, **options}, request)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(runs, "_FORMAT", NAME))
        stack.enter_context(mock.patch.object(runs, "write_once", write_once))
        yield


def main(given: dict[str, Any]) -> None:
    spark = session("ambushed", master="local[2,4]", settings=QUIET)
    replays = Replays(spark, Topics(given["bootstrap"]))
    with ambushed(spark, given["ambush"]):
        print(replays.run(**given["settings"]), replays.progress, flush=True)
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
