"""`--campaign once`: members, processes and nodes are killed at every point of the protocol; nothing comes twice.

First members die only at points where it is known what the broker knows, so that its loss counter can be checked to
the record. Then members, processes of share consumers and nodes die. In between there are calm rounds without
kills, in which nothing may be lost.
"""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient
from tests.chaos.campaign import RECOVERY_S, ClusterCampaign, Victims
from tests.chaos.children import ChildProcess
from tests.chaos.command import ClusterPlan, Say, option, silent
from tests.chaos.metrics import total
from tests.chaos.once.helpers import GROUP, PARTITIONS, TOPIC, Feeder, Repeated, place_of
from tests.chaos.once.lanes import Book, Lane, Lanes
from tests.chaos.once.points import ALL, DEFINITE, NO_KILL, Target
from tests.chaos.readers import read_whole
from tests.chaos.share.journals import Journals, RecordPosition
from tests.chaos.share.worker import Job
from tests.chaos.share_consumers import (
    NODE_SETTINGS,
    SESSION_MS,
    STATE_SHARDS,
    STATE_TOPIC,
    lags,
    share_consumer,
)
from tests.chaos.view import OF_GROUP
from tests.chaos.workload import CLIENT, create_topics
from tests.compat.share import configure
from tests.waiting import eventually

BROKER, WORKER, POINT = "broker kill", "process kill", "kill point"
DOUBLED = "delivered twice"
COUNTED_WRONGLY = "counted wrongly"  # the loss counter is not what was produced and not delivered
LOST_IN_CALM = "lost without a kill"
UNEXPECTED = "unexpected"  # a record that is not there, or said to be delivered before
ANOMALIES = (DOUBLED, LOST_IN_CALM, COUNTED_WRONGLY, UNEXPECTED)
GROUP_SETTINGS = {
    "penstock_share_delivery": "at-most-once",
    "share_auto_offset_reset": "earliest",
    # Longer than a member on a busy machine takes to acknowledge: in calm rounds every record must be confirmed.
    "share_record_lock_duration_ms": "15000",
    "share_session_timeout_ms": SESSION_MS,
}
CALM = 200
DRAIN_S = 90.0
LOOK_S = 0.2
WORK = 40  # records confirmed between two kills of nodes at least
#: A process is killed so long after another.
PROCESS_PACE_S = (0.2, 1.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ClusterPlan):
    points: int = option(10_000, "kill points, those of processes and nodes among them")
    broker_kills: int = option(50, "kill -9 of leaders, coordinators and controllers")
    process_kills: int = option(200, "kill -9 of processes of share consumers")
    calm_rounds: int = option(5, "rounds without any kill, in which nothing may be lost")
    lanes: int = option(24, "raw members at a time")
    processes: int = option(4, "processes of share consumers at a time")


