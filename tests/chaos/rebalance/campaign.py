"""A KIP-848 group whose members join, leave, crash and stand still while its coordinator is killed, until it has had
as many rebalances as one likes. Who owned what is judged by `judge`."""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from tests.chaos.checker import Findings
from tests.chaos.history import History
from tests.chaos.readers import CONSUMER
from tests.chaos.rebalance import coordinator_log
from tests.chaos.rebalance.crowd import Crowd
from tests.chaos.rebalance.diaries import Told, digest
from tests.chaos.rebalance.host import GROUP, TOPIC
from tests.chaos.rebalance.judge import Around, judge_completeness, judge_log, judge_members
from tests.chaos.view import OF_GROUP, Observer
from tests.chaos.workload import CLIENT, Client, Progress, create_topics, pick
from tests.clusters import ClusterProcesses
from tests.compat.raw import schema
from tests.waiting import eventually

SESSION_S, HEARTBEAT_S = 3.0, 0.3
NODE_SETTINGS = {
    "group.consumer.assignment.interval.ms": "0",  # a rebalance for everyone who comes or goes
    "group.consumer.heartbeat.interval.ms": f"{HEARTBEAT_S * 1000:.0f}",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": f"{SESSION_S * 1000:.0f}",
    "offsets.topic.num.partitions": "1",
    "offsets.topic.segment.bytes": "104857600",  # never rolled, hence never compacted: the judge reads all of it
}
PARTITIONS, PARTITIONS_MAX = 8, 20
PACE_S = (0.05, 0.35)
RECOVERY_S = 60.0
WORK = 50  # records that the group commits after each crash, freeze and kill, at least
JOIN, LEAVE, CRASH, FREEZE, BLINK, GROW, COORDINATOR = (
    "join",
    "leave",
    "crash",
    "freeze beyond the session",
    "freeze within the session",
    "partitions added",
    "coordinator kill",
)
CHURN = {JOIN: 36, LEAVE: 32, CRASH: 9, FREEZE: 6, BLINK: 5, GROW: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    rebalances: int = 1000
    coordinator_kills: int = 15
    hosts: int = 4
    members: int = 3  # of each host at most
    seed: int = 0
    nodes: int = 3
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Result:
    seed: int
    duration_s: float = 0.0
    rebalances: int = 0
    churn: Counter[str] = field(default_factory=Counter)
    least_work: int = 0  # records that the group committed from one crash, freeze or kill to the next
    records: int = 0
    readings: int = 0
    commits: int = 0
    members: int = 0
    tenures: Counter[str] = field(default_factory=Counter)  # by how they ended
    zombies: Counter[str] = field(default_factory=Counter)  # overlaps with a member that had been fenced
    refusals: dict[str, int] = field(default_factory=dict)  # commits that were not kept
    log_records: int = 0
    anomalies: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.anomalies and not self.problems


class Committed(NamedTuple):
    """Records, over all partitions."""

    total: int


class Feed(Client):
    """Something to read in every partition, all the time."""

    def __init__(self, servers: str, folder: Path) -> None:
        super().__init__("feed", History(folder / "feed.jsonl"), Progress())
        self._servers = servers
        self.partitions = PARTITIONS

    def work(self) -> None:
        idempotence = {"enable.idempotence": True, "linger.ms": 5, "request.timeout.ms": 2000}
        producer = Producer({**CLIENT, **idempotence, "bootstrap.servers": self._servers})
        while not self.stopping.wait(0.1):
            for partition in range(self.partitions):
                with contextlib.suppress(KafkaException, BufferError):  # a new partition is not known at once
                    producer.produce(TOPIC, b"x", partition=partition)
            producer.poll(0)
        assert producer.flush(RECOVERY_S) == 0, "records were not taken in"


class Campaign:
    def __init__(self, folder: Path, plan: Plan, say: Callable[[str], None] = lambda words: None) -> None:
        self._plan = plan
        self._say = say
        self._chance = random.Random(plan.seed)
        self._result = Result(seed=plan.seed)
        settings = {**NODE_SETTINGS, **plan.settings}
        self._cluster = ClusterProcesses(folder, count=plan.nodes, settings=settings)
        self._observer = Observer(self._cluster)
        servers = self._cluster.bootstrap_servers
        self._crowd = Crowd(folder, servers, hosts=plan.hosts, members=plan.members, chance=self._chance)
        self._feed = Feed(servers, folder)
        self._findings = Findings()
        self._work: list[int] = []
        self._ends: dict[int, int] = {}
        self._rows: list[coordinator_log.KeyValue] = []

    def run(self) -> Result:
        began = time.monotonic()
        try:
            with self._noted():
                self._cluster.start()
                create_topics(self._cluster.direct_servers, self._plan.nodes, {TOPIC: PARTITIONS})
                self._churn()
            with self._noted():
                self._finish()
        finally:
            self._crowd.kill()
            self._cluster.kill()
        self._judge()
        self._result.duration_s = time.monotonic() - began
        return self._result

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as error:
            self._result.problems.append(f"{error}" + (f": {error.__cause__!r}" if error.__cause__ else ""))

    def _churn(self) -> None:
        self._feed.start()
        self._crowd.start()
        self._await_work()
        epoch, kills = self._epoch(), 0
        last = epoch + self._plan.rebalances
        while epoch < last:
            done = 1 - (last - epoch) / self._plan.rebalances
            if kills < self._plan.coordinator_kills * done:
                kills += 1
                self._kill_coordinator()
            else:
                self._do(pick(self._chance, CHURN))
            time.sleep(self._chance.uniform(*PACE_S))
            epoch = max(epoch, self._epoch())
        self._crowd.thaw_all()

    def _do(self, what: str) -> None:
        """One small change to the group, unless it cannot be made now."""
        made = {
            JOIN: self._crowd.join_one,
            LEAVE: self._crowd.leave_one,
            CRASH: self._crowd.crash_one,
            FREEZE: lambda: self._crowd.freeze_one(SESSION_S * self._chance.uniform(1.1, 1.8)),
            BLINK: lambda: self._crowd.freeze_one(SESSION_S * self._chance.uniform(0.1, 0.6)),
            GROW: self._grow,
        }[what]()
        self._crowd.thaw_due()
        if made:
            self._result.churn[what] += 1
        if made and what in (CRASH, FREEZE):
            self._await_work()

    def _grow(self) -> bool:
        if self._feed.partitions >= PARTITIONS_MAX:
            return False
        admin = AdminClient({**CLIENT, "bootstrap.servers": self._cluster.bootstrap_servers})
        try:
            admin.create_partitions([NewPartitions(TOPIC, self._feed.partitions + 1)])[TOPIC].result(10)
        except KafkaException:
            return False  # the controller is away, or the answer was: it is seen in the end
        self._feed.partitions += 1
        return True

    def _kill_coordinator(self) -> None:
        found = self._observer.coordinator(OF_GROUP, GROUP)
        node = self._cluster.nodes[found if found > 0 else 1]
        self._say(f"kill of node {node.node_id}, the coordinator, at epoch {self._epoch()}")
        node.kill()
        if self._chance.random() < 0.5:
            time.sleep(self._chance.uniform(0.5, 3.0))
        node.launch()
        self._result.churn[COORDINATOR] += 1
        self._await_work()
        self._await_whole()

    def _await_whole(self) -> None:
        def is_whole() -> bool:
            self._note_deaths()
            return not self._observer.what_is_wrong()

        eventually(is_whole, within_s=RECOVERY_S, what="a whole cluster")

    def _await_work(self) -> None:
        """Until the group has committed more: a fault that hits no work proves nothing."""
        before = eventually(self._committed, within_s=RECOVERY_S, what="the positions of the group")

        def has_moved() -> bool:
            self._crowd.thaw_due()
            self._note_deaths()
            return self._committed().total >= before.total + WORK

        eventually(has_moved, within_s=RECOVERY_S, what="commits by the group")
        self._work.append(self._committed().total - before.total)

    def _note_deaths(self) -> None:
        self._result.problems += self._crowd.deaths()
        for node in self._cluster.nodes.values():
            if (code := node.exit_code) is not None:
                self._result.problems.append(
                    f"node {node.node_id} has died by itself ({code}):\n{''.join(list(node.output)[-30:])}"
                )
                node.kill()
                node.launch()

    def _committed(self) -> "Committed":
        places = [TopicPartition(TOPIC, number) for number in range(self._feed.partitions)]
        with self._asking() as consumer:
            try:
                found = consumer.committed(places, timeout=10)
            except KafkaException as error:
                raise AssertionError(f"no positions: {error}") from error
        return Committed(sum(max(place.offset, 0) for place in found))

    @contextlib.contextmanager
    def _asking(self) -> Iterator[Consumer]:
        settings = {"bootstrap.servers": self._cluster.bootstrap_servers, "group.id": GROUP}
        consumer = Consumer({**CONSUMER, **settings})
        try:
            yield consumer
        finally:
            consumer.close()

    def _epoch(self) -> int:
        """As the coordinator tells it; 0 while nobody does."""
        question: Any = schema("consumer_group_describe", 0, "ConsumerGroupDescribeRequest")(
            group_ids=(GROUP,), include_authorized_operations=False
        )
        answers = self._observer.ask_each(question).values()
        told = (group for answer in answers for group in answer.groups if group.error_code.name == "none")
        return max((int(group.group_epoch) for group in told), default=0)

    def _finish(self) -> None:
        """The group reads all that there is, with the members that are left."""
        self._feed.stop()
        self._feed.join(RECOVERY_S)
        self._crowd.at_least(1)
        self._ends = eventually(self._log_ends, within_s=RECOVERY_S, what="the ends")
        total = sum(self._ends.values())
        with self._noted():
            eventually(
                lambda: self._committed().total >= total, within_s=RECOVERY_S, what="all of it committed"
            )
        self._crowd.stop()
        self._rows = coordinator_log.read(self._cluster.bootstrap_servers)

    def _log_ends(self) -> dict[int, int]:
        with self._asking() as consumer:
            try:
                known = consumer.list_topics(TOPIC, timeout=10).topics[TOPIC].partitions
                return {
                    number: consumer.get_watermark_offsets(TopicPartition(TOPIC, number), timeout=10)[1]
                    for number in known
                }
            except KafkaException as error:
                raise AssertionError(f"no ends: {error}") from error

    def _judge(self) -> None:
        told = digest(self._crowd.entries(), self._crowd.killed_s)
        judge_log(coordinator_log.events(self._rows), self._findings)
        around = Around(self._crowd.freezes, SESSION_S, HEARTBEAT_S)
        self._result.zombies = judge_members(told, around, self._findings)
        judge_completeness(told, self._ends, self._findings)
        self._result.anomalies = dict(self._findings.counts)
        self._result.examples = dict(self._findings.examples)
        self._count(told)

    def _count(self, told: Told) -> None:
        tenures = [tenure for each in told.tenures.values() for tenure in each]
        self._result.rebalances = coordinator_log.rebalances(self._rows)
        self._result.log_records = len(self._rows)
        self._result.records = sum(self._ends.values())
        self._result.readings, self._result.commits = len(told.readings), len(told.commits)
        self._result.members = len({tenure.member for tenure in tenures})
        self._result.tenures = Counter(tenure.ending or "still there" for tenure in tenures)
        self._result.refusals = told.refusals
        self._result.least_work = min(self._work, default=0)
