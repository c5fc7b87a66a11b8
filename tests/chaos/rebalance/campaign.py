"""`--campaign rebalance`: a KIP-848 group is rebalanced; no partition ever has two owners that are not fenced.

Members join, leave, crash and freeze while the group's coordinator is killed. `judge` checks who owned what.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions
from tests.chaos.campaign import ClusterCampaign
from tests.chaos.checks.history import History
from tests.chaos.command import ClusterPlan, Say, option, silent
from tests.chaos.readers import CONSUMER
from tests.chaos.rebalance import coordinator_log
from tests.chaos.rebalance.crowd import Crowd
from tests.chaos.rebalance.diaries import Told, digest
from tests.chaos.rebalance.host import GROUP, TOPIC
from tests.chaos.rebalance.judge import ANOMALIES, Around, judge_completeness, judge_log, judge_members
from tests.chaos.view import OF_GROUP
from tests.chaos.workload import CLIENT, Client, Progress, create_topics, pick
from tests.compat.raw import schema
from tests.waiting import eventually

SESSION_S, HEARTBEAT_S = 3.0, 0.3
NODE_SETTINGS = {
    "group.consumer.assignment.interval.ms": "0",  # a rebalance for each member that joins or leaves
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
class Plan(ClusterPlan):
    rebalances: int = option(1000, "epochs of the group")
    coordinator_kills: int = option(15, "kill -9 of the group's coordinator")
    hosts: int = option(4, "processes with members")
    members: int = option(3, "members of each process at most")


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


class Campaign(ClusterCampaign[Plan]):
    node_settings = NODE_SETTINGS
    anomalies = ANOMALIES

    def __init__(self, folder: Path, plan: Plan, say: Say = silent) -> None:
        super().__init__(folder, plan, say)
        self._crowd = Crowd(folder, self.servers, hosts=plan.hosts, members=plan.members, chance=self.chance)
        self._feed = Feed(self.servers, folder)
        self._ends: dict[int, int] = {}
        self._rows: list[coordinator_log.KeyValue] = []

    def prepare(self) -> None:
        create_topics(self.cluster.direct_servers, self.plan.nodes, {TOPIC: PARTITIONS})

    @contextlib.contextmanager
    def clients(self) -> Iterator[None]:
        """Members run until everything is read, so that `read_everything` ends them."""
        self._feed.start()
        self._crowd.start()
        yield

    def close(self) -> None:
        self._crowd.kill()

    def fire_faults(self) -> None:
        self._await_work()
        epoch, kills = self._epoch(), 0
        last = epoch + self.plan.rebalances
        while epoch < last:
            done = 1 - (last - epoch) / self.plan.rebalances
            if kills < self.plan.coordinator_kills * done:
                kills += 1
                self._kill_coordinator()
            else:
                self._do(pick(self.chance, CHURN))
            time.sleep(self.chance.uniform(*PACE_S))
            epoch = max(epoch, self._epoch())
        self._crowd.thaw_all()

    def _do(self, what: str) -> None:
        """One small change to the group, unless it cannot be made now."""
        made = {
            JOIN: self._crowd.join_one,
            LEAVE: self._crowd.leave_one,
            CRASH: self._crowd.crash_one,
            FREEZE: lambda: self._crowd.freeze_one(SESSION_S * self.chance.uniform(1.1, 1.8)),
            BLINK: lambda: self._crowd.freeze_one(SESSION_S * self.chance.uniform(0.1, 0.6)),
            GROW: self._grow,
        }[what]()
        self._crowd.thaw_due()
        if made:
            self.outcome.fired[what] += 1
        if made and what in (CRASH, FREEZE):
            self._await_work()

    def _grow(self) -> bool:
        if self._feed.partitions >= PARTITIONS_MAX:
            return False
        admin = AdminClient({**CLIENT, "bootstrap.servers": self.servers})
        try:
            admin.create_partitions([NewPartitions(TOPIC, self._feed.partitions + 1)])[TOPIC].result(10)
        except KafkaException:
            return False  # the controller is away, or the answer was: it is seen in the end
        self._feed.partitions += 1
        return True

    def _kill_coordinator(self) -> None:
        self.kill_one_of(COORDINATOR, {COORDINATOR: (1, lambda: self.observer.coordinator(OF_GROUP, GROUP))})
        self._await_work()
        self.await_whole()

    def _await_work(self) -> None:
        """Wait until the group has committed more: a fault without work proves nothing."""
        before = eventually(self._committed, within_s=RECOVERY_S, what="the positions of the group")

        def has_moved() -> bool:
            self._crowd.thaw_due()
            self._look_after()
            return self._committed().total >= before.total + WORK

        eventually(has_moved, within_s=RECOVERY_S, what="commits by the group")
        self.outcome.work_between.append(self._committed().total - before.total)

    def _look_after(self) -> None:
        self.outcome.problems += self._crowd.deaths()
        self.look_after_nodes()

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
        settings = {"bootstrap.servers": self.servers, "group.id": GROUP}
        consumer = Consumer({**CONSUMER, **settings})
        try:
            yield consumer
        finally:
            consumer.close()

    def _epoch(self) -> int:
        """As the coordinator describes it; 0 if there is none now."""
        question: Any = schema("consumer_group_describe", 0, "ConsumerGroupDescribeRequest")(
            group_ids=(GROUP,), include_authorized_operations=False
        )
        answers = self.observer.ask_each(question).values()
        told = (group for answer in answers for group in answer.groups if group.error_code.name == "none")
        return max((int(group.group_epoch) for group in told), default=0)

    def read_everything(self) -> None:
        """The group reads all that there is, with the members that are left."""
        self._feed.stop()
        self._feed.join(RECOVERY_S)
        self._crowd.at_least(1)
        self._ends = eventually(self._log_ends, within_s=RECOVERY_S, what="the ends")
        total = sum(self._ends.values())
        with self.noted():
            eventually(
                lambda: self._committed().total >= total, within_s=RECOVERY_S, what="all of it committed"
            )
        self._crowd.stop()
        self._rows = coordinator_log.read(self.servers)

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

    def judge(self) -> None:
        told = digest(self._crowd.entries(), self._crowd.killed_s)
        judge_log(coordinator_log.events(self._rows), self.findings)
        around = Around(self._crowd.freezes, SESSION_S, HEARTBEAT_S)
        zombies = judge_members(told, around, self.findings)
        judge_completeness(told, self._ends, self.findings)
        self._add_figures(told, zombies)

    def _add_figures(self, told: Told, zombies: Counter[str]) -> None:
        tenures = [tenure for each in told.tenures.values() for tenure in each]
        endings = Counter(tenure.ending or "still there" for tenure in tenures)
        self.outcome.figures |= {
            "rebalances": coordinator_log.rebalances(self._rows),
            "records of the coordinator": len(self._rows),
            "records": sum(self._ends.values()),
            "records read": len(told.readings),
            "offsets committed": len(told.commits),
            "members": len({tenure.member for tenure in tenures}),
            **{f"ownership ended: {name}": count for name, count in endings.items()},
            **{f"fenced, and still believed to own: {name}": count for name, count in zombies.items()},
            **{f"commits refused: {name}": count for name, count in told.refusals.items()},
        }
