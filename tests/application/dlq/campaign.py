"""Replays of dead letters killed at seeded points, alone and two at a time, until they are done: each letter once.

python -m tests.application.dlq.campaign --kills 200 --seed 1 [--mutation "marks afterwards"] [--bootstrap HOST:PORT]
"""

import argparse
import random
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.application.dlq.dead_letters import Office, letter
from tests.application.dlq.killed import AT_WORK, BEFORE_WORK, LETTERS_IN_ONE, MUTATIONS, Executioner, Run
from tests.brokers import BrokerProcess

from penstock.client.deadletters.writer import replay_query_name
from penstock.spark.replay.lock import acquire_lock

PARTITIONS = 3
#: Of a run that is killed, before it is.
TRANSACTIONS_MAX = 4
KILLED = -9
#: How often a transaction passes some points.
OFTEN = {"sent": 2, "acknowledged": 3}
ROUNDS_MAX = 10


class Broken(AssertionError):
    """A letter is there twice, or not at all."""


class Campaign:
    """One topic with its dead letters, and runs that replay them."""

    def __init__(self, office: Office, executioner: Executioner, seed: int, mutation: str = "") -> None:
        self._office = office
        self._executioner = executioner
        self._chance = random.Random(seed)
        self._mutation = mutation
        self.tally: Counter[str] = Counter()
        name = f"campaign-{uuid.uuid4().hex[:8]}"
        self.orders = office.create(name, PARTITIONS)
        self.dead = office.create_dead(name, PARTITIONS)
        with office.cluster() as cluster:
            acquire_lock(cluster, replay_query_name(self.dead))  # a replay on Spark was there before

    def run(self, kills: int) -> Counter[str]:
        """Raises Broken."""
        # Enough that no run comes to the end before it is killed.
        self._fill(count := (kills + 1) * TRANSACTIONS_MAX * LETTERS_IN_ONE)
        while self.tally["killed"] < kills:
            self._strike()
        self._finish()
        self._judge(count)
        return self.tally

    def _fill(self, count: int) -> None:
        for partition in range(PARTITIONS):
            numbers = range(partition, count, PARTITIONS)
            letters = [letter(self.orders, n, partition=partition, dead_in=partition) for n in numbers]
            self._office.fill(self.dead, letters)

    def run_scripted(self, ambushes: Sequence[str]) -> None:
        """The same with these kills and no others. Raises Broken."""
        self._fill(count := (len(ambushes) + 1) * TRANSACTIONS_MAX * LETTERS_IN_ONE)
        for ambush in ambushes:
            assert self._executioner.run(self._replay(ambush)) == [KILLED], f"did not come to {ambush}"
        self._finish()
        self._judge(count)

    def _strike(self) -> None:
        """One run that is killed, sometimes beside another: the last one that starts takes over."""
        runs = [self._replay(self._ambush())]
        if self._chance.random() < 0.3:
            runs.append(self._replay(self._ambush(), "--limit", "6"))
        if self._chance.random() < 0.1:
            runs.append(self._replay("", "--limit", "6"))
        codes = self._executioner.run(*runs)
        self.tally["rounds"] += 1
        self.tally["two at a time"] += len(runs) > 1
        for run, code in zip(runs, codes, strict=True):
            assert code in (KILLED, 0, 1), f"{run} ended with {code}"
            self.tally["killed"] += code == KILLED
            self.tally["overtaken or failed"] += code == 1
            if code == KILLED:
                self.tally[f"killed: {run.ambush.rpartition(':')[0]}"] += 1

    def _ambush(self) -> str:
        """Most are in the middle of the work, and few before any is done."""
        if self._chance.random() < 0.2:
            return f"{self._chance.choice(list(BEFORE_WORK))}:1"
        point = self._chance.choice(list(AT_WORK))
        return f"{point}:{self._chance.randint(1, OFTEN.get(point, 1) * TRANSACTIONS_MAX)}"

    def _replay(self, ambush: str, *more: str) -> Run:
        words = ("dlq", "replay", self.dead, "--bootstrap", self._office.bootstrap, *more)
        return Run(words, ambush, self._mutation)

    def _finish(self) -> None:
        for _ in range(ROUNDS_MAX):
            if self._executioner.run(self._replay("")) == [0]:
                return
        raise AssertionError(f"not done after {ROUNDS_MAX} runs without kills")

    def _judge(self, count: int) -> None:
        found = Counter(self._office.numbers(self.orders))
        doubled = {number: times for number, times in found.items() if times > 1}
        lost = set(range(count)) - found.keys()
        if doubled or lost:
            raise Broken(
                f"{len(doubled)} of {count} letters are there twice, {len(lost)} are lost: "
                f"{sorted(doubled)[:10]} {sorted(lost)[:10]}"
            )
        self.tally["letters"] = count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutation", choices=list(MUTATIONS), default="")
    parser.add_argument("--bootstrap", default="")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        broker = None if given.bootstrap else BrokerProcess(Path(folder) / "data").start()
        address = given.bootstrap or (broker.bootstrap_servers if broker is not None else "")
        try:
            with Executioner(log) as executioner:
                campaign = Campaign(Office(address), executioner, given.seed, given.mutation)
                campaign.run(given.kills)
        except Broken as broken:
            sys.exit(f"seed {given.seed}: {broken}")
        finally:
            if broker is not None:
                broker.stop()
    print(dict(campaign.tally))
    print(f"seed {given.seed}: {campaign.tally['letters']} letters, each once")


if __name__ == "__main__":
    main()
