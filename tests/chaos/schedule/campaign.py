"""Scheduled delivery while nodes are killed: none early, none twice, none lost, for groups of every kind.

A writer sends messages to be delivered within seconds; a classic group, one of the newer protocol and a share group
read them all. Nodes die for what they lead: partitions of the topic, shards of the schedule, groups, the cluster.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka.admin import AdminClient
from tests.chaos import sharing
from tests.chaos.history import History
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
from tests.chaos.siege import RECOVERY_S, Outcome, Siege
from tests.chaos.view import OF_GROUP
from tests.chaos.workload import CLIENT, Client, Progress, create_topics
from tests.compat.share import configure
from tests.waiting import eventually

KILL = "kill"
SHARDS = 3
SCHEDULE = "__penstock_schedule"
NODE_SETTINGS = {
    **sharing.NODE_SETTINGS,
    "group.consumer.heartbeat.interval.ms": "500",
    "group.consumer.min.heartbeat.interval.ms": "200",
    "penstock.schedule.topic.num.partitions": str(SHARDS),
    "penstock.schedule.topic.replication.factor": "3",
}
JOIN_S = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Between two kills at least `work` messages are acknowledged, and as many come to each group."""

    kills: int = 25
    work: int = 300
    delay_ms_max: int = 4000
    seed: int = 0
    nodes: int = 3
    settings: dict[str, str] = field(default_factory=dict)


class Campaign:
    def __init__(self, folder: Path, plan: Plan, say: Callable[[str], None] = lambda words: None) -> None:
        self._plan = plan
        self._siege = Siege(
            folder,
            nodes=plan.nodes,
            settings={**NODE_SETTINGS, **plan.settings},
            seed=plan.seed,
            kinds=ANOMALIES,
            say=say,
        )
        self._history = History(folder / "history.jsonl")
        self._progress = Progress()
        self._ledger = Ledger()
        self._running: list[Client] = []

    def run(self) -> Outcome:
        siege, cluster = self._siege, self._siege.cluster
        try:
            with siege.noted():
                cluster.start()
                create_topics(
                    cluster.direct_servers,
                    self._plan.nodes,
                    {TOPIC: PARTITIONS},
                    penstock_schedule_enable="true",
                )
                admin = AdminClient({**CLIENT, "bootstrap.servers": cluster.direct_servers})
                own = {"share_auto_offset_reset": "earliest", "share_session_timeout_ms": sharing.SESSION_MS}
                configure(admin, SHARE, **own)
                with self._clients():
                    self._fire_all()
            with siege.noted():
                self._read_all()
                siege.stop_nodes()
        finally:
            cluster.kill()
            self._history.close()
        judge(self._ledger, (*GROUPS, *NEWCOMERS), siege.findings)
        self._add_figures(siege.outcome)
        return siege.finish()

    @property
    def _common(self) -> tuple[str, History, Progress, Ledger]:
        return self._siege.cluster.bootstrap_servers, self._history, self._progress, self._ledger

    @contextlib.contextmanager
    def _clients(self) -> Iterator[None]:
        """Readers end when they have got all that was acknowledged."""
        writer = Writer(*self._common, seed=self._plan.seed, delay_ms_max=self._plan.delay_ms_max)
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
            with self._siege.noted():
                self._await_all()
            for reader in readers:
                reader.stop()
            for reader in readers:
                reader.join(JOIN_S)

    def _fire_all(self) -> None:
        self._await_work()
        for _ in range(self._plan.kills):
            began, before = time.monotonic(), self._counts()
            self._siege.kill_one_of(KILL, self._victims())
            self._await_work()
            self._siege.outcome.recovery_s[KILL].append(time.monotonic() - began)
            if self._siege.chance.random() < 0.8:
                self._siege.await_whole()
            self._siege.outcome.work_between.append(_least(before, self._counts()))

    def _victims(self) -> dict[str, tuple[int, Callable[[], int]]]:
        observer, chance = self._siege.observer, self._siege.chance
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
            self._siege.look_after_nodes()
            for client in self._running:
                client.check()
            return _least(before, self._counts()) >= self._plan.work

        try:
            eventually(is_done, within_s=RECOVERY_S, what="work after a kill")
        except AssertionError as error:
            wrong = self._siege.observer.what_is_wrong()
            raise AssertionError(f"{error}; {before} -> {self._counts()}; {wrong}") from None

    def _await_all(self) -> None:
        with contextlib.suppress(AssertionError):  # what is missing then is counted
            eventually(lambda: not any(map(self._ledger.missing, GROUPS)), within_s=RECOVERY_S)

    def _read_all(self) -> None:
        self._siege.await_whole()
        for name in NEWCOMERS:
            newcomer = Newcomer(name, name, *self._common)
            newcomer.start()
            newcomer.join(JOIN_S)

    def _add_figures(self, outcome: Outcome) -> None:
        ledger = self._ledger
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
