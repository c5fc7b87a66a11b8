"""The contracts of applications: their processes are killed at thousands of points, groups are rebalanced, nodes die.

Lanes run side by side on one cluster, each with a topic, a group, and one life after the other. Between the storms
there are calm rounds, in which members come and go as operators let them, and nothing may be lost or come twice.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import Producer
from tests.chaos.checker import Findings
from tests.chaos.contracts.calm import DRAIN_S, Calm, case_of
from tests.chaos.contracts.jobs import CLASSIC, CONTRACTS, FREEZE, INLINE, PARTITIONS, WITH_ROWS
from tests.chaos.contracts.judge import ANOMALIES, Case, entries, judge
from tests.chaos.contracts.lanes import Lane, Terms, terms_of
from tests.chaos.contracts.mutations import MUTATIONS
from tests.chaos.contracts.nursery import Nursery
from tests.chaos.contracts.results import REDIS, SQLITE, databases
from tests.chaos.siege import RECOVERY_S, Outcome, Siege
from tests.chaos.view import OF_GROUP, OF_TRANSACTION
from tests.chaos.workload import CLIENT, create_topics
from tests.waiting import eventually

BROKER = "broker kill"
UNNOTICED = "broken on purpose, and nobody has noticed"
UNJUST = "found at the same points, and nothing was broken"
NODE_SETTINGS = {
    "group.consumer.heartbeat.interval.ms": "200",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "1000",
}
CALM = 40
WORK = 20  # messages handled for the first time between two kills of nodes at least
POINT_S = 4.0  # a point is expected to take no longer, on average
LOOK_S = 0.1
#: Of lives whose contract is broken.
ROUND, ROUNDS_MAX, SETTLE_S = 2, 6, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`points` and `lanes` are of each contract."""

    contracts: tuple[str, ...] = CONTRACTS
    points: int = 300
    broker_kills: int = 10
    calm_rounds: int = 3
    lanes: int = 4
    database: str = SQLITE
    mutations: tuple[str, ...] = ()
    #: Whether the same is done with contracts that are not broken, of which nobody may complain.
    controls: bool = False
    seed: int = 0
    nodes: int = 1
    settings: dict[str, str] = field(default_factory=dict)


