"""`python -m tests.application.outbox.campaign --kills N --seed S --database sqlite|postgresql`

A shop sells while its relays are killed, frozen, doubled and cut off, and the broker is killed too. In the end every
committed sale is in its topic once, in the order of its key, and there are no others.
"""

import contextlib
import random
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.application.outbox.child import POINTS, REFUSED, Job
from tests.application.outbox.judge import DOUBLED, LOST, ORDER, UNEXPECTED, judge, read_all
from tests.application.outbox.relays import RelayProcess
from tests.application.outbox.sellers import Sellers
from tests.application.outbox.shop import TOPICS, Shop
from tests.brokers import BrokerProcess
from tests.chaos.command import Plan as CampaignPlan
from tests.chaos.command import Say, option, run_command, silent
from tests.chaos.outcome import Outcome
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
class Plan(CampaignPlan):
    kills: int = option(100, "faults")
    database: str = option(SQLITE, "of the shop", choices=(SQLITE, POSTGRESQL))
    shards: int = option(2, "parts that rows are divided into, with a relay for each")
    sellers: int = option(4, "connections that commit and roll back")

    def faults(self, chance: random.Random) -> list[str]:
        """Of few, the first are of different kinds."""
        kinds = KINDS if self.database == SQLITE else {**KINDS, CUT_OFF: 15}
        first = [POINT, *(kind for kind in kinds if kind != POINT)]
        more = chance.choices(list(kinds), list(kinds.values()), k=max(self.kills - len(first), 0))
        return (first + more)[: self.kills]


class Campaign:
    """With a database server of its own, unless it is given a `url` or needs none."""

    def __init__(self, folder: Path, plan: Plan, say: Say = silent, url: str | None = None) -> None:
        self.folder, self.plan, self.say, self._url = folder, plan, say, url
        self.chance = random.Random(plan.seed)
        self.outcome = Outcome(plan.seed, (LOST, DOUBLED, ORDER, UNEXPECTED))
        self._broker = BrokerProcess(folder / "broker", {"num.partitions": PARTITIONS})
        self._relays: dict[int, RelayProcess] = {}
        self._launched: list[RelayProcess] = []

    def run(self) -> Outcome:
        began = time.monotonic()
        with ExitStack() as stack:
            self._shop = Shop(self._url or self._new_database(stack)).prepare()
            self._broker.start()
            stack.callback(self._broker.kill)
            stack.callback(self._kill_relays)
            with Sellers(self._shop, self.plan.sellers, self.plan.seed) as sellers:
                self._launch_all()
                self._fire_all()
            self.outcome.figures |= {"rolled back": sellers.undone, "committed late": sellers.late_rows}
            self.outcome.problems += sellers.problems
            self._finish()
            self._judge()
        self.outcome.duration_s = time.monotonic() - began
        return self.outcome

    def _new_database(self, stack: ExitStack) -> str:
        if self.plan.database == SQLITE:
            return f"sqlite:///{self.folder / 'shop.db'}"
        return stack.enter_context(PostgresServer()).new_database()

    # Relays

    def _launch(self, shard: int, **more: Any) -> RelayProcess:
        job = Job(
            url=self._shop.url,
            bootstrap=self._broker.bootstrap_servers,
            shards=self.plan.shards,
            shard=shard,
            **more,
        )
        relay = RelayProcess(job, self.folder / f"relay-{shard}.log")
        self._launched.append(relay)
        return relay

    def _launch_all(self) -> None:
        for shard in range(self.plan.shards):
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
        for kind in self.plan.faults(self.chance):
            shard = self.chance.randrange(self.plan.shards)
            self._await_progress(before)
            {
                POINT: self._at_point,
                ANYTIME: self._at_any_time,
                BROKER: self._of_broker,
                TWO: self._two_at_once,
                CUT_OFF: self._cut_off,
            }[kind](shard)
            self.outcome.fired[kind] += 1
            now = self._shop.relayed()
            self.outcome.work_between.append(now - before)
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
        self.outcome.problems.append(f"the relay of shard {shard} ended with {self._relays[shard].end()}")
        self._relays[shard] = self._launch(shard)

    def _at_point(self, shard: int) -> None:
        point = POINTS[self.outcome.fired[POINT] % len(POINTS)]
        self.say(f"kill of relay {shard} once it has {point}")
        relay = self._replace(shard, point=point, passing=self.chance.choice((1, 1, 2, 5)))
        code = relay.end()
        self._expect(code == -9, f"the relay of shard {shard} ended with {code} instead of at {point}")
        self.outcome.shapes[point] += 1
        self._relays[shard] = self._launch(shard)

    def _at_any_time(self, shard: int) -> None:
        self.say(f"kill of relay {shard}")
        time.sleep(self.chance.uniform(0, 0.1))
        self._replace(shard)

    def _of_broker(self, shard: int) -> None:
        self.say("kill of the broker")
        self._broker.kill()
        time.sleep(self.chance.uniform(0, 1))
        self._broker.start()

    def _two_at_once(self, shard: int) -> None:
        """The second waits; when the first is killed at a point it takes over without being told."""
        point = self.chance.choice(POINTS)
        self.say(f"two relays of shard {shard}; the first is killed once it has {point}")
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
        point = self.chance.choice(POINTS)
        self.say(f"relay {shard} frozen once it has {point}, and cut off from the database")
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
            self.outcome.problems.append(words)

    # The end

    def _finish(self) -> None:
        eventually(lambda: self._shop.waiting() == 0, within_s=RECOVERY_S, what="an empty outbox")
        for shard, relay in self._relays.items():
            code = relay.stop()
            self._expect(code == 0, f"the relay of shard {shard} ended with {code}")

    def _judge(self) -> None:
        sales = self._shop.sales()
        findings = judge(read_all(self._broker.bootstrap_servers, TOPICS), sales)
        self.outcome.figures["sales"] = len(sales)
        self.outcome.anomalies, self.outcome.examples = dict(findings.counts), dict(findings.examples)


if __name__ == "__main__":
    program = "python -m tests.application.outbox.campaign"
    sys.exit(run_command(sys.argv[1:], Plan, Campaign, __doc__, program))
