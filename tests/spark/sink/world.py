"""A streaming query without Spark: drivers, task attempts and a checkpoint as Spark keeps them, on a real broker.

Spark's promises are all that holds here: a batch has always the same rows, in tasks that differ from run to run; the
next batch begins when the commit of the last one has returned; any attempt may run twice, late, or die. There may be
two drivers at a time.
"""

import random
import uuid
from typing import Any

import pyarrow as pa
from tests.spark.sink.actors import Actor, Stage
from tests.spark.sink.readers import await_rest, committed_numbers
from tests.spark.source.topics import Topics

from penstock.client.errors import ClientError
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.producer import PreparedTransaction
from penstock.spark.exactly_once.decisions import DecisionLog, MicroBatch
from penstock.spark.exactly_once.two_phase_commit import abort_batch, commit_batch
from penstock.spark.sink.options import SinkOptions
from penstock.spark.sink.records import SinkColumns
from penstock.spark.sink.writers import AttemptIds, write_exactly_once

BATCHES, ROWS, PARTITIONS = 4, 6, 2
#: What a query was left with may fail one run, or one for each of the drivers before.
LAST_RUNS_MAX = 8
COLUMNS = SinkColumns(positions={"value": 0, "partition": 1}, topic="")


class World:
    def __init__(self, topics: Topics, seed: int, *, deaths: float = 0.03) -> None:
        self.chance = random.Random(seed)
        self.seed = seed
        self.topics = topics
        self.topic = topics.create(f"out-{seed}-{uuid.uuid4().hex[:8]}", PARTITIONS)
        self.query = str(uuid.uuid4())
        self.options = SinkOptions.parse(topics.given(topic=self.topic), streaming=True)
        self.columns = SinkColumns(positions=COLUMNS.positions, topic=self.topic)
        self.stage = Stage(self.chance, deaths=deaths)
        #: The last batch in Spark's log of commits.
        self.checkpoint = -1
        self.failures: list[str] = []

    # Spark

    def driver(self) -> None:
        """One run of the query, on whatever its checkpoint says."""
        workers = [AttemptIds() for _ in range(3)]
        try:
            while self.checkpoint < BATCHES - 1:
                self._run_batch(MicroBatch(self.query, self.checkpoint + 1), workers)
        except ClientError as error:
            self.failures.append(str(error))

    def _run_batch(self, batch: MicroBatch, workers: list[AttemptIds]) -> None:
        tasks = self._tasks(batch)
        prepared = self._run_tasks(batch, tasks, workers)
        with Cluster(self.options.connection) as cluster, DecisionLog(cluster, batch.query) as decision_log:
            if prepared is None:
                abort_batch(decision_log, batch, [])
                raise ClientError(f"{batch} failed")
            commit_batch(decision_log, batch, prepared)
        self.stage.gate("checkpoint", switches=True)
        # Two drivers may both get here with the same batch, or one of them late.
        self.checkpoint = max(self.checkpoint, batch.number)

    def _tasks(self, batch: MicroBatch) -> list[list[int]]:
        """Another layout every time, some tasks without rows."""
        numbers = list(range(batch.number * ROWS, (batch.number + 1) * ROWS))
        count = self.chance.randint(1, 3)
        return [numbers[start::count] for start in range(count)] + [[]] * self.chance.randint(0, 1)

    def _run_tasks(
        self, batch: MicroBatch, tasks: list[list[int]], workers: list[AttemptIds]
    ) -> list[PreparedTransaction] | None:
        attempts: list[tuple[int, Actor]] = []
        for index, rows in enumerate(tasks):
            for twin in range(self.chance.choice((1, 1, 2))):
                name = self.chance.choice(workers).take(batch)
                actor = self.stage.enter(
                    f"task {index}.{twin} of {batch.number}",
                    lambda r=rows, n=name: self._attempt(batch, r, n),
                )
                attempts.append((index, actor))
        driver: Actor = self.stage.local.actor
        driver.wait_for(lambda: _is_over(attempts))
        # The first one counts; the others go on, and the driver does not wait for them.
        first: dict[int, Any] = {}
        for index, actor in self.chance.sample(attempts, len(attempts)):
            if actor.is_done and actor.result is not None and index not in first:
                first[index] = actor.result
        if len(first) < len(tasks):
            return None
        return [each.prepared for each in first.values() if each.prepared is not None]

    def _attempt(self, batch: MicroBatch, rows: list[int], name: str) -> Any:
        values = pa.array([b"%d" % number for number in rows], pa.binary())
        partitions = pa.array([number % PARTITIONS for number in rows], pa.int32())
        table = pa.record_batch([values, partitions], names=["value", "partition"])
        with Cluster(self.options.connection) as cluster:
            return write_exactly_once(cluster, self.options, self.columns, batch, [table], name=name)

    # The story

    def run(self) -> None:
        """Drivers come and die, sometimes two at a time; the last one is left in peace."""
        with self.stage.gated():
            for number in range(self.chance.randint(1, 4)):
                self.stage.run_drivers(number, self.driver)
                self._end_drivers()
            self.stage.deaths = 0
            for _ in range(LAST_RUNS_MAX):
                self.stage.enter("last driver", self.driver)
                while self.stage.step():
                    pass
                if self.checkpoint == BATCHES - 1:
                    return
            raise AssertionError(f"the query does not come to its end: {self.failures[-1:]}")

    def _end_drivers(self) -> None:
        """Its tasks may outlive a driver for a while."""
        for actor in list(self.stage.actors):
            is_driver = "driver" in actor.name
            if not actor.is_done and (is_driver or self.chance.random() < 0.5):
                self.stage.kill(actor)

    # What readers see

    def check(self, within_s: float = 120.0) -> None:
        places = [(self.topic, index) for index in range(PARTITIONS)]
        with self.topics.cluster() as cluster:
            await_rest(cluster, places, within_s)
            found = committed_numbers(self.topics, cluster, places)
        assert found == list(range(BATCHES * ROWS)), f"rows are lost or doubled: {found}"


def _is_over(attempts: list[tuple[int, Actor]]) -> bool:
    """Every task has succeeded, or cannot any more."""
    tasks: dict[int, list[Actor]] = {}
    for index, actor in attempts:
        tasks.setdefault(index, []).append(actor)
    return all(
        any(actor.is_done and actor.result is not None for actor in actors)
        or all(actor.is_done for actor in actors)
        for actors in tasks.values()
    )