class Campaign:
    def __init__(self, folder: Path, plan: Plan, say: Callable[[str], None] = lambda words: None) -> None:
        self._plan = plan
        self._folder = folder
        settings = {**NODE_SETTINGS, **plan.settings}
        kinds = (UNNOTICED, UNJUST) if plan.mutations else ANOMALIES
        self._siege = Siege(folder, nodes=plan.nodes, settings=settings, seed=plan.seed, kinds=kinds, say=say)
        self._lanes: list[Lane] = []
        self._cases: list[Case] = []

    @property
    def _servers(self) -> str:
        return self._siege.cluster.bootstrap_servers

    def run(self) -> Outcome:
        siege = self._siege
        try:
            with siege.noted(), self._prepared():
                if self._plan.mutations:
                    self._side_by_side(self._notice, self._lanes)
                else:
                    self._storms()
                    self._cases = [case_of(lane, self._servers) for lane in self._lanes]
            with siege.noted():
                siege.stop_nodes()
        finally:
            siege.cluster.kill()
        for case in self._cases:
            judge(case, siege.findings)
        self._add_figures()
        return siege.finish()

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        plan, cluster = self._plan, self._siege.cluster.start()
        nursery = Nursery()
        try:
            with databases(plan.database, self._folder) as database:
                terms = self._terms(database)
                topics = {each.name: PARTITIONS for each in terms} | {
                    f"{each.name}-target": 1 for each in terms
                }
                create_topics(cluster.direct_servers, min(plan.nodes, 3), topics)
                producer = Producer(
                    {**CLIENT, "bootstrap.servers": self._servers, "enable.idempotence": True}
                )
                self._lanes = [
                    Lane(each, self._servers, self._folder, nursery, producer, plan.seed) for each in terms
                ]
                yield
        finally:
            nursery.close()

    def _terms(self, database: Callable[[str], str]) -> list[Terms]:
        plan = self._plan
        if plan.mutations:
            states = (True, False) if plan.controls else (True,)
            return [_broken(name, database, is_broken=state) for state in states for name in plan.mutations]
        chosen = [each for each in plan.contracts if plan.database != REDIS or each not in WITH_ROWS]
        return [terms for contract in chosen for terms in terms_of(contract, plan.lanes, database)]

    def _side_by_side(self, act: Callable[[Lane], None], lanes: list[Lane]) -> None:
        """A thread for each; raises what the first of them raised."""
        failures: list[BaseException] = []

        def run(lane: Lane) -> None:
            try:
                act(lane)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(lane,), name=lane.topic, daemon=True) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise AssertionError(f"a lane has failed: {failures[0]!r}") from failures[0]

    # -- storms and calm -------------------------------------------------------------------------------

    def _points(self, contract: str | None = None) -> int:
        return sum(
            sum(lane.story.trapped.values())
            for lane in self._lanes
            if contract is None or lane.terms.contract == contract
        )

    def _done(self) -> int:
        return sum(len(lane.read().done) for lane in self._lanes)

    def _storms(self) -> None:
        plan = self._plan
        for number in range(plan.calm_rounds):
            upto = plan.points * (number + 1) // plan.calm_rounds
            kills = plan.broker_kills * (number + 1) // plan.calm_rounds - (
                plan.broker_kills * number // plan.calm_rounds
            )
            self._storm(upto, kills)
            self._siege.say(f"{self._points():,} points")
            calms = {lane.topic: Calm(lane, self._servers) for lane in self._lanes}
            self._side_by_side(lambda lane: calms[lane.topic].go_through(CALM), self._lanes)  # noqa: B023
            for calm in calms.values():
                self._siege.outcome.problems += calm.problems
            self._siege.say(f"calm round {number + 1} is over")

    def _storm(self, upto: int, kills: int) -> None:
        contracts = {lane.terms.contract for lane in self._lanes}
        deadline = time.monotonic() + RECOVERY_S + POINT_S * upto
        stopping = threading.Event()

        def is_over(contract: str) -> bool:
            return stopping.is_set() or self._points(contract) >= upto

        def act(lane: Lane) -> None:
            lane.storm(lambda: is_over(lane.terms.contract))

        storm = threading.Thread(target=lambda: self._side_by_side_noted(act), daemon=True)
        began = self._points()
        wanted = upto * len(contracts) - began
        storm.start()
        try:
            for number in range(kills):
                at = began + wanted * (number + 1) // (kills + 1)
                self._await(lambda: self._points() >= at or not storm.is_alive(), deadline)  # noqa: B023
                self._kill_node(deadline)
            self._await(lambda: not storm.is_alive(), deadline)
        finally:
            stopping.set()
            storm.join()

    def _side_by_side_noted(self, act: Callable[[Lane], None]) -> None:
        with self._siege.noted():
            self._side_by_side(act, self._lanes)

    def _kill_node(self, deadline: float) -> None:
        siege = self._siege
        began, before = time.monotonic(), self._done()
        siege.kill_one_of(BROKER, self._victims())
        siege.await_whole()
        self._await(lambda: self._done() >= before + WORK, deadline)
        siege.outcome.recovery_s[BROKER].append(time.monotonic() - began)
        siege.outcome.work_between.append(self._done() - before)

    def _victims(self) -> dict[str, tuple[int, Callable[[], int]]]:
        observer, lane = self._siege.observer, self._siege.chance.choice(self._lanes)
        return {
            "leader of a topic": (40, lambda: observer.leader_of(lane.topic, 0)),
            "group coordinator": (30, lambda: observer.coordinator(OF_GROUP, f"{lane.topic}-group")),
            "transaction coordinator": (20, lambda: observer.coordinator(OF_TRANSACTION, lane.topic)),
            "controller": (10, observer.controller),
        }

    def _await(self, is_done: Callable[[], bool], deadline: float) -> None:
        def check() -> bool:
            time.sleep(LOOK_S)
            self._siege.look_after_nodes()
            return is_done()

        eventually(
            check, within_s=deadline - time.monotonic(), what=f"so many points ({self._points()} so far)"
        )

    # -- contracts that are broken on purpose ----------------------------------------------------------

    def _notice(self, lane: Lane) -> None:
        """Until the judge complains of what is broken, or it was given enough chances."""
        mutation = MUTATIONS[lane.terms.mutation or ""]

        def shots() -> int:
            return lane.story.trapped[mutation.point, mutation.action]

        rounds, settle_s = (ROUNDS_MAX, SETTLE_S) if lane.terms.is_broken else (1, DRAIN_S)
        for number in range(rounds):
            upto = ROUND * (number + 1)
            lane.storm(lambda: shots() >= upto)  # noqa: B023
            Calm(lane, self._servers).drain(settle_s)
            findings = Findings()
            judge(case_of(lane, self._servers), findings)
            if findings.counts[mutation.shows] or not lane.terms.is_broken:
                break
        self._conclude(lane, mutation.shows, findings, shots())

    def _conclude(self, lane: Lane, shows: str, findings: Findings, shots: int) -> None:
        siege, name = self._siege, f"{lane.terms.mutation} ({lane.terms.contract})"
        if not lane.terms.is_broken:
            for words in findings.examples.values():
                siege.findings.add(UNJUST, f"{name}: {words[0]}")
        elif findings.counts[shows]:
            siege.say(f"{name}: {findings.counts[shows]} {shows}: {findings.examples[shows][0]}")
            siege.outcome.figures[f"{name}: {findings.counts[shows]} {shows} after so many points"] = shots
        else:
            siege.findings.add(UNNOTICED, f"{name}: {dict(lane.story.trapped)}")

    # -- the verdict -----------------------------------------------------------------------------------

    def _add_figures(self) -> None:
        outcome = self._siege.outcome
        for lane in self._lanes:
            outcome.problems += lane.story.broken
            for (point, action), count in lane.story.trapped.items():
                outcome.fired[f"{lane.terms.contract}: {action}"] += count
                outcome.shapes[point] += count
                assert action != FREEZE or lane.terms.is_pair
        for contract in dict.fromkeys(case.contract for case in self._cases):
            cases = [case for case in self._cases if case.contract == contract]
            for name, count in _figures(cases).items():
                outcome.figures[f"{contract}: {name}"] = count
        outcome.figures["lives that ended from outside"] = sum(lane.outside for lane in self._lanes)
        outcome.figures["lives in which something was handled for the first time"] = sum(
            new > 0 for lane in self._lanes for new in lane.news
        )
        outcome.figures["lives"] = sum(len(lane.news) for lane in self._lanes)


