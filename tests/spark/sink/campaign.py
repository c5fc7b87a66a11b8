"""Drivers of real Spark killed at seeded points, again and again, on one checkpoint: in the end each row is there once.

    make chaos ARGS="--campaign sink"                                (all of these, some 20 minutes)
    make chaos ARGS="--campaign sink --kills 10 --seed 1"
    make chaos ARGS="--campaign sink --worlds 500 --seed 1"          (orders of steps without Spark, many a second)
    make chaos ARGS="--campaign sink --mutations --worlds 500"       (each safeguard taken out: is that noticed?)

Each run has another number of tasks. Some have two drivers at once (--second-driver: all), in some the broker is killed
too and started again; with --speculation slow tasks get twins.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.brokers import BrokerProcess
from tests.spark.sink.ambushed import AFTER_COMMIT, WRITER_POINTS, kill_session
from tests.spark.sink.mutations import MUTATIONS
from tests.spark.sink.readers import await_rest, committed_numbers
from tests.spark.sink.world import World
from tests.spark.source.topics import Topics
from tests.spark.standalone import Standalone

ROWS_PER_BATCH, PARTITIONS = 60, 3
#: So many of them find every mutation.
WORLDS = 500
#: Transactions that nobody ends are waited for this long where that is what is expected.
MUTATED_S = 5.0
RUN_TIMEOUT_S = 900.0
#: Where drivers and tasks die.
POINTS = ("before planning", "after planning", *WRITER_POINTS, AFTER_COMMIT)
#: How often a point is come to before the driver dies there, at most.
COUNTS = {"task begun": 4, "task prepared": 4, "between two ends": 4}
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.efficiency.enabled": "false",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.minTaskRuntime": "100ms",
}
LOCAL = "local[2,4]"


class Campaign:
    def __init__(self, folder: Path, broker: BrokerProcess, chance: random.Random, arguments: Any) -> None:
        self.folder, self.broker, self.chance = folder, broker, chance
        self.spark = Standalone(folder).start() if arguments.speculation else None
        self.arguments = arguments
        self.topics = Topics(broker.bootstrap_servers)
        self.source = self.topics.create("in", PARTITIONS)
        self.target = self.topics.create("out", PARTITIONS)
        self.rows = 0
        self.twins = folder / "twins"
        self.tally: Counter[str] = Counter()

    def feed(self) -> None:
        """Enough for two batches, so that some are begun after others of the same run."""
        for partition in range(PARTITIONS):
            count = 2 * ROWS_PER_BATCH // PARTITIONS
            self.topics.count(self.source, range(self.rows, self.rows + count), partition=partition)
            self.rows += count

    def start(self, point: str | None, *, speculates: bool = False) -> subprocess.Popen[bytes]:
        ambush = {}
        if point is not None:
            number = self.chance.randint(1, COUNTS.get(point, 2))
            counter = self.folder / f"count-{self.tally['runs']}"
            ambush = {"ambush": f"{point}:{number}", "ambushFile": str(counter), "ambushKills": "true"}
        self.tally["runs"] += 1
        given = {
            "master": self.spark.master if self.spark and speculates else LOCAL,
            "settings": {**self.spark.settings, **SPECULATION} if self.spark and speculates else {},
            "twins": str(self.twins) if speculates else None,
            "checkpoint": str(self.folder / "checkpoint"),
            "source": self.topics.given(
                subscribe=self.source,
                startingOffsets="earliest",
                maxOffsetsPerTrigger=str(ROWS_PER_BATCH),
                minPartitions=str(self.chance.randint(1, 6)),
                **ambush,
            ),
            "sink": self.topics.given(topic=self.target, contract="exactly-once", **ambush),
        }
        command = [sys.executable, "-m", "tests.spark.sink.query", json.dumps(given)]
        with (self.folder / "drivers.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def end(self, driver: subprocess.Popen[bytes]) -> bool:
        """Whether it was killed, rather than ending by itself."""
        try:
            code = driver.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a driver came to no end; see {self.folder}/drivers.log") from None
        finally:
            kill_session(driver.pid)
        return code < 0

    def kill(self, point: str) -> None:
        self.feed()
        speculates = self.arguments.speculation
        has_twin = self.chance.random() < 0.25 or self.arguments.second_driver
        kills_broker = self.chance.random() < 0.25
        drivers = [self.start(point, speculates=speculates)]
        if has_twin:
            drivers.append(self.start(None))
        if kills_broker:
            time.sleep(self.chance.uniform(5, 12))  # somewhere in the run: where is not important
            self.broker.kill()
            self.broker.start()
        was_killed = [self.end(driver) for driver in drivers]
        self.tally[point if was_killed[0] else f"{point} (not come to)"] += 1
        self.tally["kills"] += was_killed[0]
        self.tally["with a second driver"] += has_twin
        self.tally["with speculation"] += speculates
        self.tally["twins"] = self.twins.stat().st_size if self.twins.exists() else 0
        self.tally["with the broker killed"] += kills_broker

    def check(self) -> None:
        for _ in range(3):
            if not self.end(self.start(None)) and self._is_complete():
                return
        raise AssertionError("rows are lost, doubled, or not to be read")

    def _is_complete(self) -> bool:
        places = [(self.target, index) for index in range(PARTITIONS)]
        with self.topics.cluster() as cluster:
            await_rest(cluster, places)
            found = Counter(committed_numbers(self.topics, cluster, places))
        doubled = sum(count - 1 for count in found.values())
        missing = self.rows - len(found)
        print(f"{self.rows} rows, {missing} missing, {doubled} doubled, nothing left open", flush=True)
        assert not doubled, f"{doubled} rows are there more than once"
        return not missing


def kills(arguments: Any, chance: random.Random) -> None:
    points = list(POINTS)
    with tempfile.TemporaryDirectory(prefix="sink-campaign-") as name:
        settings = {"transaction.two.phase.commit.enable": str(chance.random() < 0.5).lower()}
        broker = BrokerProcess(Path(name) / "broker", settings).start()
        campaign = Campaign(Path(name), broker, chance, arguments)
        try:
            # All of them in turn, the order by chance.
            chance.shuffle(points)
            for number in range(arguments.kills):
                point = arguments.point or points[number % len(points)]
                campaign.kill(point)
                print(f"{number + 1}/{arguments.kills} {point}: {dict(campaign.tally)}", flush=True)
                if number % 3 == 2:
                    campaign.check()
            campaign.check()
            # Where two race for one checkpoint, one of them often stops before it gets to where it was to die.
            needed = 0.2 if arguments.second_driver else 0.6
            assert campaign.tally["kills"] >= arguments.kills * needed, "too few died to prove anything"
            assert campaign.tally["twins"] or not arguments.speculation, "Spark has not speculated"
        finally:
            if campaign.spark is not None:
                campaign.spark.stop()
            broker.kill()


def worlds(arguments: Any, seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="sink-worlds-") as name:
        settings = {"transaction.two.phase.commit.enable": str(seed % 2 == 0).lower()}
        broker = BrokerProcess(Path(name) / "broker", settings).start()
        try:
            topics = Topics(broker.bootstrap_servers)
            wrong = []
            for mutation in MUTATIONS if arguments.mutations else [None]:
                found = first_flaw(topics, range(seed, seed + arguments.worlds), mutation)
                print(
                    f"{mutation or 'as it is'}: {found or f'{arguments.worlds} worlds without a flaw'}",
                    flush=True,
                )
                if bool(found) != bool(mutation):
                    wrong.append(mutation or "as it is")
            assert not wrong, f"not as expected: {', '.join(wrong)}"
        finally:
            broker.kill()


def first_flaw(topics: Topics, seeds: Iterable[int], mutation: str | None) -> str | None:
    for seed in seeds:
        world = World(topics, seed)
        with MUTATIONS[mutation]() if mutation else nullcontext():
            try:
                world.run()
                world.check(within_s=MUTATED_S if mutation else 120.0)
            except AssertionError as error:
                return (
                    f"seed {seed}: {error}"
                    if mutation
                    else f"seed {seed}: {error}\n" + "\n".join(world.stage.gates)
                )
    return None


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--point", choices=POINTS, help="only this one")
    parser.add_argument("--speculation", action="store_true", help="on a small cluster that speculates")
    parser.add_argument("--second-driver", action="store_true", help="always start a second one")
    parser.add_argument("--worlds", type=int, default=0)
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args(words)
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().getrandbits(31)
    print(f"seed {seed}", flush=True)
    os.environ["PYTHONPATH"] = os.pathsep.join([p for p in sys.path if p])
    if not arguments.worlds and not arguments.kills:
        arguments.worlds, arguments.kills = WORLDS, len(POINTS)
        worlds(arguments, seed)
        arguments.mutations = True
    if arguments.worlds:
        worlds(arguments, seed)
    if arguments.kills:
        kills(arguments, random.Random(seed))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
