"""`python -m tests.application.outbox.campaign --kills N --seed S --database sqlite|postgresql`

A shop sells while its relays are killed, frozen, doubled and cut off, and the broker is killed under them. In the end
every sale that was committed is in its topic once, in the order of its key, and no other.
"""

import argparse
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.application.outbox.child import POINTS, REFUSED, Job
from tests.application.outbox.judge import judge, read_all
from tests.application.outbox.relays import RelayProcess
from tests.application.outbox.sellers import Sellers
from tests.application.outbox.shop import TOPICS, Shop
from tests.brokers import BrokerProcess
from tests.chaos import commands
from tests.servers import PostgresServer
from tests.waiting import eventually

from penstock.client.outbox.database import open_database

SQLITE, POSTGRESQL = "sqlite", "postgresql"
POINT, ANYTIME, BROKER, TWO, CUT_OFF = (
    "kill at a point",
    "kill at any time",
    "broker kill",
    "two at once",
    "frozen and cut off",
)
KINDS = {POINT: 60, ANYTIME: 15, BROKER: 10, TWO: 15}
RECOVERY_S = 60.0
PARTITIONS = "3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    kills: int = 100
    seed: int = 0
    database: str = SQLITE
    shards: int = 2
    sellers: int = 4

    def faults(self, chance: random.Random) -> list[str]:
        """Of few, the first are of different kinds."""
        kinds = KINDS if self.database == SQLITE else {**KINDS, CUT_OFF: 15}
        first = [POINT, *(kind for kind in kinds if kind != POINT)]
        more = chance.choices(list(kinds), list(kinds.values()), k=max(self.kills - len(first), 0))
        return (first + more)[: self.kills]


@dataclass(slots=True)
class Result:
    plan: Plan
    sales: int = 0
    undone: int = 0
    #: Rows that were committed after one with a greater id.
    late_rows: int = 0
    duration_s: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)
    relayed_between: list[int] = field(default_factory=list)
    anomalies: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.anomalies and not self.problems

    @property
    def least_work(self) -> int:
        return min(self.relayed_between, default=0)

    def as_document(self) -> dict[str, Any]:
        return {
            "kills": sum(self.fired.values()),
            "seed": self.plan.seed,
            "database": self.plan.database,
            "sales": self.sales,
            "undone": self.undone,
            "late_rows": self.late_rows,
            "fired": dict(self.fired),
            "points": dict(self.points),
            "least_work": self.least_work,
            "anomalies": self.anomalies,
            "examples": self.examples,
            "problems": self.problems,
            "duration_s": round(self.duration_s, 1),
        }


