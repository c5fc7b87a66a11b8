"""`--campaign share`: workers and nodes are killed; each record is accepted, rejected or dead-lettered once."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Message, Producer
from confluent_kafka.admin import AdminClient
from tests.chaos.campaign import RECOVERY_S, ClusterCampaign, Victims
from tests.chaos.children import ChildProcess
from tests.chaos.command import ClusterPlan, Say, option, silent
from tests.chaos.metrics import total
from tests.chaos.readers import read_whole
from tests.chaos.share.journals import Journals, RecordPosition
from tests.chaos.share.judge import ANOMALIES, DeadLetter, Source, judge
from tests.chaos.share.worker import GROUP, LIMIT, LOCK_S, PARTITIONS, TOPIC, Job
from tests.chaos.share_consumers import NODE_SETTINGS, SESSION_MS, STATE_SHARDS, STATE_TOPIC, lags
from tests.chaos.view import OF_GROUP
from tests.chaos.workload import CLIENT, create_topics
from tests.compat.share import configure
from tests.waiting import eventually

BROKER, WORKER = "broker kill", "worker kill"
DEAD_LETTERS = f"{TOPIC}.dlq"
DRAIN_S = 180.0
GROUP_SETTINGS = {
    "penstock_share_backoff": "fixed",
    "penstock_share_backoff_ms": "50",
    "share_auto_offset_reset": "earliest",
    "share_delivery_count_limit": str(LIMIT),
    "share_record_lock_duration_ms": str(int(LOCK_S * 1000)),
    "share_session_timeout_ms": SESSION_MS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ClusterPlan):
    messages: int = option(30_000, "messages to work on")
    broker_kills: int = option(25, "kill -9 of leaders, coordinators and controllers")
    worker_kills: int = option(25, "kill -9 of workers, besides the crashes that workers cause themselves")
    workers: int = option(4, "processes that share the work")
    batch: int = option(40, "messages that a worker takes at a time at most")


class Campaign(ClusterCampaign[Plan]):
    node_settings = NODE_SETTINGS
    anomalies = ANOMALIES

    def __init__(self, folder: Path, plan: Plan, say: Say = silent) -> None:
        super().__init__(folder, plan, say)
        self._journals = Journals([folder / f"worker-{n}.jsonl" for n in range(plan.workers)])
        self._workers = [self._worker(folder, n) for n in range(plan.workers)]
        self._crashes = 0
        self._sent = 0
        self._source: dict[RecordPosition, Source] = {}
        self._dead_letters: list[DeadLetter] = []

    def _worker(self, folder: Path, number: int) -> ChildProcess:
        job = Job(
            servers=self.servers,
            journal=str(folder / f"worker-{number}.jsonl"),
            seed=self.plan.seed + number,
            batch=self.plan.batch,
        )
        return ChildProcess("tests.chaos.share.worker", [job.as_text()], folder / f"worker-{number}.log")

    def prepare(self) -> None:
        create_topics(self.cluster.direct_servers, self.plan.nodes, {TOPIC: PARTITIONS})
        admin = AdminClient({**CLIENT, "bootstrap.servers": self.cluster.direct_servers})
        configure(admin, GROUP, **GROUP_SETTINGS)

    @contextlib.contextmanager
    def clients(self) -> Iterator[None]:
        for worker in self._workers:
            worker.launch()
        try:
            yield
        finally:
            for worker in self._workers:
                worker.kill()

    def fire_faults(self) -> None:
        producer = Producer(
            {
                **CLIENT,
                "bootstrap.servers": self.servers,
                "enable.idempotence": True,
                "linger.ms": 2,
                "request.timeout.ms": 2000,
            }
        )
        kinds = [BROKER] * self.plan.broker_kills + [WORKER] * self.plan.worker_kills
        self.chance.shuffle(kinds)
        portion = self.plan.messages // (len(kinds) + 1)
        self._send(producer, self.plan.messages - portion * len(kinds))
        self._await_work("start", portion // 2)
        for kind in kinds:
            self._send(producer, portion // 2)
            time.sleep(self.chance.uniform(0, 0.3))
            self._strike(kind, portion // 4, lambda: self._send(producer, portion - portion // 2))
        self._await_end()

    def _send(self, producer: Producer, count: int) -> None:
        """Wait for the acknowledgements: the producer is not what is tested here."""
        for number in range(self._sent, self._sent + count):
            headers: list[tuple[str, str | bytes | None]] = [("trace", b"%d" % number)]
            place = {"partition": number % PARTITIONS, "headers": headers}
            producer.produce(TOPIC, b"%d" % number, b"key %d" % number, **place)
            producer.poll(0)
        assert producer.flush(RECOVERY_S) == 0, "messages were not taken in"
        self._sent += count

    def _strike(self, kind: str, work: int, more: Callable[[], None]) -> None:
        """There is `more` to do while the victim is dead, and more than `work` of it must be done."""
        began, before = time.monotonic(), self._stored()
        if kind == BROKER:
            self.kill_one_of(BROKER, self._victims(), more)
        else:
            number = self.chance.randrange(len(self._workers))
            self.say(f"kill of worker {number}")
            self._workers[number].kill()
            more()
            self._workers[number].launch()
            self.outcome.fired[WORKER] += 1
        self._await_work(kind, before + work)
        self.outcome.recovery_s[kind].append(time.monotonic() - began)
        if self.chance.random() < 0.7:
            self.await_whole()
        self.outcome.work_between.append(self._stored() - before)

    def _victims(self) -> Victims:
        observer, chance = self.observer, self.chance
        return {
            "leader of the topic": (30, lambda: observer.leader_of(TOPIC, chance.randrange(PARTITIONS))),
            "share coordinator": (
                35,
                lambda: observer.leader_of(STATE_TOPIC, chance.randrange(STATE_SHARDS)),
            ),
            "leader of dead letters": (
                15,
                lambda: observer.leader_of(DEAD_LETTERS, chance.randrange(PARTITIONS)),
            ),
            "group coordinator": (10, lambda: observer.coordinator(OF_GROUP, GROUP)),
            "controller": (10, observer.controller),
        }

    def _stored(self) -> int:
        """Outcomes of which workers know that they are stored."""
        self._journals.read()
        return self._journals.stored

    def _await_work(self, kind: str, stored: int) -> None:
        def is_done() -> bool:
            self._look_after()
            return self._stored() >= stored

        try:
            eventually(is_done, within_s=RECOVERY_S, what=f"{stored} outcomes after {kind}")
        except AssertionError as error:
            raise AssertionError(f"{error}; {self._state()}") from None

    def _look_after(self) -> None:
        """Some workers crash on purpose; start them again."""
        self.look_after_nodes()
        for worker in self._workers:
            if worker.exit_code is not None:
                self._crashes += 1
                worker.kill()
                worker.launch()

    def _state(self) -> str:
        for worker in self._workers:
            if worker.is_running:
                worker.show_stack()
        lag = lags(self.observer, GROUP)
        wrong = self.observer.what_is_wrong()
        return f"stored {self._stored()}, sent {self._sent}, lags {lag}, wrong: {wrong}"

    def _await_end(self) -> None:
        """Wait until every record is final and all dead letters are written."""

        def is_over() -> bool:
            self._look_after()
            behind = lags(self.observer, GROUP)
            return len(behind) == PARTITIONS and not any(behind.values())

        try:
            eventually(is_over, within_s=DRAIN_S, what="all records final")
            eventually(
                lambda: total(self.metrics_addresses, "penstock_dead_letters_pending") == 0,
                within_s=RECOVERY_S,
                what="all dead letters written",
            )
        except AssertionError as error:
            raise AssertionError(f"{error}; {self._state()}") from None

    def read_everything(self) -> None:
        servers = self.servers
        self.await_whole()
        for message in read_whole(servers, TOPIC, "read_committed"):
            self._source[_position(message)] = _source(message)
        assert len(self._source) == self._sent, f"{len(self._source)} of {self._sent} are there"
        self._dead_letters = [_dead_letter(m) for m in read_whole(servers, DEAD_LETTERS, "read_uncommitted")]
        again = [_dead_letter(m) for m in read_whole(servers, DEAD_LETTERS, "read_committed")]
        assert sorted(again, key=repr) == sorted(self._dead_letters, key=repr), (
            "readers see different dead letters"
        )

    def judge(self) -> None:
        journals, figures = self._journals, self.outcome.figures
        journals.read()
        judge(self._source, journals.deliveries, self._dead_letters, self.findings)
        figures["messages"] = self._sent
        figures["deliveries"] = journals.delivered
        figures["redeliveries"] = journals.delivered - len(journals.deliveries)
        figures["outcomes known to be stored"] = journals.stored
        figures["crashes that workers caused themselves"] = self._crashes
        counts = Counter(
            f"dead letters: {letter.reason} (after {letter.delivery} deliveries)"
            for letter in self._dead_letters
        )
        figures.update(sorted(counts.items()))
        figures.update(Counter(f"replies to workers: {words}" for words in journals.unknown).most_common(8))


def _position(message: Message) -> RecordPosition:
    partition, offset = message.partition(), message.offset()
    assert partition is not None
    assert offset is not None
    return RecordPosition(partition, offset)


def _source(message: Message) -> Source:
    return Source(int(message.value() or b"-1"), message.key(), message.timestamp()[1])


def _dead_letter(message: Message) -> DeadLetter:
    headers = {name: (value or b"").decode() for name, value in message.headers() or ()}
    return DeadLetter(message.partition() or 0, message.value(), message.key(), headers)
