"""Campaigns that kill drivers of real Spark at seeded points, and that try orders of steps without Spark ("worlds").

A campaign is a subclass that supplies its topics, its drivers and its checks; the command line is that of
`tests.chaos.command`. Each run of a driver has another number of tasks.
"""

import json
import os
import random
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from tests.brokers import BrokerProcess
from tests.chaos.command import Plan, Say, option, silent
from tests.chaos.outcome import Outcome
from tests.spark.sink.ambushed import kill_session
from tests.spark.source.topics import Topics


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverPlan(Plan):
    kills: int = option(0, "drivers that are killed")
    worlds: int = option(0, "orders of steps without Spark, many a second")
    mutations: bool = option(
        False, "in worlds: take out each safeguard, and expect that this is noticed", action="store_true"
    )


P = TypeVar("P", bound=DriverPlan)
Mutations = Mapping[str, Callable[[], AbstractContextManager[Any]]]

#: How often a driver that fails on its own is started again.
_FAILURES_MAX: Final = 2


class DriverCampaign(ABC, Generic[P]):
    #: The module of the driver; it takes one argument, a JSON document.
    driver: ClassVar[str] = "tests.spark.sink.query"
    run_timeout_s: ClassVar[float] = 600.0
    #: Kills from one check to the next.
    check_every: ClassVar[int] = 3
    #: The share of the drivers that must have died at their point, or the campaign proves nothing.
    killed_share: float = 0.5

    def __init__(self, folder: Path, plan: P, say: Say = silent) -> None:
        self.folder = folder
        self.plan = plan
        self.say = say
        self.chance = random.Random(plan.seed)
        self.outcome = Outcome(plan.seed, ())

    # -- what a campaign supplies ----------------------------------------------------------------------

    @abstractmethod
    def points(self) -> Sequence[str]:
        """Where drivers die."""

    @abstractmethod
    def prepare(self) -> None:
        """Create topics on the broker, which has just started."""

    @abstractmethod
    def kill(self, point: str) -> None:
        """Run a driver that is killed when it comes to the point."""

    @abstractmethod
    def check(self) -> None:
        """Run a driver to its end, and check that nothing is lost or doubled. Raises AssertionError."""

    @abstractmethod
    def explore_worlds(self) -> None:
        """Raises AssertionError if a world has a flaw, or a mutation none."""

    def broker_settings(self) -> dict[str, str]:
        return {}

    # -- the course of a campaign ----------------------------------------------------------------------

    def run(self) -> Outcome:
        began = time.monotonic()
        os.environ["PYTHONPATH"] = os.pathsep.join([path for path in sys.path if path])  # for drivers
        self.broker = BrokerProcess(self.folder / "broker", self.broker_settings()).start()
        try:
            self.topics = Topics(self.broker.bootstrap_servers)
            self.work()
        except AssertionError as error:
            self.outcome.problems.append(f"{error}")
        finally:
            self.broker.kill()
        self.outcome.duration_s = time.monotonic() - began
        return self.outcome

    def work(self) -> None:
        if self.plan.worlds:
            self.explore_worlds()
        if self.plan.kills:
            self.prepare()
            self.kill_drivers()

    def kill_drivers(self) -> None:
        """At all points in turn, in a random order."""
        points, kills = list(self.points()), self.plan.kills
        self.chance.shuffle(points)
        for number in range(kills):
            point = points[number % len(points)]
            self.kill(point)
            self.say(f"{number + 1}/{kills} {point}: {dict(self.outcome.shapes)}")
            if number % self.check_every == self.check_every - 1:
                self.check()
        self.check()
        self.outcome.fired["driver kill"] = self.outcome.shapes["kills"]
        assert self.outcome.shapes["kills"] >= kills * self.killed_share, "too few died to prove anything"

    def expect_flaws(self, mutations: Iterable[str], flaw: Callable[[str | None], str | None]) -> None:
        """A flaw with each mutation, and none without."""
        wrong = []
        for mutation in mutations if self.plan.mutations else (None,):
            found = flaw(mutation)
            print(
                f"{mutation or 'unchanged'}: {found or f'{self.plan.worlds} worlds without a flaw'}",
                flush=True,
            )
            if bool(found) != bool(mutation):
                wrong.append(mutation or "unchanged")
        assert not wrong, f"not as expected: {', '.join(wrong)}"

    @property
    def seeds(self) -> range:
        return range(self.plan.seed, self.plan.seed + self.plan.worlds)

    # -- drivers ---------------------------------------------------------------------------------------

    @property
    def driver_log(self) -> Path:
        return self.folder / "drivers.log"

    def launch(self, given: Mapping[str, Any]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", self.driver, json.dumps(given)]
        with self.driver_log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def ambush(self, point: str | None, count_max: int) -> dict[str, str]:
        """Options of source and sink: the driver is killed when it comes to the point for the Nth time."""
        self.outcome.shapes["runs"] += 1
        if point is None:
            return {}
        counter = self.folder / f"count-{self.outcome.shapes['runs']}"
        number = self.chance.randint(1, count_max)
        return {"ambush": f"{point}:{number}", "ambushFile": str(counter), "ambushKills": "true"}

    def end(self, driver: subprocess.Popen[bytes]) -> int:
        """Wait for its exit code, which is negative if it was killed."""
        try:
            return driver.wait(self.run_timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a driver did not end; see {self.driver_log}") from None
        finally:
            kill_session(driver.pid)

    def end_killed(
        self,
        point: str,
        drivers: Sequence[subprocess.Popen[bytes]],
        start: Callable[[str], subprocess.Popen[bytes]],
    ) -> None:
        """The first of them was to be killed at the point. If it fails on its own before that, it is started again.

        On a busy machine Spark gives up on a Python worker that does not connect within 10 seconds.
        """
        code, *_ = [self.end(driver) for driver in drivers]
        for _ in range(_FAILURES_MAX):
            if code <= 0:
                break
            self.outcome.shapes[f"{point} (driver failed)"] += 1
            code = self.end(start(point))
        self.outcome.shapes[point if code < 0 else f"{point} (not reached)"] += 1
        self.outcome.shapes["kills"] += code < 0
        self.outcome.shapes["with a second driver"] += len(drivers) > 1

    def restart_broker(self) -> None:
        """Somewhere in the run of a driver."""
        time.sleep(self.chance.uniform(5, 12))
        self.broker.kill()
        self.broker.start()
        self.outcome.shapes["with the broker killed"] += 1


class World(Protocol):
    stage: Any
    failures: Any

    def run(self) -> None: ...
    def check(self) -> None: ...


W = TypeVar("W", bound=World)


def check_world(world: World, seed: int) -> None:
    """Raises AssertionError with the order of steps if the world has a flaw."""
    try:
        world.run()
        world.check()
    except AssertionError as error:
        story = "\n".join(world.stage.gates)
        raise AssertionError(f"seed {seed}: {error}\n{story}\n{world.failures}") from error


def first_flaw(
    seeds: Iterable[int],
    make: Callable[[int], W],
    check: Callable[[W], None],
    mutation: Callable[[], AbstractContextManager[Any]] | None,
) -> str | None:
    """What is wrong with the first world that is not as it should be."""
    for seed in seeds:
        world = make(seed)
        with mutation() if mutation else nullcontext():
            try:
                world.run()
                check(world)
            except AssertionError as error:
                story = "" if mutation else "\n" + "\n".join(world.stage.gates)
                return f"seed {seed}: {error}{story}"
    return None
