"""Drivers of real Spark killed at seeded points, again and again: at most once gives nothing twice, at least once all.

    python -m tests.spark.claims.campaign --kills 10 --seed 1 [--contract at-least-once]
    python -m tests.spark.claims.campaign --worlds 300 --seed 1                (orders of steps without Spark)
    python -m tests.spark.claims.campaign --worlds 300 --seed 1 --mutations    (each safeguard taken out: noticed?)

Each run has another number of tasks. In some there are two drivers at once, in some the broker is killed too and
started again, before some the checkpoint is deleted, and some have a session that speculates.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.brokers import BrokerProcess
from tests.spark.claims.mutations import MUTATIONS
from tests.spark.claims.world import World
from tests.spark.sink.ambushed import AFTER_COMMIT, READER_POINTS, kill_session
from tests.spark.sink.readers import committed_numbers
from tests.spark.source.topics import Topics

from penstock.spark.at_most_once.offset_claims import count_skipped

AT_MOST, AT_LEAST = "at-most-once", "at-least-once"
ROWS_PER_BATCH, PARTITIONS = 60, 3
RUN_TIMEOUT_S = 300.0
GROUP = "campaign"
#: What only those come to who claim.
CLAIMING = ("before the claim", "in the claim", "after the claim", "ticket redeemed")
#: How often a point is come to before the driver dies there, at most.
COUNTS = {"ticket redeemed": 4, "task begun": 4}
LOCAL = "local[2,4]"
SPECULATING = {"spark.speculation": "true"}


def points_of(contract: str) -> list[str]:
    points = [*READER_POINTS, "task begun", AFTER_COMMIT]
    return points if contract == AT_MOST else [each for each in points if each not in CLAIMING]


class Campaign:
    def __init__(self, folder: Path, broker: BrokerProcess, chance: random.Random, contract: str) -> None:
        self.folder, self.broker, self.chance, self.contract = folder, broker, chance, contract
        self.topics = Topics(broker.bootstrap_servers)
        self.source = self.topics.create("in", PARTITIONS)
        self.target = self.topics.create("out", PARTITIONS)
        self.rows = 0
        self.tally: Counter[str] = Counter()

    def feed(self) -> range:
        """Enough for two batches, so that some are begun after others of the same run."""
        first, count = self.rows, 2 * ROWS_PER_BATCH // PARTITIONS
        for partition in range(PARTITIONS):
            self.topics.count(self.source, range(self.rows, self.rows + count), partition=partition)
            self.rows += count
        return range(first, self.rows)

    def start(self, point: str | None, *, speculates: bool = False) -> subprocess.Popen[bytes]:
        ambush = {}
        if point is not None:
            number = self.chance.randint(1, COUNTS.get(point, 2))
            counter = self.folder / f"count-{self.tally['runs']}"
            ambush = {"ambush": f"{point}:{number}", "ambushFile": str(counter), "ambushKills": "true"}
        self.tally["runs"] += 1
        given = {
            "master": LOCAL,
            "settings": SPECULATING if speculates else {},
            "twins": None,
            "checkpoint": str(self.folder / "checkpoint"),
            "source": self.topics.given(
                subscribe=self.source,
                startingOffsets="earliest",
                contract=self.contract,
                maxOffsetsPerTrigger=str(ROWS_PER_BATCH),
                minPartitions=str(self.chance.randint(1, 6)),
                **{"kafka.group.id": GROUP},
                **ambush,
            ),
            "sink": self.topics.given(topic=self.target, contract=self.contract, **ambush),
        }
        command = [sys.executable, "-m", "tests.spark.sink.query", json.dumps(given)]
        with (self.folder / "drivers.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def end(self, driver: subprocess.Popen[bytes]) -> int:
        """How it has ended."""
        try:
            return driver.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a driver came to no end; see {self.folder}/drivers.log") from None
        finally:
            kill_session(driver.pid)

    def kill(self, point: str) -> None:
        self.feed()
        has_twin, kills_broker = self.chance.random() < 0.25, self.chance.random() < 0.25
        if self.chance.random() < 0.25:
            shutil.rmtree(self.folder / "checkpoint", ignore_errors=True)
            self.tally["without its checkpoint"] += 1
        drivers = [self.start(point)]
        if has_twin:
            drivers.append(self.start(None))
        if kills_broker:
            time.sleep(self.chance.uniform(5, 12))  # somewhere in the run: where is not important
            self.broker.kill()
            self.broker.start()
        was_killed = [self.end(driver) < 0 for driver in drivers]
        self.tally[point if was_killed[0] else f"{point} (not come to)"] += 1
        self.tally["kills"] += was_killed[0]
        self.tally["with a second driver"] += has_twin
        self.tally["with the broker killed"] += kills_broker

    def speculate(self) -> None:
        """A session that speculates is refused by those who read at most once."""
        self.feed()
        code = self.end(self.start(None, speculates=True))
        is_refused = "set spark.speculation=false" in (self.folder / "drivers.log").read_text()
        assert (code != 0 and is_refused) == (self.contract == AT_MOST), f"speculation ended with {code}"
        self.tally["with speculation"] += 1

    def check(self) -> None:
        """In peace all is read that is new; what is lost or doubled is what the contract allows."""
        fed = self.feed()
        for _ in range(3):
            if self.end(self.start(None)) == 0:
                break
        places = [(self.target, index) for index in range(PARTITIONS)]
        with self.topics.cluster() as cluster:
            found = Counter(committed_numbers(self.topics, cluster, places))
            counted = count_skipped(cluster, GROUP)
        doubled, lost = sum(count - 1 for count in found.values()), self.rows - len(found)
        print(
            f"{self.contract}: {self.rows} rows, {lost} lost ({counted} counted), {doubled} doubled",
            flush=True,
        )
        assert found.keys() >= set(fed), "rows are lost where nothing was broken"
        assert not (doubled and self.contract == AT_MOST), f"{doubled} rows were given more than once"
        assert lost <= (counted if self.contract == AT_MOST else 0), f"{lost} rows are lost"


def kills(arguments: Any, chance: random.Random) -> None:
    points = points_of(arguments.contract)
    with tempfile.TemporaryDirectory(prefix="claims-campaign-") as name:
        broker = BrokerProcess(Path(name) / "broker").start()
        campaign = Campaign(Path(name), broker, chance, arguments.contract)
        try:
            # All of them in turn, the order by chance.
            chance.shuffle(points)
            for number in range(arguments.kills):
                point = arguments.point or points[number % len(points)]
                campaign.kill(point)
                print(f"{number + 1}/{arguments.kills} {point}: {dict(campaign.tally)}", flush=True)
                if number % 4 == 3:
                    campaign.check()
            campaign.speculate()
            campaign.check()
            assert campaign.tally["kills"] >= arguments.kills * 0.5, "too few died to prove anything"
        finally:
            broker.kill()


def worlds(arguments: Any, seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="claims-worlds-") as name:
        broker = BrokerProcess(Path(name) / "broker").start()
        try:
            topics = Topics(broker.bootstrap_servers)
            for mutation in MUTATIONS if arguments.mutations else [None]:
                found = first_flaw(topics, range(seed, seed + arguments.worlds), mutation)
                told = found or f"{arguments.worlds} worlds without a flaw"
                print(f"{mutation or 'as it is'}: {told}", flush=True)
                assert bool(found) == bool(mutation), "not as expected"
        finally:
            broker.kill()


def first_flaw(topics: Topics, seeds: range, mutation: str | None) -> str | None:
    for seed in seeds:
        world = World(topics, seed)
        with MUTATIONS[mutation]() if mutation else nullcontext():
            try:
                world.run()
                world.check()
            except AssertionError as error:
                story = "" if mutation else "\n" + "\n".join(world.stage.gates)
                return f"seed {seed}: {error}{story}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--contract", choices=(AT_MOST, AT_LEAST), default=AT_MOST)
    parser.add_argument("--point", choices=points_of(AT_MOST), help="only this one")
    parser.add_argument("--worlds", type=int, default=0)
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().getrandbits(31)
    print(f"seed {seed}", flush=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([p for p in sys.path if p])
    if arguments.worlds:
        worlds(arguments, seed)
    if arguments.kills:
        kills(arguments, random.Random(seed))


if __name__ == "__main__":
    main()
