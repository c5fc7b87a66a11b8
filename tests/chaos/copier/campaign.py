"""`--campaign copier`: messages are copied in transactions while nodes and copiers are killed; each is there once.

Messages come in as many portions as there are faults, and each fault hits while its portion is being copied. The next
fault waits until a reader of committed records has read the whole portion.
"""

import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Producer
from tests.chaos.campaign import RECOVERY_S, ClusterCampaign, Victims
from tests.chaos.checks.history import History, read
from tests.chaos.children import ChildProcess
from tests.chaos.command import ClusterPlan, Say, option, silent
from tests.chaos.copier import leftovers
from tests.chaos.copier.judge import ANOMALIES, HANGING, POSITION, compare, judge, rows_by_reader
from tests.chaos.copier.worker import (
    GROUP,
    KEYS,
    LIBRARIES,
    SOURCE,
    SOURCES,
    TARGET,
    TARGETS,
    Job,
    source_of,
)
from tests.chaos.readers import Last, Tail
from tests.chaos.view import OF_GROUP, OF_TRANSACTION
from tests.chaos.workload import CLIENT as OPTIONS
from tests.chaos.workload import Progress, create_topics
from tests.waiting import eventually

BROKER, CLIENT = "broker kill", "client kill"
JOIN_S = 300.0
NODE_SETTINGS = {
    "group.consumer.heartbeat.interval.ms": "500",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "4000",  # as members of the classic protocol ask for it
    "offsets.topic.num.partitions": "3",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
    "transaction.state.log.num.partitions": "6",
}
PARTITIONS = {SOURCE: SOURCES, TARGET: TARGETS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ClusterPlan):
    messages: int = option(100_000, "messages to copy")
    broker_kills: int = option(25, "kill -9 of leaders, coordinators and controllers")
    client_kills: int = option(25, "kill -9 of copiers")
    copiers: int = option(4, "processes that copy")
    library: str = option("confluent", "what the copiers use", choices=LIBRARIES)
    protocol: str = option("classic", "of the group", choices=("classic", "consumer"))
    batch: int = option(100, "messages of a transaction at most")

    def faults(self, chance: random.Random) -> list[str]:
        kinds = [BROKER] * self.broker_kills + [CLIENT] * self.client_kills
        chance.shuffle(kinds)
        return kinds