def _figures(cases: list[Case]) -> dict[str, int]:
    """Besides what is wrong: what the contract allows, counted."""
    sent = sum(case.sent for case in cases)
    done = sum(sum(case.story.done.values()) for case in cases)
    again = sum(count - 1 for case in cases for count in case.story.done.values() if count > 1)
    lost = sum(case.is_missing(number) for case in cases for number in range(case.sent))
    begun = sum(count - 1 for case in cases for count in entries(case.story).values() if count > 1)
    dropped = sum(len(life.dropped) for case in cases for life in case.story.lives)
    return {
        "messages": sent,
        "handled": done,
        "handled again": again,
        "begun again": begun,
        "in hand at a kill, and lost": lost,
        "counted as perhaps lost": sum(len(case.story.counted) for case in cases),
        "dropped": dropped,
        "dead letters": sum(sum(case.letters.values()) for case in cases),
        "calm": sum(len(case.calm) for case in cases),
    }


def _broken(name: str, database: Callable[[str], str], *, is_broken: bool) -> Terms:
    mutation = MUTATIONS[name]
    topic = f"{'broken' if is_broken else 'control'}-{name.replace(' ', '-')}"
    return Terms(
        name=topic,
        contract=mutation.contract,
        shape=INLINE,
        fails=mutation.fails,
        is_pair=mutation.action == FREEZE,
        protocol=CLASSIC,
        database=database(topic),
        mutation=name,
        is_broken=is_broken,
    )
