"""A long-running query on three nodes: leaders die, partitions are added, its topic is recreated, it is restarted.

    python -m tests.spark.source.long_lived --restarts 100 --seed 1

It copies exactly once. Every acknowledged record must be in the copy once, whatever happens.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient, NewTopic
from tests.brokers import ClusterProcesses
from tests.compat import confluent
from tests.compat.message import Message
from tests.spark.class_archive import QUICK_JAVA
from tests.spark.sink.ambushed import kill_session
from tests.spark.sink.readers import committed_numbers
from tests.spark.source.topics import Topics
from tests.topics import create_topics
from tests.waiting import eventually

WITHIN_S = 600.0
PARTITIONS, PARTITIONS_MAX = 2, 8
ROWS = 20
RECREATED = "the topic was deleted and created again"
#: Rows that are not visible yet when the driver looks are read in the next batch.
CLUSTER = {"transaction.state.log.replication.factor": "3", "transaction.state.log.min.isr": "2"}


class Life:
    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.nodes = ClusterProcesses(folder / "nodes", settings=CLUSTER).start()
        self.topics = Topics(self.nodes.bootstrap_servers)
        self.source, self.target = self.create("in"), self.create("out")
        self.partitions = PARTITIONS
        self.written: list[int] = []
        self.tally: Counter[str] = Counter()
        self.driver: subprocess.Popen[str] | None = None

    def close(self) -> None:
        self.kill_driver()
        self.nodes.kill()

    # Topics

    def create(self, name: str) -> str:
        wanted = NewTopic(name, num_partitions=PARTITIONS, replication_factor=3)
        create_topics(self.topics.admin, wanted)
        eventually(lambda: -1 not in self.leaders(name), within_s=WITHIN_S, what=f"leaders of {name}")
        return name

    def leaders(self, name: str) -> list[int]:
        found = self.topics.admin.list_topics(name, timeout=WITHIN_S).topics[name].partitions
        return [part.leader for part in found.values()]

    def in_sync(self, name: str) -> int:
        found = self.topics.admin.list_topics(name, timeout=WITHIN_S).topics[name].partitions
        return min(len(part.isrs) for part in found.values())

    def publish(self) -> None:
        """Write to all partitions. Every counted record was acknowledged by all in-sync replicas."""
        numbers = range(len(self.written), len(self.written) + ROWS)
        messages = [Message(value=b"%d" % n, partition=n % self.partitions) for n in numbers]
        servers = self.nodes.bootstrap_servers
        confluent.publish(servers, self.source, messages, acks="all", enable_idempotence=True)
        self.written += numbers

    # The query

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        assert self.driver is not None
        assert self.driver.stdin is not None
        assert self.driver.stdout is not None
        self.driver.stdin.write(json.dumps({"do": do, **given}) + "\n")
        self.driver.stdin.flush()
        line = self.driver.stdout.readline()
        assert line, f"the driver has exited; see {self.folder}/driver.log"
        return json.loads(line)

    def begin(self, **options: str) -> None:
        """Continue from the checkpoint with another number of tasks. Start a new driver if there is none."""
        if self.driver is None:
            with (self.folder / "driver.log").open("ab") as log:
                self.driver = subprocess.Popen(
                    [sys.executable, "-m", "tests.spark.source.long_lived_driver"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, **QUICK_JAVA},
                    start_new_session=True,
                )
        tasks = str(self.chance.randint(1, 4))
        given = {"subscribe": self.source, "startingOffsets": "earliest", "minPartitions": tasks, **options}
        sink = self.topics.given(topic=self.target, contract="exactly-once")
        self.ask("start", source=self.topics.given(**given), sink=sink, checkpoint=str(self.folder / "c"))

    def kill_driver(self) -> None:
        if self.driver is not None:
            kill_session(self.driver.pid)
            self.driver.wait()
            self.driver = None

    def await_all(self) -> None:
        """Run undisturbed between the faults: every row is there once."""
        eventually(self._has_all, within_s=WITHIN_S, what=f"all of {len(self.written)} rows")

    def _has_all(self) -> bool:
        state = self.ask("look")
        if state["error"] is not None:
            raise RuntimeError(f"the query has failed: {state['error']}")
        with self.topics.cluster() as cluster:
            partitions = [(self.target, part.index) for part in cluster.topic(self.target).partitions]
            found = committed_numbers(self.topics, cluster, partitions)
        if len(found) > len(set(found)):
            raise RuntimeError(f"{len(found) - len(set(found))} rows are there more than once")
        return found == self.written

    # Faults

    def restart(self) -> None:
        self.publish()
        assert self.ask("stop")["error"] is None
        self.begin()
        self.tally["restarts"] += 1

    def driver_dies(self) -> None:
        self.publish()
        self.kill_driver()
        self.publish()
        self.begin()
        self.tally["driver killed"] += 1

    def leader_dies(self) -> None:
        """Rows are written before the node stops, while it is down, and after it is back."""
        self.publish()
        topic = self.chance.choice([self.source, self.target])
        node = self.nodes.nodes[self.chance.choice(self.leaders(topic))]
        node.kill()
        self.publish()
        self.await_all()
        node.start()
        for name in (self.source, self.target):
            eventually(lambda name=name: self.in_sync(name) == 3, within_s=WITHIN_S, what="all replicas")
        self.tally["leader killed"] += 1

    def partitions_are_added(self) -> None:
        if self.partitions == PARTITIONS_MAX:
            return
        self.partitions += 1
        self.topics.grow(self.source, self.partitions)
        eventually(self._all_know_partitions, within_s=WITHIN_S, what="partitions that all nodes know of")
        self.publish()
        self.tally["partition added"] += 1

    def _all_know_partitions(self) -> bool:
        """A producer that has old metadata of the topic accepts no records for new partitions."""
        admins = [
            AdminClient({"bootstrap.servers": each.bootstrap_servers}) for each in self.nodes.nodes.values()
        ]
        topics = [admin.list_topics(self.source, timeout=WITHIN_S).topics[self.source] for admin in admins]
        return all(len(each.partitions) == self.partitions for each in topics)

    def topic_is_recreated(self) -> None:
        """Recreate the topic while the query runs: it fails with a clear error until losses are allowed."""
        self.publish()
        self.await_all()
        self.topics.delete(self.source)
        eventually(self._is_gone, within_s=WITHIN_S, what="the end of the topic")
        self.create(self.source)
        self.partitions = PARTITIONS
        self.publish()
        self._await_failure()
        self.begin()
        error = self._await_failure()
        assert RECREATED in error, error
        assert "Traceback" not in error, error
        self.begin(failOnDataLoss="false")
        self.await_all()
        self.tally["topic recreated"] += 1

    def _is_gone(self) -> bool:
        return self.source not in self.topics.admin.list_topics(timeout=WITHIN_S).topics

    def _await_failure(self) -> str:
        state = eventually(lambda: self.ask("look")["error"], within_s=WITHIN_S, what="the end of the query")
        assert self.source in state, state
        return str(state)


def live(life: Life, restarts: int, every: dict[str, int], *, note: Any = print) -> None:
    """Cause one kind of fault between restarts, each once in a number of restarts."""
    life.begin()
    for number in range(1, restarts + 1):
        life.restart()
        for name in [name for name, count in every.items() if number % count == 0]:
            getattr(life, name)()
        if number % 5 == 0 or number == restarts:
            life.await_all()
            note(f"{number}/{restarts}: {len(life.written)} rows, each once; {dict(life.tally)}")
    life.await_all()
    life.tally["batches"] = life.ask("look")["batch"] or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--restarts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    every = {"leader_dies": 7, "partitions_are_added": 11, "driver_dies": 12, "topic_is_recreated": 30}
    with tempfile.TemporaryDirectory(prefix="long-lived-") as folder:
        life = Life(Path(folder), random.Random(arguments.seed))
        try:
            live(life, arguments.restarts, every, note=lambda text: print(text, flush=True))
        finally:
            life.close()
    print(f"{len(life.written)} rows, 0 lost, 0 doubled; {dict(life.tally)}")


if __name__ == "__main__":
    main()
