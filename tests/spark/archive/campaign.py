"""Drivers of real Spark killed at seeded points, again and again, on one table: in the end each record is there once.

    python -m tests.spark.archive.campaign --kills 10 --seed 1
    python -m tests.spark.archive.campaign --worlds 500 --seed 1      (orders of steps without Spark, many a second)
    python -m tests.spark.archive.campaign --mutations --worlds 100   (each safeguard taken out: is that noticed?)

Each run has another number of tasks. In some the checkpoint is deleted before, some have two drivers at once.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.brokers import BrokerProcess
from tests.spark.archive.lake import rows_in
from tests.spark.archive.mutations import WITH_TOPIC, WITHOUT_TOPIC
from tests.spark.archive.query import POINTS
from tests.spark.archive.worlds import first_flaw
from tests.spark.sink.ambushed import kill_session
from tests.spark.source.topics import Topics

ROWS, PARTITIONS = 120, 3
RUN_TIMEOUT_S = 600.0


class Campaign:
    def __init__(self, folder: Path, broker: BrokerProcess, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.topics = Topics(broker.bootstrap_servers)
        self.topic = self.topics.create("orders", PARTITIONS)
        self.ends = [0] * PARTITIONS
        self.tally: Counter[str] = Counter()

    @property
    def table(self) -> Path:
        return self.folder / "table"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def feed(self) -> None:
        """Enough for two batches, so that some are begun after others of the same run."""
        for partition in range(PARTITIONS):
            count = self.chance.randint(1, 2 * ROWS // PARTITIONS)
            self.topics.count(self.topic, range(count), partition=partition)
            self.ends[partition] += count

    def start(self, point: str | None) -> subprocess.Popen[bytes]:
        self.tally["runs"] += 1
        given = {
            "bootstrap": self.topics.bootstrap,
            "topic": self.topic,
            "table": str(self.table),
            "checkpoint": str(self.checkpoint),
            "tasks": self.chance.randint(1, 6),
            "point": point,
            "number": self.chance.randint(1, 2),
            "sprung": str(self.folder / f"sprung-{self.tally['runs']}"),
        }
        command = [sys.executable, "-m", "tests.spark.archive.query", json.dumps(given)]
        with (self.folder / "drivers.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def end(self, driver: subprocess.Popen[bytes]) -> int:
        try:
            return driver.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a driver came to no end; see {self.folder}/drivers.log") from None
        finally:
            kill_session(driver.pid)

    def kill(self, point: str) -> None:
        self.feed()
        if self.chance.random() < 0.3:
            shutil.rmtree(self.checkpoint, ignore_errors=True)
            self.tally["with the checkpoint deleted"] += 1
        drivers = [self.start(point)]
        if self.chance.random() < 0.3:
            drivers.append(self.start(None))
            self.tally["with a second driver"] += 1
        was_killed = [self.end(driver) < 0 for driver in drivers]
        self.tally[point if was_killed[0] else f"{point} (not come to)"] += 1
        self.tally["kills"] += was_killed[0]

    def check(self) -> None:
        """A run that nobody disturbs, and then everything is there."""
        assert self.end(self.start(None)) == 0, f"a driver failed; see {self.folder}/drivers.log"
        expected = [(partition, offset) for partition, end in enumerate(self.ends) for offset in range(end)]
        found = rows_in(self.table)
        doubled = len(found) - len(set(found))
        missing = len(set(expected) - set(found))
        print(f"{len(expected)} records, {missing} missing, {doubled} doubled", flush=True)
        assert not missing, f"{missing} records are missing"
        assert not doubled, f"{doubled} records are there more than once"


def kills(count: int, chance: random.Random) -> None:
    points = list(POINTS)
    with tempfile.TemporaryDirectory(prefix="archive-campaign-") as name:
        broker = BrokerProcess(Path(name) / "broker").start()
        campaign = Campaign(Path(name), broker, chance)
        try:
            # All of them in turn, the order by chance.
            chance.shuffle(points)
            for number in range(count):
                campaign.kill(points[number % len(points)])
                print(f"{number + 1}/{count}: {dict(campaign.tally)}", flush=True)
                if number % 3 == 2:
                    campaign.check()
            campaign.check()
            assert campaign.tally["kills"] >= count * 0.4, "too few died to prove anything"
        except AssertionError:
            kept = Path(tempfile.mkdtemp(prefix="archive-drivers-")) / "drivers.log"
            shutil.copy(campaign.folder / "drivers.log", kept)
            print(f"what drivers said is in {kept}", flush=True)
            raise
        finally:
            broker.kill()


def worlds(seeds: range, *, mutations: bool) -> None:
    for counts_offsets, known in ((True, WITH_TOPIC), (False, WITHOUT_TOPIC)):
        kind = "of a topic" if counts_offsets else "of batches only"
        for mutation in known if mutations else [None]:
            found = first_flaw(seeds, mutation, counts_offsets=counts_offsets)
            print(
                f"{kind}, {mutation or 'as it is'}: {found or f'{len(seeds)} worlds without a flaw'}",
                flush=True,
            )
            assert bool(found) == bool(mutation), "not as expected"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--worlds", type=int, default=0)
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--seed", type=int, default=None)
    arguments: Any = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().getrandbits(31)
    print(f"seed {seed}", flush=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([p for p in sys.path if p])
    if arguments.worlds:
        worlds(range(seed, seed + arguments.worlds), mutations=arguments.mutations)
    if arguments.kills:
        kills(arguments.kills, random.Random(seed))


if __name__ == "__main__":
    main()
