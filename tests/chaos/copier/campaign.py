"""Exactly once: copiers and nodes are killed in the middle of transactions, and every message is there once.

Messages come in as many portions as there are faults, and each fault hits while its portion is being copied. The next
one waits until a reader of committed records has got the whole portion, so that there is work between all faults.
"""

import contextlib
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import Producer
from tests.chaos import disks
from tests.chaos.checker import Findings
from tests.chaos.children import ChildProcess
from tests.chaos.copier import leftovers
from tests.chaos.copier.judge import HANGING, POSITION, compare, judge, rows_by_reader
from tests.chaos.copier.worker import (
    GROUP,
    KEYS,
    SOURCE,
    SOURCES,
    TARGET,
    TARGETS,
    Job,
    source_of,
)
from tests.chaos.history import History, read
from tests.chaos.readers import Last, Tail
from tests.chaos.view import OF_GROUP, OF_TRANSACTION, Observer
from tests.chaos.workload import CLIENT as OPTIONS
from tests.chaos.workload import Progress, create_topics, pick
from tests.clusters import ClusterProcesses
from tests.waiting import eventually

BROKER, CLIENT = "broker kill", "client kill"
LEADER, TRANSACTIONS, GROUPS, CONTROLLER = (
    "leader",
    "transaction coordinator",
    "group coordinator",
    "controller",
)
VICTIMS = {LEADER: 35, TRANSACTIONS: 30, GROUPS: 20, CONTROLLER: 15}
RECOVERY_S = 90.0
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
class Plan:
    messages: int = 100_000
    broker_kills: int = 25
    client_kills: int = 25
    copiers: int = 4
    library: str = "confluent"
    protocol: str = "classic"
    batch: int = 100
    seed: int = 0
    nodes: int = 3
    settings: dict[str, str] = field(default_factory=dict)

    def faults(self, chance: random.Random) -> list[str]:
        kinds = [BROKER] * self.broker_kills + [CLIENT] * self.client_kills
        chance.shuffle(kinds)
        return kinds


@dataclass(slots=True)
class Result:
    seed: int
    library: str
    protocol: str
    messages: int = 0
    duration_s: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    transactions: Counter[str] = field(
        default_factory=Counter
    )  # committed and aborted, as the copiers saw it
    reasons: Counter[str] = field(default_factory=Counter)  # why copiers aborted or gave up
    restarts: int = 0  # of copiers that gave up by themselves
    delivered_between: list[int] = field(default_factory=list)  # messages, from each fault to the next
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    anomalies: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.anomalies and not self.problems

    @property
    def least_work(self) -> int:
        return min(self.delivered_between, default=0)


