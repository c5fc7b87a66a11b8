"""What turns are taken on: a broker, topics that were filled before, databases, and how much is read."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.brokers.broker import Broker
from benchmarks.contracts.messages import Kind, fill
from benchmarks.measure import Metrics
from benchmarks.spark.stage import bootstrap_of
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.topics import NewTopic, create_topics, delete_topics

PARTITIONS = 4
_TURN_S = 900.0


class TurnFailed(Exception):
    """A turn was not what it should have been; nothing is kept of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How many messages, by how fast they go and by what there is of them."""

    messages: Mapping[str, Mapping[Kind, int] | int]
    rounds: int
    #: Of the messages, those that come before the clock starts.
    warm_part: float = 0.15

    def count(self, speed: str, kind: Kind) -> int:
        found = self.messages[speed]
        return found if isinstance(found, int) else found[kind]


#: Without a commit, with one for every batch, with marks in a store, with a database transaction for every message.
FAST, BATCHED, STORED, SINGLE, PUBLISHED = "fast", "batched", "stored", "single", "published"
KINDS = tuple(Kind(size, has_headers) for size in (100, 1024) for has_headers in (False, True))

FULL = Pace(
    messages={
        FAST: dict(zip(KINDS, (5_000_000, 3_000_000, 2_000_000, 2_000_000), strict=True)),
        BATCHED: 300_000,
        STORED: 200_000,
        SINGLE: 10_000,
        PUBLISHED: 400_000,
    },
    rounds=5,
)
SMOKE = Pace(
    messages=dict.fromkeys((FAST, BATCHED, STORED, SINGLE, PUBLISHED), 2_000), rounds=1, warm_part=0.0
)


@dataclass(slots=True, kw_only=True)
class Stage:
    broker: Broker
    cluster: Cluster
    folder: Path
    pace: Pace
    #: Of each kind, as many as any contest reads.
    filled: Mapping[Kind, int]
    _topics: dict[Kind, str] = field(default_factory=dict)
    _servers: dict[str, Any] = field(default_factory=dict)
    _closing: ExitStack = field(default_factory=ExitStack)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def bootstrap(self) -> str:
        return bootstrap_of(self.broker)

    def topic_of(self, kind: Kind) -> str:
        """Filled when it is first asked for."""
        if kind not in self._topics:
            name = self.new_topic(f"bench-{kind.name}", durable=False)
            fill(self.bootstrap, name, self.filled[kind], kind, PARTITIONS)
            self._topics[kind] = name
        return self._topics[kind]

    def new_topic(self, prefix: str, *, durable: bool = True) -> str:
        """As shipped, or left to the page cache where only reading is measured."""
        name = f"{prefix}-{next(self._numbers):04}"
        settings = {} if durable else self.broker.topic_configs(fsync=False)
        create_topics(
            self.cluster, [NewTopic(name=name, partitions=PARTITIONS, replicas=1, settings=settings)]
        )
        return name

    def drop_topic(self, name: str) -> None:
        delete_topics(self.cluster, [name])

    def new_group(self) -> str:
        return f"bench-{next(self._numbers):04}"

    def database(self, kind: str) -> str:
        """The URL of an empty one. Raises ServerMissing."""
        if kind == "sqlite":
            return f"sqlite:///{self.folder / f'marks-{next(self._numbers):04}.db'}"
        from benchmarks.contracts.databases import STARTED, emptied

        if kind not in self._servers:
            self._servers[kind] = self._closing.enter_context(STARTED[kind]())
        return emptied(self._servers[kind])

    def close(self) -> None:
        self._closing.close()

    def turn(self, asked: Mapping[str, Any]) -> dict[str, float]:
        """In a process of its own. Raises TurnFailed."""
        order = {**asked, "bootstrap": self.bootstrap, "broker_pid": self.broker.pid}
        command = [sys.executable, "-m", "benchmarks.contracts.child", json.dumps(order)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TURN_S, check=False)
        except subprocess.TimeoutExpired:
            raise TurnFailed(f"it took longer than {_TURN_S:.0f} s") from None
        if done.returncode:
            raise TurnFailed(done.stderr[-2000:])
        answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def committed(self, group: str) -> int:
        """How many messages the group has behind it, in all partitions."""
        from confluent_kafka import ConsumerGroupTopicPartitions
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        (asked,) = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]).values()
        return sum(each.offset for each in asked.result().topic_partitions if each.offset >= 0)


def rates(spent: Mapping[str, float]) -> Metrics:
    """Rates go by the clock, costs by what the client's process used, all its threads included. Raises TurnFailed."""
    if not spent["count"]:
        raise TurnFailed("it was over before anybody had looked at the clock")
    millions = spent["count"] / 1e6
    others_s = spent["machine_s"] - spent["client_s"] - spent["broker_s"]
    return {
        "messages_per_s": spent["count"] / spent["wall_s"],
        "cpu_s_per_million": spent["client_s"] / millions,
        "thread_cpu_s_per_million": spent["thread_s"] / millions,
        "broker_cpu_s_per_million": spent["broker_s"] / millions,
        "seconds": spent["wall_s"],
        "other_cores": max(others_s, 0.0) / spent["wall_s"],
    }