class Campaign(ClusterCampaign[Plan]):
    node_settings = NODE_SETTINGS
    anomalies = ANOMALIES

    def __init__(self, folder: Path, plan: Plan, say: Say = silent) -> None:
        super().__init__(folder, plan, say)
        self._book = Book()
        names = [f"worker-{n}" for n in range(plan.processes)]
        self._journals = Journals([folder / f"{name}.jsonl" for name in names])
        self._workers = [self._worker(folder, name) for name in names]
        self._topic_id = uuid.UUID(int=0)
        self._targets: dict[int, Target] = {}
        self._lanes = Lanes([])
        self._feeder = Feeder(self.servers, self._lag)
        self._produced: set[RecordPosition] = set()
        self._exact: dict[str, float] = {}

    def _worker(self, folder: Path, name: str) -> ChildProcess:
        job = Job(
            servers=self.servers,
            journal=str(folder / f"{name}.jsonl"),
            seed=self.plan.seed,
            batch=10,
            group=GROUP,
            topic=TOPIC,
            accepts_all=True,
        )
        return ChildProcess("tests.chaos.share.worker", [job.as_text()], folder / f"{name}.log")

    def fire_faults(self) -> None:
        self._kill_members()
        self._kill_all()
        self._drain()
        self._judge_counters(self.outcome.figures)

    # -- what is there before the first kill ---------------------------------------------------------

    def prepare(self) -> None:
        cluster = self.cluster
        create_topics(cluster.direct_servers, self.plan.nodes, {TOPIC: PARTITIONS})
        admin = AdminClient({**CLIENT, "bootstrap.servers": cluster.direct_servers})
        configure(admin, GROUP, **GROUP_SETTINGS)
        first = share_consumer(cluster.bootstrap_servers, GROUP, TOPIC)
        eventually(
            lambda: first.poll(0.2) is not None and len(lags(self.observer, GROUP)) == PARTITIONS,
            within_s=RECOVERY_S,
            what="a group that has all partitions",
        )
        first.close()
        self._topic_id = _topic_id(admin)

    def _find(self, partition: int) -> Target | None:
        return self._targets.get(partition)

    def _see_leaders(self) -> None:
        view = self.observer.newest()
        if view is None:
            return
        for partition in range(PARTITIONS):
            state = view.partitions.get((TOPIC, partition))
            if state is not None and state.leader in self.cluster.nodes:
                address = self.cluster.nodes[state.leader].direct_address
                self._targets[partition] = Target(address, GROUP, self._topic_id, partition)

    def _lag(self) -> int | None:
        found = lags(self.observer, GROUP)
        return sum(found.values()) if len(found) == PARTITIONS and min(found.values()) >= 0 else None

    @contextlib.contextmanager
    def clients(self) -> Iterator[None]:
        self._see_leaders()
        self._lanes = Lanes(
            [Lane(n, self.plan.seed, self._find, self._book, PARTITIONS) for n in range(self.plan.lanes)]
        )
        self._feeder.start()
        try:
            yield
        finally:
            self._feeder.stopping.set()
            self._lanes.end()
            for worker in self._workers:
                worker.kill()
            self._feeder.join(RECOVERY_S)

    # -- what dies -----------------------------------------------------------------------------------

    def _kill_members(self) -> None:
        """A quarter of the points, where it is known what the broker knows: its counters are exact."""
        wanted = self.plan.points // 4
        self._feeder.going.set()
        self._lanes.go(DEFINITE)
        within_s = max(RECOVERY_S, wanted / 5)
        self._await(lambda: self._book.points_count >= wanted, f"{wanted} kill points", within_s=within_s)
        self._calm_round()
        figures = self._counters()
        produced, book = self._feeder.sent, self._book
        self._exact = {
            "produced before nodes were killed": produced,
            "delivered and confirmed by then": book.confirmed,
            "in doubt then": book.doubtful,
            "loss counter then": figures["unconfirmed"],
        }
        lost = produced - book.confirmed
        # None is in doubt, unless a broker was too slow to answer.
        if not lost - book.doubtful <= figures["unconfirmed"] <= lost:
            self.findings.add(COUNTED_WRONGLY, f"{self._exact}, {book.doubtful} in doubt: {figures}")

    def _kill_all(self) -> None:
        plan = self.plan
        rounds = max(plan.calm_rounds - 1, 1)
        for number in range(rounds):
            brokers = _portion(plan.broker_kills, rounds, number)
            processes = _portion(plan.process_kills, rounds, number)
            upto = plan.points * (number + 1) // rounds
            self._storm(brokers, processes, upto)
            self.await_whole()
            self._calm_round()

    def _storm(self, brokers: int, processes: int, points: int) -> None:
        for worker in self._workers:
            worker.launch()
        self._feeder.going.set()
        self._lanes.go(ALL)
        killer = Repeated(self._kill_process, processes, PROCESS_PACE_S, self.plan.seed)
        killer.start()
        for _ in range(brokers):
            began, before = time.monotonic(), self._confirmed()
            self.kill_one_of(BROKER, self._victims())
            self._await(lambda: self._confirmed() >= before + WORK, "work after a kill")  # noqa: B023
            self.outcome.recovery_s[BROKER].append(time.monotonic() - began)
            if self.chance.random() < 0.6:
                self.await_whole()
            self.outcome.work_between.append(self._confirmed() - before)
        self._await(lambda: killer.is_done, "kills of processes", within_s=20 + 4.0 * processes)
        killer.check()
        self._await(lambda: self._points() >= points, f"{points} kill points", within_s=400)
        for worker in self._workers:
            worker.kill()

    def _kill_process(self) -> None:
        worker = self.chance.choice(self._workers)
        worker.kill()
        worker.launch()
        self.outcome.fired[WORKER] += 1

    def _victims(self) -> Victims:
        observer, chance = self.observer, self.chance
        return {
            "leader of the topic": (40, lambda: observer.leader_of(TOPIC, chance.randrange(PARTITIONS))),
            "share coordinator": (
                40,
                lambda: observer.leader_of(STATE_TOPIC, chance.randrange(STATE_SHARDS)),
            ),
            "group coordinator": (10, lambda: observer.coordinator(OF_GROUP, GROUP)),
            "controller": (10, observer.controller),
        }

    def _points(self) -> int:
        fired = self.outcome.fired
        return self._book.points_count + fired[BROKER] + fired[WORKER]

    def _confirmed(self) -> int:
        self._journals.read()
        return self._book.confirmed + self._journals.stored

    def _look_after(self) -> None:
        self.look_after_nodes()
        self._lanes.check()
        if self._feeder.failure is not None:
            raise AssertionError("the feeder has failed") from self._feeder.failure
        self._see_leaders()

    def _await(self, is_done: Callable[[], bool], what: str, within_s: float = RECOVERY_S) -> None:
        def check() -> bool:
            time.sleep(LOOK_S)  # to look is work for the nodes, too
            self._look_after()
            return is_done()

        try:
            eventually(check, within_s=within_s, what=what)
        except AssertionError as error:
            wrong = self.observer.what_is_wrong()
            words = f"{error}; points {self._points()}; lags {lags(self.observer, GROUP)}; {wrong}"
            raise AssertionError(f"{words}; {self._book.broken}") from error.__cause__

    # -- without any kill ----------------------------------------------------------------------------

    def _drain(self) -> None:
        """Without kills: wait until all records are handed out."""
        self._feeder.rest()
        self._lanes.rest()
        self._lanes.go({NO_KILL: 1})
        # Described as it is stored, so it may still be on its way.
        self._await(lambda: self._lag() == 0, "the end of the backlog", within_s=DRAIN_S)
        self._lanes.rest()

    def _calm_round(self) -> None:
        self._drain()
        first = self._feeder.sent
        self._feeder.feed(CALM)
        self._drain()
        missing = [number for number in range(first, first + CALM) if place_of(number) not in self._book.calm]
        self.say(f"calm round: {CALM - len(missing)} of {CALM}; {self._points()} points")
        for number in missing:
            received = self._book.received.get(place_of(number), "received by no raw member")
            self.findings.add(LOST_IN_CALM, f"{place_of(number)} was not delivered and confirmed: {received}")

    # -- the verdict ---------------------------------------------------------------------------------

    def _counters(self) -> dict[str, float]:
        """Summed over all nodes."""
        self.await_whole()
        names = ("handed_out", "confirmed", "unconfirmed", "expired")

        def read() -> dict[str, float]:
            found = {
                name: total(self.metrics_addresses, "penstock_share_record_totals", group=GROUP, event=name)
                for name in names
            }
            assert found["handed_out"] == self._feeder.sent, found
            return found

        return eventually(read, what=f"{self._feeder.sent} handed out by the counters")

    def _judge_counters(self, figures: dict[str, float]) -> None:
        counters = self._counters()
        self._journals.read()
        known, doubtful = (
            self._confirmed(),
            self._book.doubtful + self._journals.delivered - self._journals.stored,
        )
        produced = self._feeder.sent
        figures.update(self._exact)
        figures["produced"] = produced
        figures["delivered"] = len(self._book.received) + len(self._journals.deliveries)
        figures["delivered, and known to be confirmed"] = known
        figures["delivered, and unknown whether confirmed"] = doubtful
        figures.update({f"counter: {name}": value for name, value in counters.items()})
        if not produced - known - doubtful <= counters["unconfirmed"] <= produced - known:
            self.findings.add(COUNTED_WRONGLY, f"{counters}, {known} known, {doubtful} in doubt")
        if counters["confirmed"] + counters["unconfirmed"] != produced or counters["expired"]:
            self.findings.add(COUNTED_WRONGLY, f"{counters} of {produced}")

    def read_everything(self) -> None:
        self.await_whole()
        for message in read_whole(self.servers, TOPIC, "read_committed"):
            place, value = (
                RecordPosition(message.partition() or 0, message.offset() or 0),
                message.value() or b"",
            )
            self._produced.add(place)
            if place_of(int(value)) != place:
                self.findings.add(UNEXPECTED, f"{int(value)} is at {place}")

    def judge(self) -> None:
        book, findings, outcome = self._book, self.findings, self.outcome
        for words in book.doubled:
            findings.add(DOUBLED, words)
        for words in book.again:
            findings.add(UNEXPECTED, f"not the first delivery: {words}")
        for place, deliveries in self._journals.deliveries.items():
            if len(deliveries) > 1 or place in book.received:
                also = book.received.get(place)
                findings.add(DOUBLED, f"{place} to processes: {deliveries}, and to members at: {also}")
        if self._produced:
            for place in sorted((book.received.keys() | self._journals.deliveries.keys()) - self._produced):
                findings.add(UNEXPECTED, f"{place} is no record")
        outcome.fired[POINT] = self._points()
        outcome.shapes.update(book.points)
        outcome.figures.update({f"members saw {words}": n for words, n in book.broken.most_common(10)})


def _portion(total_count: int, parts: int, number: int) -> int:
    return total_count * (number + 1) // parts - total_count * number // parts


def _topic_id(admin: AdminClient) -> uuid.UUID:
    (found,) = admin.describe_topics(TopicCollection([TOPIC])).values()
    topic_id, mask = found.result(20).topic_id, (1 << 64) - 1
    high, low = topic_id.get_most_significant_bits() & mask, topic_id.get_least_significant_bits() & mask
    return uuid.UUID(int=high << 64 | low)