class Campaign:
    def __init__(self, folder: Path, plan: Plan, say: Callable[[str], None] = lambda words: None) -> None:
        self._folder = folder
        self._plan = plan
        self._say = say
        self._chance = random.Random(plan.seed)
        self._result = Result(seed=plan.seed, library=plan.library, protocol=plan.protocol)
        settings = {**NODE_SETTINGS, **plan.settings}
        self._cluster = ClusterProcesses(folder, count=plan.nodes, settings=settings)
        self._observer = Observer(self._cluster)
        self._history = History(folder / "history.jsonl")
        self._progress = Progress()
        self._findings = Findings()
        self._copiers = {slot: self._copier(slot) for slot in range(1, plan.copiers + 1)}
        self._sent = 0

    def _copier(self, slot: int) -> ChildProcess:
        job = Job(
            servers=self._cluster.bootstrap_servers,
            slot=slot,
            library=self._plan.library,
            protocol=self._plan.protocol,
            batch=self._plan.batch,
            journal=str(self._folder / f"copier-{slot}.jsonl"),
        )
        return ChildProcess("tests.chaos.copier.worker", [job.as_text()], self._folder / f"copier-{slot}.log")

    def run(self) -> Result:
        began = time.monotonic()
        try:
            with self._noted():
                self._cluster.start()
                create_topics(self._cluster.direct_servers, self._plan.nodes, PARTITIONS)
                with self._clients():
                    self._fire_all()
            with self._noted():
                self._look_for_leftovers()
            with self._noted():
                self._read_all()
                self._stop()
        finally:
            self._end()
        self._judge()
        self._result.duration_s = time.monotonic() - began
        return self._result

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """What ends the faults does not end the campaign: what is there is still read and judged."""
        try:
            yield
        except AssertionError as error:
            self._result.problems.append(f"{error}" + (f": {error.__cause__!r}" if error.__cause__ else ""))

    @contextlib.contextmanager
    def _clients(self) -> Iterator[None]:
        """Copiers, and a reader of what they have committed. In the end the copiers are killed, as ever."""
        common = (self._cluster.bootstrap_servers, self._history, self._progress)
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

    def _fire_all(self) -> None:
        idempotence = {"enable.idempotence": True, "linger.ms": 2, "request.timeout.ms": 2000}
        producer = Producer({**OPTIONS, **idempotence, "bootstrap.servers": self._cluster.bootstrap_servers})
        kinds = self._plan.faults(self._chance)
        portions = _portions(self._plan.messages, len(kinds) + 1)
        self._send(producer, portions[0])
        self._await(self._sent)
        before = self._progress.delivered
        for kind, portion in zip(kinds, portions[1:], strict=True):
            early = self._chance.randrange(portion)
            self._send(producer, early)
            time.sleep(self._chance.uniform(0, 0.2))
            self._strike(kind, lambda: self._send(producer, portion - early))  # noqa: B023
            if self._chance.random() < 0.8:
                self._await_whole()
            self._result.delivered_between.append(self._progress.delivered - before)
            before = self._progress.delivered

    def _send(self, producer: Producer, count: int) -> None:
        """What goes in is not what is tested here: it waits for its acknowledgement."""
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
        """Copiers whose producer can never be used again end themselves, and begin anew."""
        for copier in self._copiers.values():
            if copier.exit_code is not None:
                self._result.restarts += 1
                self._say("a copier has given up and begins anew")
                copier.kill()
                copier.launch()
        for node in self._cluster.nodes.values():
            if (code := node.exit_code) is not None:
                self._result.problems.append(
                    f"node {node.node_id} has died by itself ({code}):\n{''.join(list(node.output)[-30:])}"
                )
                node.kill()
                node.launch()

    def _state(self) -> str:
        for copier in self._copiers.values():
            if copier.is_running:
                copier.show_stack()
        open_ones = leftovers.open_transactions(self._observer)
        return f"{self._progress.delivered} of {self._sent}; wrong: {self._observer.what_is_wrong()}; open: {open_ones}"

    def _strike(self, kind: str, more: Callable[[], None]) -> None:
        """There is `more` to do while the victim is dead."""
        began, revive = time.monotonic(), self._kill_node() if kind == BROKER else self._kill_copier()
        more()
        if self._chance.random() < 0.5:  # or it is back before anyone noticed
            time.sleep(self._chance.uniform(1.0, 5.0))
        revive()
        self._result.fired[kind] += 1
        self._await(self._sent)
        self._result.recovery_s[kind].append(time.monotonic() - began)

    def _kill_node(self) -> Callable[[], object]:
        shape = pick(self._chance, VICTIMS)
        node = self._cluster.nodes[self._victim(shape)]
        self._say(f"kill of node {node.node_id} ({shape})")
        self._result.shapes[shape] += 1
        node.kill()
        return node.launch

    def _victim(self, shape: str) -> int:
        slot = self._chance.choice(list(self._copiers))
        found = {
            LEADER: lambda: self._observer.leader_of(TARGET, self._chance.randrange(TARGETS)),
            TRANSACTIONS: lambda: self._observer.coordinator(OF_TRANSACTION, f"copier-{slot}"),
            GROUPS: lambda: self._observer.coordinator(OF_GROUP, GROUP),
            CONTROLLER: self._observer.controller,
        }[shape]()
        return found if found in self._cluster.nodes else self._chance.choice(list(self._cluster.nodes))

    def _kill_copier(self) -> Callable[[], object]:
        slot = self._chance.choice(list(self._copiers))
        self._say(f"kill of copier {slot}")
        self._copiers[slot].kill()
        return self._copiers[slot].launch

    def _await_whole(self) -> None:
        eventually(
            lambda: not self._observer.what_is_wrong(), within_s=RECOVERY_S, what="all replicas in sync"
        )

    def _look_for_leftovers(self) -> None:
        """One more transaction is left open by a producer that is gone: its time must run out too."""
        self._await_whole()
        leftovers.abandon(self._cluster.bootstrap_servers, TARGET, timeout_ms=3000)
        with contextlib.suppress(AssertionError):
            eventually(lambda: not self._left())
        for words in self._left():
            self._findings.add(HANGING, words)
        for words in leftovers.behind(self._cluster.bootstrap_servers, GROUP, SOURCE, SOURCES):
            self._findings.add(POSITION, words)

    def _left(self) -> list[str]:
        topics = {
            (topic, partition)
            for view in self._observer.views().values()
            for topic, partition in view.partitions
        }
        held = leftovers.held_back(self._cluster.bootstrap_servers, sorted(topics))
        return leftovers.open_transactions(self._observer) + held

    def _read_all(self) -> None:
        common = (self._cluster.bootstrap_servers, self._history, self._progress)
        last = Last(TARGET, *common, partitions=TARGETS)
        last.start()
        last.join(JOIN_S)

    def _stop(self) -> None:
        codes = self._cluster.stop()
        self._result.problems += [f"node {n} ended with {code}" for n, code in codes.items() if code]
        folders = {node.node_id: node.data_dir for node in self._cluster.nodes.values()}
        self._result.problems += disks.differences(folders, PARTITIONS)

    def _end(self) -> None:
        for copier in self._copiers.values():
            copier.kill()
        self._cluster.kill()
        self._history.close()

    def _judge(self) -> None:
        final, meanwhile = rows_by_reader(read(self._history.path))
        judge(final, self._sent, self._findings)
        compare(final, meanwhile, self._findings)
        self._result.messages = len(final)
        self._result.anomalies = dict(self._findings.counts)
        self._result.examples = dict(self._findings.examples)
        for journal in self._folder.glob("copier-*.jsonl"):
            self._count(journal)

    def _count(self, journal: Path) -> None:
        for line in journal.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a kill may tear the last line
                _, event, count, words = json.loads(line)
                self._result.transactions[event] += 1
                self._result.transactions[f"messages {event}"] += count
                if words:
                    self._result.reasons[f"{event}: {words}"] += 1


def _portions(total: int, count: int) -> list[int]:
    return [total * (n + 1) // count - total * n // count for n in range(count)]
