"""`--campaign schedule`: messages are delivered later, and nodes are killed; none is early, doubled or lost.

A writer sends messages to be delivered within seconds; a classic group, a consumer group and a share group
read them all. Nodes are killed that lead partitions of the topic, shards of the schedule, groups or the cluster.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import AdminClient
from tests.chaos import share_consumers
from tests.chaos.campaign import RECOVERY_S, ClusterCampaign, Victims
from tests.chaos.checks.history import History
from tests.chaos.command import ClusterPlan, Say, option, silent
from tests.chaos.schedule.clients import (
    CLASSIC,
    CONSUMERS,
    GROUPS,
    NEWCOMERS,
    PARTITIONS,
    SHARE,
    TOPIC,
    Member,
    Newcomer,
    Reader,
    Sharer,
    Writer,
)
from tests.chaos.schedule.judge import ANOMALIES, Ledger, judge
from tests.chaos.view import OF_GROUP
from tests.chaos.workload import CLIENT, Client, Progress, create_topics
from tests.compat.share import configure
from tests.waiting import eventually

KILL = "kill"
SHARDS = 3
SCHEDULE = "__penstock_schedule"
NODE_SETTINGS = {
    **share_consumers.NODE_SETTINGS,
    "group.consumer.heartbeat.interval.ms": "500",
    "group.consumer.min.heartbeat.interval.ms": "200",
    "penstock.schedule.topic.num.partitions": str(SHARDS),
    "penstock.schedule.topic.replication.factor": "3",
}
JOIN_S = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ClusterPlan):
    kills: int = option(
        25, "kill -9 of leaders of the topic and of the schedule, coordinators and controllers"
    )
    work: int = option(300, "messages sent and delivered to each group between two kills at least")
    delay_ms_max: int = option(4000, "milliseconds that a message is held at most", flag="delay")


class Campaign(ClusterCampaign[Plan]):
    node_settings = NODE_SETTINGS
    anomalies = ANOMALIES

    def __init__(self, folder: Path, plan: Plan, say: Say = silent) -> None:
        super().__init__(folder, plan, say)
        self._history = History(folder / "history.jsonl")
        self._progress = Progress()
        self._ledger = Ledger()
        self._running: list[Client] = []

    def prepare(self) -> None:
        servers = self.cluster.direct_servers
        create_topics(servers, self.plan.nodes, {TOPIC: PARTITIONS}, penstock_schedule_enable="true")
        admin = AdminClient({**CLIENT, "bootstrap.servers": servers})
        own = {"share_auto_offset_reset": "earliest", "share_session_timeout_ms": share_consumers.SESSION_MS}
        configure(admin, SHARE, **own)

    @property
    def _common(self) -> tuple[str, History, Progress, Ledger]:
        return self.servers, self._history, self._progress, self._ledger

    @contextlib.contextmanager
    def clients(self) -> Iterator[None]:
        """Readers end when they have got all that was acknowledged."""
        writer = Writer(*self._common, seed=self.plan.seed, delay_ms_max=self.plan.delay_ms_max)
        readers: list[Reader] = [
            *(Member(f"{group}-{n}", group, *self._common) for group in (CLASSIC, CONSUMERS) for n in (1, 2)),
            *(Sharer(f"{SHARE}-{n}", SHARE, *self._common) for n in (1, 2)),
        ]
        self._running = [writer, *readers]
        for client in self._running:
            client.start()
        try:
            yield
        finally:
            writer.stop()
            writer.join(JOIN_S)
            with self.noted():
                self._await_all()
            for reader in readers:
                reader.stop()
            for reader in readers:
                reader.join(JOIN_S)

    def fire_faults(self) -> None:
        self._await_work()
        for _ in range(self.plan.kills):
            began, before = time.monotonic(), self._counts()
            self.kill_one_of(KILL, self._victims())
            self._await_work()
            self.outcome.recovery_s[KILL].append(time.monotonic() - began)
            if self.chance.random() < 0.8:
                self.await_whole()
            self.outcome.work_between.append(_least(before, self._counts()))

    def _victims(self) -> Victims:
        observer, chance = self.observer, self.chance
        group = chance.choice(GROUPS)
        return {
            "leader of the topic": (35, lambda: observer.leader_of(TOPIC, chance.randrange(PARTITIONS))),
            "leader of the schedule": (35, lambda: observer.leader_of(SCHEDULE, chance.randrange(SHARDS))),
            "group coordinator": (20, lambda: observer.coordinator(OF_GROUP, group)),
            "controller": (10, observer.controller),
        }

    def _counts(self) -> list[int]:
        return self._ledger.counts(list(GROUPS))

    def _await_work(self) -> None:
        before = self._counts()

        def is_done() -> bool:
            self.look_after_nodes()
            for client in self._running:
                client.check()
            return _least(before, self._counts()) >= self.plan.work

        try:
            eventually(is_done, within_s=RECOVERY_S, what="work after a kill")
        except AssertionError as error:
            wrong = self.observer.what_is_wrong()
            raise AssertionError(f"{error}; {before} -> {self._counts()}; {wrong}") from None

    def _await_all(self) -> None:
        with contextlib.suppress(AssertionError):  # what is missing then is counted
            eventually(lambda: not any(map(self._ledger.missing, GROUPS)), within_s=RECOVERY_S)

    def read_everything(self) -> None:
        self.await_whole()
        for name in NEWCOMERS:
            newcomer = Newcomer(name, name, *self._common)
            newcomer.start()
            newcomer.join(JOIN_S)

    def close(self) -> None:
        self._history.close()

    def judge(self) -> None:
        ledger, outcome = self._ledger, self.outcome
        judge(ledger, (*GROUPS, *NEWCOMERS), self.findings)
        outcome.figures["messages acknowledged"] = len(ledger.acknowledged)
        outcome.figures["of them held"] = sum(ledger.sent[n].due_ms > 0 for n in ledger.acknowledged)
        for group in GROUPS:
            outcome.figures[f"deliveries to {group}"] = len(ledger.given[group])
        late_ms = [
            got.stamp_ms - due_ms
            for got in ledger.given[NEWCOMERS[0]]
            if (due_ms := ledger.sent[got.number].due_ms)
        ]
        if late_ms:
            outcome.figures["median ms from due to appended"] = statistics.median(late_ms)
            outcome.figures["longest ms from due to appended"] = max(late_ms)
        for words, count in self._progress.troubles.items():
            outcome.figures[f"clients heard {words}"] = count


def _least(before: list[int], after: list[int]) -> int:
    return min(new - old for old, new in zip(before, after, strict=True))
