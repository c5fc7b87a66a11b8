"""A streaming query without Spark: drivers, task attempts and a checkpoint, on a real broker.

It relies only on what Spark guarantees: a batch always has the same rows, in tasks that differ from run to run; the
next batch starts when the commit of the last one has returned; any attempt may run twice, run late, or die. Two drivers
may run at the same time.
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
#: The state that earlier drivers have left may fail one run for each of them.
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
        #: The last batch in Spark's commit log.
        self.checkpoint = -1
        self.failures: list[str] = []

    # Spark

    def driver(self) -> None:
        """Run the query once, from its checkpoint."""
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
        # Two drivers may both reach this line with the same batch, or one of them late.
        self.checkpoint = max(self.checkpoint, batch.number)

    def _tasks(self, batch: MicroBatch) -> list[list[int]]:
        """Divide the rows into tasks, in another way each time. Some tasks have no rows."""
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
        # The first attempt counts. Other attempts continue, and the driver does not wait for them.
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
            return write_exactly_once(
                cluster, self.options, self.columns, batch, [table], transactional_id=name
            )

    # Running

    def run(self) -> None:
        """Start drivers and kill them, sometimes two at a time. The last driver is not disturbed."""
        with self.stage.gated():
            for number in range(self.chance.randint(1, 4)):
                self.stage.run_drivers(number, self.driver)
                self.stage.kill_drivers()
            self.stage.deaths = 0
            for _ in range(LAST_RUNS_MAX):
                self.stage.enter("last driver", self.driver)
                while self.stage.step():
                    pass
                if self.checkpoint == BATCHES - 1:
                    return
            raise AssertionError(f"the query does not come to its end: {self.failures[-1:]}")

    # Checking

    def check(self, within_s: float = 120.0) -> None:
        partitions = [(self.topic, index) for index in range(PARTITIONS)]
        with self.topics.cluster() as cluster:
            await_rest(cluster, partitions, within_s)
            found = committed_numbers(self.topics, cluster, partitions)
        assert found == list(range(BATCHES * ROWS)), f"rows are lost or duplicated: {found}"


def _is_over(attempts: list[tuple[int, Actor]]) -> bool:
    """Return whether every task has succeeded or has no attempts left."""
    tasks: dict[int, list[Actor]] = {}
    for index, actor in attempts:
        tasks.setdefault(index, []).append(actor)
    return all(
        any(actor.is_done and actor.result is not None for actor in actors)
        or all(actor.is_done for actor in actors)
        for actors in tasks.values()
    )
