"""`--campaign contracts`: applications are killed at seeded points; each contract keeps its promise.

Lanes run side by side on one cluster, each with a topic, a group, and one process after the other. Between the storms
there are calm rounds, in which members join and leave in good order, and nothing may be lost or come twice.
`--mutations` breaks each contract on purpose instead, and expects the judge to complain of those and of no other.
"""

import argparse
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Producer
from tests.chaos.campaign import RECOVERY_S, ClusterCampaign, Victims
from tests.chaos.checks.checker import Findings
from tests.chaos.command import ClusterPlan, Say, option, silent
from tests.chaos.contracts.calm import DRAIN_S, Calm, case_of
from tests.chaos.contracts.jobs import CLASSIC, CONTRACTS, FREEZE, INLINE, PARTITIONS, WITH_ROWS
from tests.chaos.contracts.judge import ANOMALIES, Case, entries, judge
from tests.chaos.contracts.lanes import Lane, Terms, terms_of
from tests.chaos.contracts.mutations import MUTATIONS
from tests.chaos.contracts.nursery import Nursery
from tests.chaos.contracts.results import DATABASES, REDIS, SQLITE, databases
from tests.chaos.view import OF_GROUP, OF_TRANSACTION
from tests.chaos.workload import CLIENT, create_topics
from tests.waiting import eventually

BROKER = "broker kill"
UNNOTICED = "broken on purpose, and not noticed"
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


ALL = "all"
#: Names without blanks, for the command line.
NAMES = {name.replace(" with a ", "+"): name for name in CONTRACTS}


def _contracts(text: str) -> tuple[str, ...]:
    if text not in (*NAMES, ALL):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join((*NAMES, ALL))}")
    return CONTRACTS if text == ALL else (NAMES[text],)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(ClusterPlan):
    """`points` and `lanes` are of each contract."""

    contracts: tuple[str, ...] = option(
        CONTRACTS,
        "which contract",
        flag="delivery",
        help="which contract (default: all)",
        type=_contracts,
        metavar="{" + ",".join((*NAMES, ALL)) + "}",
    )
    points: int = option(300, "kills and freezes at points, of each contract")
    broker_kills: int = option(10, "kill -9 of nodes")
    calm_rounds: int = option(3, "rounds without kills, in which nothing may be lost or come twice")
    lanes: int = option(4, "groups at a time, of each contract")
    database: str = option(SQLITE, "of results, marks and positions", choices=DATABASES)
    mutations: tuple[str, ...] = option(
        (),
        "break every contract, and expect the judge to notice",
        action="store_const",
        const=tuple(MUTATIONS),
    )
    controls: bool = True  # with mutations: run the same with contracts that are not broken
    nodes: int = option(1, "nodes of the cluster")


class Campaign(ClusterCampaign[Plan]):
    node_settings = NODE_SETTINGS

    def __init__(self, folder: Path, plan: Plan, say: Say = silent) -> None:
        self.anomalies = (UNNOTICED, UNJUST) if plan.mutations else ANOMALIES
        super().__init__(folder, plan, say)
        self._lanes: list[Lane] = []
        self._cases: list[Case] = []

    def prepare(self) -> None:
        """`clients` creates the topics, because their names depend on the database."""

    @contextlib.contextmanager
    def clients(self) -> Iterator[None]:
        plan, nursery = self.plan, Nursery()
        try:
            with databases(plan.database, self.folder) as database:
                terms = self._terms(database)
                topics = {each.name: PARTITIONS for each in terms} | {
                    f"{each.name}-target": 1 for each in terms
                }
                create_topics(self.cluster.direct_servers, min(plan.nodes, 3), topics)
                producer = Producer({**CLIENT, "bootstrap.servers": self.servers, "enable.idempotence": True})
                self._lanes = [
                    Lane(each, self.servers, self.folder, nursery, producer, plan.seed) for each in terms
                ]
                yield
        finally:
            nursery.close()

    def fire_faults(self) -> None:
        if self.plan.mutations:
            self._side_by_side(self._notice, self._lanes)
        else:
            self._storms()
            self._cases = [case_of(lane, self.servers) for lane in self._lanes]

    def _terms(self, database: Callable[[str], str]) -> list[Terms]:
        plan = self.plan
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
        plan = self.plan
        for number in range(plan.calm_rounds):
            upto = plan.points * (number + 1) // plan.calm_rounds
            kills = plan.broker_kills * (number + 1) // plan.calm_rounds - (
                plan.broker_kills * number // plan.calm_rounds
            )
            self._storm(upto, kills)
            self.say(f"{self._points():,} points")
            calms = {lane.topic: Calm(lane, self.servers) for lane in self._lanes}
            self._side_by_side(lambda lane: calms[lane.topic].go_through(CALM), self._lanes)  # noqa: B023
            for calm in calms.values():
                self.outcome.problems += calm.problems
            self.say(f"calm round {number + 1} is over")

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
        with self.noted():
            self._side_by_side(act, self._lanes)

    def _kill_node(self, deadline: float) -> None:
        began, before = time.monotonic(), self._done()
        self.kill_one_of(BROKER, self._victims())
        self.await_whole()
        self._await(lambda: self._done() >= before + WORK, deadline)
        self.outcome.recovery_s[BROKER].append(time.monotonic() - began)
        self.outcome.work_between.append(self._done() - before)

    def _victims(self) -> Victims:
        observer, lane = self.observer, self.chance.choice(self._lanes)
        return {
            "leader of a topic": (40, lambda: observer.leader_of(lane.topic, 0)),
            "group coordinator": (30, lambda: observer.coordinator(OF_GROUP, f"{lane.topic}-group")),
            "transaction coordinator": (20, lambda: observer.coordinator(OF_TRANSACTION, lane.topic)),
            "controller": (10, observer.controller),
        }

    def _await(self, is_done: Callable[[], bool], deadline: float) -> None:
        def check() -> bool:
            time.sleep(LOOK_S)
            self.look_after_nodes()
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
            Calm(lane, self.servers).drain(settle_s)
            findings = Findings()
            judge(case_of(lane, self.servers), findings)
            if findings.counts[mutation.shows] or not lane.terms.is_broken:
                break
        self._conclude(lane, mutation.shows, findings, shots())

    def _conclude(self, lane: Lane, shows: str, findings: Findings, shots: int) -> None:
        name = f"{lane.terms.mutation} ({lane.terms.contract})"
        if not lane.terms.is_broken:
            for words in findings.examples.values():
                self.findings.add(UNJUST, f"{name}: {words[0]}")
        elif findings.counts[shows]:
            self.say(f"{name}: {findings.counts[shows]} {shows}: {findings.examples[shows][0]}")
            self.outcome.figures[f"{name}: {findings.counts[shows]} {shows} after so many points"] = shots
        else:
            self.findings.add(UNNOTICED, f"{name}: {dict(lane.story.trapped)}")

    # -- the verdict -----------------------------------------------------------------------------------

    def judge(self) -> None:
        outcome = self.outcome
        for case in self._cases:
            judge(case, self.findings)
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