class Campaign:
    def __init__(
        self, folder: Path, plan: Plan, url: str, say: Callable[[str], None] = lambda words: None
    ) -> None:
        self._folder, self._plan, self._say = folder, plan, say
        self._chance = random.Random(plan.seed)
        self._result = Result(plan)
        self._shop = Shop(url).prepare()
        self._broker = BrokerProcess(folder / "broker", {"num.partitions": PARTITIONS})
        self._relays: dict[int, RelayProcess] = {}
        self._launched: list[RelayProcess] = []

    def run(self) -> Result:
        began = time.monotonic()
        with ExitStack() as stack:
            self._broker.start()
            stack.callback(self._broker.kill)
            stack.callback(self._kill_relays)
            with Sellers(self._shop, self._plan.sellers, self._plan.seed) as sellers:
                self._launch_all()
                self._fire_all()
            self._result.undone, self._result.late_rows = sellers.undone, sellers.late_rows
            self._result.problems += sellers.problems
            self._finish()
            self._judge()
        self._result.duration_s = time.monotonic() - began
        return self._result

    # Relays

    def _launch(self, shard: int, **more: Any) -> RelayProcess:
        job = Job(
            url=self._shop.url,
            bootstrap=self._broker.bootstrap_servers,
            shards=self._plan.shards,
            shard=shard,
            **more,
        )
        relay = RelayProcess(job, self._folder / f"relay-{shard}.log")
        self._launched.append(relay)
        return relay

    def _launch_all(self) -> None:
        for shard in range(self._plan.shards):
            self._relays[shard] = self._launch(shard)

    def _kill_relays(self) -> None:
        for relay in self._launched:
            relay.kill()

    def _replace(self, shard: int, **more: Any) -> RelayProcess:
        self._relays[shard].kill()
        self._relays[shard] = self._launch(shard, **more)
        return self._relays[shard]

    # Faults

    def _fire_all(self) -> None:
        before = self._shop.relayed()
        for kind in self._plan.faults(self._chance):
            shard = self._chance.randrange(self._plan.shards)
            self._await_progress(before)
            {
                POINT: self._at_point,
                ANYTIME: self._at_any_time,
                BROKER: self._of_broker,
                TWO: self._two_at_once,
                CUT_OFF: self._cut_off,
            }[kind](shard)
            self._result.fired[kind] += 1
            now = self._shop.relayed()
            self._result.relayed_between.append(now - before)
            before = now

    def _await_progress(self, before: int) -> None:
        """Every relay has work to do again, and does it."""
        for shard, relay in self._relays.items():
            if relay.has_ended:
                self._unexpected_end(shard)
        eventually(
            lambda: self._shop.relayed() > before + 5, within_s=RECOVERY_S, what=f"more than {before} relayed"
        )

    def _unexpected_end(self, shard: int) -> None:
        self._result.problems.append(f"the relay of shard {shard} ended with {self._relays[shard].end()}")
        self._relays[shard] = self._launch(shard)

    def _at_point(self, shard: int) -> None:
        point = POINTS[self._result.fired[POINT] % len(POINTS)]
        self._say(f"kill of relay {shard} once it has {point}")
        relay = self._replace(shard, point=point, passing=self._chance.choice((1, 1, 2, 5)))
        code = relay.end()
        self._expect(code == -9, f"the relay of shard {shard} ended with {code} instead of at {point}")
        self._result.points[point] += 1
        self._relays[shard] = self._launch(shard)

    def _at_any_time(self, shard: int) -> None:
        self._say(f"kill of relay {shard}")
        time.sleep(self._chance.uniform(0, 0.1))
        self._replace(shard)

    def _of_broker(self, shard: int) -> None:
        self._say("kill of the broker")
        self._broker.kill()
        time.sleep(self._chance.uniform(0, 1))
        self._broker.start()

    def _two_at_once(self, shard: int) -> None:
        """The second waits; when the first is killed at a point it takes over without being told."""
        point = self._chance.choice(POINTS)
        self._say(f"two relays of shard {shard}; the first is killed once it has {point}")
        first = self._replace(shard, point=point)
        self._await_held(shard, first)
        second = self._launch(shard)
        self._relays[shard] = second
        code = first.end()
        self._expect(code == -9, f"the first of two ended with {code} instead of at {point}")

    def _await_held(self, shard: int, relay: RelayProcess) -> None:
        with contextlib.closing(open_database(self._shop.url)) as database:
            eventually(
                lambda: relay.has_ended or database.is_shard_held(shard),
                within_s=RECOVERY_S,
                what="holding the shard",
            )

    def _cut_off(self, shard: int) -> None:
        """Frozen at a point, it loses its session and with it the lock; it wakes up when another has taken over."""
        point = self._chance.choice(POINTS)
        self._say(f"relay {shard} frozen once it has {point}, and cut off from the database")
        with self._replace(shard, point=point, signal="SIGSTOP") as first:
            first.await_frozen()
            self._relays[shard] = self._launch(shard)
            before = self._shop.relayed()
            self._end_sessions(self._relays[shard])
            eventually(lambda: self._shop.relayed() > before + 5, within_s=RECOVERY_S, what="taking over")
            first.thaw()
            code = first.stop()
            self._expect(code in (0, REFUSED), f"the one that was cut off ended with {code}")

    def _end_sessions(self, heir: RelayProcess) -> None:
        """Of all relays; those that are not frozen come back."""
        with self._shop.connected() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = 'penstock outbox relay'"
            )

    def _expect(self, is_so: bool, words: str) -> None:
        if not is_so:
            self._result.problems.append(words)

    # The end

    def _finish(self) -> None:
        eventually(lambda: self._shop.waiting() == 0, within_s=RECOVERY_S, what="an empty outbox")
        for shard, relay in self._relays.items():
            code = relay.stop()
            self._expect(code == 0, f"the relay of shard {shard} ended with {code}")

    def _judge(self) -> None:
        sales = self._shop.sales()
        findings = judge(read_all(self._broker.bootstrap_servers, TOPICS), sales)
        self._result.sales = len(sales)
        self._result.anomalies, self._result.examples = dict(findings.counts), dict(findings.examples)


def run(folder: Path, plan: Plan, say: commands.Say = lambda words: None) -> Result:
    """With a server of its own, if that takes one."""
    if plan.database == SQLITE:
        return Campaign(folder, plan, f"sqlite:///{folder / 'shop.db'}", say).run()
    with PostgresServer() as server:
        return Campaign(folder, plan, server.new_database(), say).run()


def show(result: Result) -> None:
    for name, value in result.as_document().items():
        print(f"{name:>12}  {value}")


def main(arguments: Sequence[str]) -> int:
    parser = commands.parser(
        __doc__,
        (
            ("kills", 100, "faults"),
            ("shards", 2, "parts that rows are divided into, with a relay for each"),
            ("sellers", 4, "connections that commit and roll back"),
        ),
    )
    parser.prog = "python -m tests.application.outbox.campaign"
    parser.add_argument("--database", choices=(SQLITE, POSTGRESQL), default=SQLITE)
    given: argparse.Namespace = parser.parse_args(arguments)

    def carry(folder: Path, seed: int, say: commands.Say) -> Result:
        plan = Plan(
            kills=given.kills,
            seed=seed,
            database=given.database,
            shards=given.shards,
            sellers=given.sellers,
        )
        return run(folder, plan, say)

    return commands.carry_out(given, carry, show, Result.as_document)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
