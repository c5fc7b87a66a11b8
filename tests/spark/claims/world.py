"""A streaming query without Spark that reads at most once: drivers, task attempts and a checkpoint, on a real broker.

It relies only on what Spark guarantees: a batch in the checkpoint is planned again with the same end, in tasks that
differ from run to run; any attempt may run twice, run late, or die. Two drivers may run at the same time, and the
checkpoint may be deleted.
"""

import json
import random
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.spark.sink.actors import Actor, Stage
from tests.spark.source.topics import Topics

from penstock.client.errors import ClientError
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import TopicPartition
from penstock.client.wire.producer import RawProducer
from penstock.spark import internal_topics
from penstock.spark.at_most_once import offset_claims as claims_module
from penstock.spark.at_most_once import task_claims
from penstock.spark.at_most_once.offset_claims import OffsetClaims
from penstock.spark.at_most_once.task_claims import TaskAttempt
from penstock.spark.offsets import Position
from penstock.spark.source.stream import ReadTask, StreamPlan

PARTITIONS, BATCH_OFFSETS_MAX = 2, 8
#: Other actors may run before each of these steps: steps that others can see, and steps that read what others wrote.
SWITCHING = (
    (OffsetClaims, "skip_claimed"),
    (OffsetClaims, "without_claimed"),
    (OffsetClaims, "claim"),
    (claims_module, "committed_offsets"),
    (RawProducer, "init"),
    (internal_topics, "append_document"),
    (task_claims, "_first_claim"),
)
#: An actor may die here, but no other may run: it would wait for the unfinished request.
DEADLY = ((OffsetClaims, "_write"), (RawProducer, "commit_offsets"), (RawProducer, "end"))


@dataclass
class Checkpoint:
    """Spark's checkpoint: the end of each planned batch, and which batches are finished."""

    ends: list[str] = field(default_factory=list)
    committed: int = -1


class World:
    def __init__(self, topics: Topics, seed: int, *, deaths: float = 0.03) -> None:
        self.chance = random.Random(seed)
        self.topics = topics
        self.topic = topics.create(f"in-{seed}-{uuid.uuid4().hex[:8]}", PARTITIONS)
        self.group = f"group-{self.topic}"
        self.stage = Stage(self.chance, deaths=deaths, switching=SWITCHING, deadly=DEADLY)
        self.checkpoint = Checkpoint()
        self.rows = Counter[int]()
        #: The numbers that tasks have read, with duplicates.
        self.given: list[TopicPartition] = []
        self.stages = 0
        self.failures: list[str] = []

    def feed(self, count: int) -> None:
        for partition in range(PARTITIONS):
            self.topics.count(self.topic, range(count), partition=partition)
            self.rows[partition] += count

    # Spark

    def driver(self) -> None:
        """Run the query once, until it has read everything."""
        options = self.topics.options(
            subscribe=self.topic,
            startingOffsets="earliest",
            contract="at-most-once",
            minPartitions=str(self.chance.randint(1, 4)),
            **{"kafka.group.id": self.group},
        )
        plan = StreamPlan(options)
        try:
            while self._run_batch(plan, self.checkpoint):
                pass
        except ClientError as error:
            self.failures.append(str(error))
        finally:
            plan.close()

    def _run_batch(self, plan: StreamPlan, checkpoint: Checkpoint) -> bool:
        number = checkpoint.committed + 1
        start = _position(checkpoint.ends[number - 1]) if number else plan.initial_position()
        if number == len(checkpoint.ends):
            end = plan.next_end(start, BATCH_OFFSETS_MAX, None)
            if end == start:
                return False
            if number < len(checkpoint.ends):
                raise ClientError("another driver uses this checkpoint")
            checkpoint.ends.append(json.dumps(end.to_json()))
        self.stage.gate("planned", switches=True)
        tasks = plan.tasks(start, _position(checkpoint.ends[number]))
        if not self._run_tasks(tasks):
            raise ClientError("a task has failed too often")
        self.stage.gate("checkpoint", switches=True)
        checkpoint.committed = max(checkpoint.committed, number)
        return True

    def _run_tasks(self, tasks: list[ReadTask]) -> bool:
        """Run each task at most twice, sometimes with a concurrent second attempt."""
        self.stages += 1
        stage, left = self.stages, dict(enumerate(tasks))
        for attempt in range(2):
            attempts = []
            for index, task in left.items():
                for twin in range(self.chance.choice((1, 1, 2))):
                    this = TaskAttempt(stage, index, 2 * attempt + twin)
                    actor = self.stage.enter(f"task {this}", lambda t=task, a=this: self._attempt(t, a))
                    attempts.append((index, actor))
            driver: Actor = self.stage.local.actor
            driver.wait_for(lambda those=attempts: all(actor.is_done for _, actor in those))
            for index, actor in attempts:
                if actor.result:
                    left.pop(index, None)
        return not left

    def _attempt(self, task: ReadTask, attempt: TaskAttempt) -> bool:
        assert task.task_claim is not None
        with Cluster(self.topics.cluster().settings) as cluster:
            if not task_claims.claim_task(cluster, task.task_claim, attempt):
                task_claims.record_skipped(cluster, task.task_claim, task.wanted, attempt)
                return True
        for offset in range(task.wanted.start, task.wanted.end):
            self.given.append((str(task.wanted.partition), offset))
            self.stage.gate("reads", switches=offset == task.wanted.start)
        return True

    # Running

    def run(self) -> None:
        """Start drivers and kill them, sometimes two at a time. The last driver is not disturbed."""
        with self.stage.gated():
            for number in range(self.chance.randint(1, 4)):
                self.feed(self.chance.randint(0, 6))
                if self.chance.random() < 0.2:
                    self.checkpoint = Checkpoint()
                self.stage.run_drivers(number, self.driver)
                self.stage.kill_drivers()
            self.stage.deaths = 0
            while self.stage.step():
                pass
            self.peace = dict(self.rows)
            self.feed(4)
            self.stage.enter("last driver", self.driver)
            while self.stage.step():
                pass

    def check(self) -> None:
        """Nothing is delivered twice, all losses are counted, and an undisturbed run loses nothing."""
        found = Counter(self.given)
        twice = sorted(tp for tp, count in found.items() if count > 1)
        assert not twice, f"delivered twice: {twice}"
        lost = {(str(p), o) for p, count in self.rows.items() for o in range(count)} - found.keys()
        uncounted = lost - self._skipped()
        assert not uncounted, f"lost, and not counted: {sorted(uncounted)}"
        needless = [tp for tp in lost if tp[1] >= self.peace[int(tp[0])]]
        assert not needless, f"lost in an undisturbed run: {sorted(needless)}: {self.failures[-1:]}"

    def _skipped(self) -> set[TopicPartition]:
        with self.topics.cluster() as cluster:
            documents = list(
                internal_topics.read_documents(cluster, internal_topics.SKIPPED_TOPIC, 0, key=self.group)
            )
        spans: list[Any] = [each for document in documents for each in document["ranges"]]
        return {(str(part), offset) for _, _, part, start, end in spans for offset in range(start, end)}


def _position(text: str) -> Position:
    return Position.from_json(json.loads(text))
