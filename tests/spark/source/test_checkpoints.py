"""Checkpoints on a local disk: which locations are local, and that queries continue with either file manager."""

from contextlib import nullcontext
from typing import Any

import pytest

from penstock.spark.session import (
    FILE_MANAGER_SETTING,
    FILE_MANAGER_WITHOUT_PROCESSES,
    is_local_path,
    local_checkpoints,
)


@pytest.mark.parametrize(
    ("location", "default_system", "answer"),
    [
        ("/data/checkpoints", "file:///", True),
        ("checkpoints", "file:///", True),
        ("file:///data/checkpoints", "hdfs://head:9000", True),
        ("/data/checkpoints", "hdfs://head:9000", False),
        ("hdfs://head/data", "file:///", False),
        ("s3a://bucket/data", "file:///", False),
    ],
)
def test_local_locations(location, default_system, answer):
    assert is_local_path(location, default_system) is answer


@pytest.fixture
def unset(spark):
    """A session as users have it, in which no file manager is set."""
    before = spark.conf.get(FILE_MANAGER_SETTING)
    spark.conf.unset(FILE_MANAGER_SETTING)
    yield
    spark.conf.set(FILE_MANAGER_SETTING, before)


class Counting:
    """A stateful query: for each run, its batches, the file manager of its checkpoint, and the last counts."""

    def __init__(self, spark: Any, checkpoint: str) -> None:
        self.spark, self.checkpoint = spark, checkpoint
        self.batches: list[int] = []
        self.managers: set[str | None] = set()
        self.rows = 0

    def run(self, context: Any) -> None:
        reading = self.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
        counted = reading.selectExpr("value % 5 as key").groupBy("key").count()
        writer = counted.writeStream.outputMode("complete").foreachBatch(self._see)
        with context:
            query = writer.option("checkpointLocation", self.checkpoint).trigger(availableNow=True).start()
        assert query.awaitTermination(60)

    def _see(self, frame: Any, number: int) -> None:
        self.batches.append(number)
        self.managers.add(frame.sparkSession.conf.get(FILE_MANAGER_SETTING, None))
        self.rows = sum(row["count"] for row in frame.collect())


@pytest.mark.usefixtures("unset")
def test_a_query_continues_from_a_checkpoint_of_either_file_manager(spark, tmp_path):
    query = Counting(spark, str(tmp_path))
    for context in (nullcontext(), local_checkpoints(spark, str(tmp_path)), nullcontext()):
        query.run(context)
    assert query.batches == [0, 1, 2]
    assert query.managers == {None, FILE_MANAGER_WITHOUT_PROCESSES}
    assert query.rows == 30
    assert spark.conf.get(FILE_MANAGER_SETTING, None) is None, "other queries of the session are not affected"


def test_the_setting_of_the_user_is_kept(spark, tmp_path):
    chosen = spark.conf.get(FILE_MANAGER_SETTING)
    with local_checkpoints(spark, str(tmp_path)):
        assert spark.conf.get(FILE_MANAGER_SETTING) == chosen
    assert spark.conf.get(FILE_MANAGER_SETTING) == chosen