class Campaign(ClusterCampaign[Plan]):
    node_settings = NODE_SETTINGS
    anomalies = ANOMALIES
    compared_topics = PARTITIONS

    def __init__(self, folder: Path, plan: Plan, say: Say = silent) -> None:
        super().__init__(folder, plan, say)
        self._history = History(folder / "history.jsonl")
        self._progress = Progress()
        self._copiers = {slot: self._copier(slot) for slot in range(1, plan.copiers + 1)}
        self._restarts = 0  # of copiers that gave up on their own
        self._sent = 0

    def _copier(self, slot: int) -> ChildProcess:
        job = Job(
            servers=self.servers,
            slot=slot,
            library=self.plan.library,
            protocol=self.plan.protocol,
            batch=self.plan.batch,
            journal=str(self.folder / f"copier-{slot}.jsonl"),
        )
        return ChildProcess("tests.chaos.copier.worker", [job.as_text()], self.folder / f"copier-{slot}.log")

    def prepare(self) -> None:
        create_topics(self.cluster.direct_servers, self.plan.nodes, PARTITIONS)

    @contextlib.contextmanager
    def clients(self) -> Iterator[None]:
        """Copiers, and a reader of what they have committed. In the end the copiers are killed."""
        common = (self.servers, self._history, self._progress)
        tail = Tail(TARGET, *common, partitions=TARGETS)
        tail.start()
        for copier in self._copiers.values():
            copier.launch()
        try:
            yield
        finally:
            for copier in self._copiers.values():
                copier.kill()
            tail.stop()
            tail.join(RECOVERY_S)

    def fire_faults(self) -> None:
        idempotence = {"enable.idempotence": True, "linger.ms": 2, "request.timeout.ms": 2000}
        producer = Producer({**OPTIONS, **idempotence, "bootstrap.servers": self.servers})
        kinds = self.plan.faults(self.chance)
        portions = _portions(self.plan.messages, len(kinds) + 1)
        self._send(producer, portions[0])
        self._await(self._sent)
        before = self._progress.delivered
        for kind, portion in zip(kinds, portions[1:], strict=True):
            early = self.chance.randrange(portion)
            self._send(producer, early)
            time.sleep(self.chance.uniform(0, 0.2))
            self._strike(kind, lambda: self._send(producer, portion - early))  # noqa: B023
            if self.chance.random() < 0.8:
                self.await_whole()
            self.outcome.work_between.append(self._progress.delivered - before)
            before = self._progress.delivered

    def _send(self, producer: Producer, count: int) -> None:
        """Wait for the acknowledgements: the producer is not what is tested here."""
        for number in range(self._sent, self._sent + count):
            producer.produce(SOURCE, b"%d" % number, b"%d" % (number % KEYS), source_of(number))
            producer.poll(0)
        assert producer.flush(RECOVERY_S) == 0, "messages were not taken in"
        self._sent += count

    def _await(self, delivered: int) -> None:
        def is_there() -> bool:
            self._revive()
            return self._progress.delivered >= delivered

        try:
            eventually(is_there, within_s=RECOVERY_S, what=f"{delivered} messages copied")
        except AssertionError as error:
            raise AssertionError(f"{error}; {self._state()}") from None

    def _revive(self) -> None:
        """Start copiers again that have ended because their producer can never be used again."""
        for copier in self._copiers.values():
            if copier.exit_code is not None:
                self._restarts += 1
                self.say("a copier has given up and starts again")
                copier.kill()
                copier.launch()
        self.look_after_nodes()

    def _state(self) -> str:
        for copier in self._copiers.values():
            if copier.is_running:
                copier.show_stack()
        open_ones = leftovers.open_transactions(self.observer)
        return f"{self._progress.delivered} of {self._sent}; wrong: {self.observer.what_is_wrong()}; open: {open_ones}"

    def _strike(self, kind: str, more: Callable[[], None]) -> None:
        """There is `more` to do while the victim is dead."""
        began = time.monotonic()
        if kind == BROKER:
            self.kill_one_of(BROKER, self._victims(), more)
        else:
            self._kill_copier(more)
        self._await(self._sent)
        self.outcome.recovery_s[kind].append(time.monotonic() - began)

    def _victims(self) -> Victims:
        observer, slot = self.observer, self.chance.choice(list(self._copiers))
        return {
            "leader": (35, lambda: observer.leader_of(TARGET, self.chance.randrange(TARGETS))),
            "transaction coordinator": (30, lambda: observer.coordinator(OF_TRANSACTION, f"copier-{slot}")),
            "group coordinator": (20, lambda: observer.coordinator(OF_GROUP, GROUP)),
            "controller": (15, observer.controller),
        }

    def _kill_copier(self, more: Callable[[], None]) -> None:
        slot = self.chance.choice(list(self._copiers))
        self.say(f"kill of copier {slot}")
        self._copiers[slot].kill()
        more()
        if self.chance.random() < 0.5:
            time.sleep(self.chance.uniform(1.0, 5.0))
        self._copiers[slot].launch()
        self.outcome.fired[CLIENT] += 1

    def _look_for_leftovers(self) -> None:
        """One more transaction is left open by a producer that is gone: its time must run out too."""
        self.await_whole()
        leftovers.abandon(self.servers, TARGET, timeout_ms=3000)
        with contextlib.suppress(AssertionError):
            eventually(lambda: not self._left())
        for words in self._left():
            self.findings.add(HANGING, words)
        for words in leftovers.behind(self.servers, GROUP, SOURCE, SOURCES):
            self.findings.add(POSITION, words)

    def _left(self) -> list[str]:
        topics = {
            (topic, partition)
            for view in self.observer.views().values()
            for topic, partition in view.partitions
        }
        held = leftovers.held_back(self.servers, sorted(topics))
        return leftovers.open_transactions(self.observer) + held

    def read_everything(self) -> None:
        with self.noted():
            self._look_for_leftovers()
        last = Last(TARGET, self.servers, self._history, self._progress, partitions=TARGETS)
        last.start()
        last.join(JOIN_S)

    def close(self) -> None:
        for copier in self._copiers.values():
            copier.kill()
        self._history.close()

    def judge(self) -> None:
        final, meanwhile = rows_by_reader(read(self._history.path))
        judge(final, self._sent, self.findings)
        compare(final, meanwhile, self.findings)
        transactions, reasons = self._count_transactions()
        self.outcome.figures |= {
            "messages": len(final),
            "copiers": f"{self.plan.library}, {self.plan.protocol} group",
            "copiers that gave up": self._restarts,
            **dict(sorted(transactions.items())),
            **dict(reasons.most_common()),
        }

    def _count_transactions(self) -> tuple[Counter[str], Counter[str]]:
        """What the copiers saw of their transactions, and why they aborted them or gave up."""
        transactions: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        for journal in self.folder.glob("copier-*.jsonl"):
            for line in journal.read_text().splitlines():
                with contextlib.suppress(ValueError):  # a kill may tear the last line
                    _, event, count, words = json.loads(line)
                    transactions[event] += 1
                    transactions[f"messages {event}"] += count
                    if words:
                        reasons[f"{event}: {words}"] += 1
        return transactions, reasons


def _portions(total: int, count: int) -> list[int]:
    return [total * (n + 1) // count - total * n // count for n in range(count)]
