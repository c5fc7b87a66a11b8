"""At-most-once reads and writes with Spark: a failed task is not retried, and no other rows are lost."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from tests.spark.sink.ambushed import NAME, AmbushedDataSource
from tests.spark.sink.readers import committed_numbers
from tests.spark.source.topics import Topics

from penstock.spark.at_most_once.offset_claims import count_skipped

WITHIN_S = 600.0
CONTRACT = "at-most-once"
Frame = Any


class Copy:
    """A query from one topic to another that can be restarted on its checkpoint, with other tasks each time."""

    def __init__(self, spark: Any, topics: Topics, folder: Path, group: str, names: tuple[str, str]) -> None:
        self.spark, self.topics, self.group = spark, topics, group
        self.checkpoint = folder / "checkpoint"
        self.source, self.target = names
        self.runs = 0

    def frame(self, **options: str) -> Frame:
        self.runs += 1
        given = self.topics.given(
            subscribe=self.source,
            startingOffsets="earliest",
            contract=CONTRACT,
            minPartitions=str(1 + self.runs % 3),
            **{"kafka.group.id": self.group},
            **options,
        )
        return self.spark.readStream.format(NAME).options(**given).load().select("value")

    def run(self, frame: Frame, sink: dict[str, str] | None = None) -> None:
        """Run until everything is written, or the query fails."""
        given = self.topics.given(topic=self.target, contract=CONTRACT, **(sink or {}))
        self.finish(frame.writeStream.format(NAME).options(**given))

    def finish(self, writer: Any) -> None:
        started = writer.option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True).start()
        try:
            assert started.awaitTermination(WITHIN_S)
        finally:
            started.stop()

    def numbers(self) -> list[int]:
        with self.topics.cluster() as cluster:
            return committed_numbers(self.topics, cluster, [(self.target, 0), (self.target, 1)])

    def skipped(self) -> int:
        with self.topics.cluster() as cluster:
            return count_skipped(cluster, self.group)


@pytest.fixture
def copy(spark: Any, topics: Topics, unique: Any, group: str, tmp_path: Path) -> Copy:
    spark.dataSource.register(AmbushedDataSource)
    names = topics.create(unique("in"), 2), topics.create(unique("out"), 2)
    for partition in range(2):
        topics.count(names[0], range(partition, 10, 2), partition=partition)
    return Copy(spark, topics, tmp_path, group, names)


def failing_once(marker: str) -> Callable[[Any], Iterator[Any]]:
    """The first attempt at the task with the number 2 fails when it sees that number."""

    def passed(batches: Any) -> Iterator[Any]:
        for batch in batches:
            if b"2" in batch.column(0).to_pylist() and not Path(marker).exists():
                Path(marker).touch()
                raise ValueError("this attempt breaks")
            yield batch

    return passed


def test_a_failed_task_loses_only_its_own_rows(copy, topics, tmp_path):
    frame = copy.frame()
    copy.run(frame.mapInArrow(failing_once(str(tmp_path / "broken")), frame.schema))
    assert (tmp_path / "broken").exists()
    assert copy.numbers() == [1, 3, 5, 7, 9], "the second attempt gets no records"
    assert copy.skipped() == 5
    topics.count(copy.source, range(10, 13))
    copy.run(copy.frame())
    assert copy.numbers() == [1, 3, 5, 7, 9, 10, 11, 12]
    assert copy.skipped() == 5


def test_a_write_is_not_retried_even_if_its_input_is_available(copy, tmp_path):
    """The rows of the task that dies come from a shuffle, so its second attempt gets them too."""
    ambush = {"ambush": "task begun:1", "ambushFile": str(tmp_path / "count")}
    copy.run(copy.frame().repartition(2), ambush)
    assert (tmp_path / "count.sprung").exists()
    found = copy.numbers()
    assert 0 < len(found) < 10
    assert len(set(found)) == len(found)
    assert copy.skipped() == 0, "everything was read once, and the group counts that"


def test_a_second_action_on_a_batch_is_an_error_that_names_the_cause(copy):
    seen: list[int] = []

    def twice(batch: Frame, _: int) -> None:
        seen.append(batch.count())
        batch.collect()

    with pytest.raises(StreamingQueryException) as raised:
        copy.finish(copy.frame().writeStream.foreachBatch(twice))
    assert "is read a second time, and contract=at-most-once delivers it once. Two actions" in str(
        raised.value
    )
    assert seen == [10]

    def kept(batch: Frame, _: int) -> None:
        batch = batch.localCheckpoint()
        seen.append(batch.count())
        seen.extend(sorted(int(row.value) for row in batch.collect()))

    copy.topics.count(copy.source, range(10, 12))
    copy.finish(copy.frame().writeStream.foreachBatch(kept))
    assert seen == [10, 0, 2, 10, 11], "the failed batch is not delivered again"


def test_nothing_twice_if_drivers_die_around_their_claims_and_lose_their_checkpoint(copy, tmp_path):
    """Each run has other tasks than the one before."""

    def dies(point: str) -> None:
        ambush = {"ambush": f"{point}:1", "ambushFile": str(tmp_path / point)}
        with pytest.raises(StreamingQueryException):
            copy.run(copy.frame(**ambush))
        assert (tmp_path / f"{point}.sprung").exists()

    dies("before the claim")
    dies("in the claim")
    copy.run(copy.frame())
    assert copy.numbers() == list(range(10)), "offsets that were not claimed are not lost"
    copy.topics.count(copy.source, range(10, 15))
    dies("after the claim")
    copy.topics.count(copy.source, range(15, 20))
    shutil.rmtree(copy.checkpoint)
    copy.run(copy.frame())
    assert copy.numbers() == [*range(10), *range(15, 20)]
    assert copy.skipped() == 5


def test_speculation_is_refused(copy, spark):
    """As tasks see it if the session enables speculation."""
    spark.sparkContext.setLocalProperty("spark.speculation", "true")
    try:
        rows = spark.range(1).selectExpr("'1' as value")
        with pytest.raises(PySparkException, match=r"needs spark\.speculation=false") as raised:
            rows.write.format("penstock").mode("append").options(
                **copy.topics.given(topic=copy.target, contract=CONTRACT)
            ).save()
        assert "Traceback" not in str(raised.value)
    finally:
        spark.sparkContext.setLocalProperty("spark.speculation", None)
    assert copy.numbers() == []
