"""`--campaign sink`: drivers of Spark are killed at seeded points on one checkpoint; in the end each row is there once.

    make chaos ARGS="--campaign sink"                                (all of these, some 20 minutes)
    make chaos ARGS="--campaign sink --kills 10 --seed 1"
    make chaos ARGS="--campaign sink --worlds 500 --seed 1"          (orders of steps without Spark, many a second)
    make chaos ARGS="--campaign sink --mutations --worlds 500"       (is each missing safeguard noticed?)

Some runs have two drivers at once (--second-driver: all), in some the broker is killed too and started again; with
--speculation slow tasks get a second attempt.
"""

import dataclasses
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.chaos.command import Say, option, silent
from tests.spark import driver_campaign
from tests.spark.driver_campaign import DriverCampaign, DriverPlan
from tests.spark.sink.ambushed import AFTER_COMMIT, WRITER_POINTS
from tests.spark.sink.mutations import MUTATIONS
from tests.spark.sink.readers import await_rest, committed_numbers
from tests.spark.sink.world import World
from tests.spark.source.topics import Topics
from tests.spark.standalone import Standalone

ROWS_PER_BATCH, PARTITIONS = 60, 3
#: Enough to find every mutation.
WORLDS = 500
#: How long a mutated world waits for transactions that may never end.
MUTATED_S = 5.0
#: Where drivers and tasks die.
POINTS = ("before planning", "after planning", *WRITER_POINTS, AFTER_COMMIT)
#: How often a driver passes a point before it dies there, at most.
COUNTS = {"task begun": 4, "task prepared": 4, "between two commits": 4}
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.efficiency.enabled": "false",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.minTaskRuntime": "100ms",
}
LOCAL = "local[2,4]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(DriverPlan):
    point: str | None = option(None, "kill at this point only", choices=POINTS)
    speculation: bool = option(False, "on a small cluster that speculates", action="store_true")
    second_driver: bool = option(False, "always start a second driver", action="store_true")


class Campaign(DriverCampaign[Plan]):
    run_timeout_s = 900.0

    def __init__(self, folder: Path, plan: Plan, say: Say = silent) -> None:
        super().__init__(folder, plan, say)
        # Of two drivers that race for one checkpoint, one often stops before it comes to its point.
        self.killed_share = 0.2 if plan.second_driver else 0.6
        self.spark: Standalone | None = None
        self.rows = 0
        self.twins = folder / "twins"

    def points(self) -> Sequence[str]:
        return [self.plan.point] if self.plan.point else POINTS

    def broker_settings(self) -> dict[str, str]:
        return {"transaction.two.phase.commit.enable": str(self.plan.seed % 2 == 0).lower()}

    def work(self) -> None:
        if not self.plan.worlds and not self.plan.kills:
            self.plan = dataclasses.replace(self.plan, worlds=WORLDS)
            self.explore_worlds()
            self.plan = dataclasses.replace(self.plan, kills=len(POINTS), mutations=True)
        super().work()

    def prepare(self) -> None:
        self.source = self.topics.create("in", PARTITIONS)
        self.target = self.topics.create("out", PARTITIONS)

    def kill_drivers(self) -> None:
        if not self.plan.speculation:
            super().kill_drivers()
            return
        self.spark = Standalone(self.folder).start()
        try:
            super().kill_drivers()
            assert self.outcome.figures["twins"], "Spark has not speculated"
        finally:
            self.spark.stop()

    def feed(self) -> None:
        """Enough for two batches, so that some batches begin after others of the same run."""
        for partition in range(PARTITIONS):
            count = 2 * ROWS_PER_BATCH // PARTITIONS
            self.topics.count(self.source, range(self.rows, self.rows + count), partition=partition)
            self.rows += count

    def start(self, point: str | None, *, speculates: bool = False) -> subprocess.Popen[bytes]:
        ambush = self.ambush(point, COUNTS.get(point or "", 2))
        cluster = self.spark if speculates else None
        return self.launch(
            {
                "master": cluster.master if cluster else LOCAL,
                "settings": {**cluster.settings, **SPECULATION} if cluster else {},
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
        )

    def kill(self, point: str) -> None:
        self.feed()
        has_second = self.chance.random() < 0.25 or self.plan.second_driver
        drivers = [self.start(point, speculates=self.plan.speculation)]
        if has_second:
            drivers.append(self.start(None))
        if self.chance.random() < 0.25:
            self.restart_broker()
        self.end_killed(point, drivers, partial(self.start, speculates=self.plan.speculation))
        self.outcome.shapes["with speculation"] += self.plan.speculation
        self.outcome.figures["twins"] = self.twins.stat().st_size if self.twins.exists() else 0

    def check(self) -> None:
        for _ in range(3):
            if self.end(self.start(None)) >= 0 and self._is_complete():
                return
        raise AssertionError("rows are lost, doubled, or not to be read")

    def _is_complete(self) -> bool:
        partitions = [(self.target, index) for index in range(PARTITIONS)]
        with self.topics.cluster() as cluster:
            await_rest(cluster, partitions)
            found = Counter(committed_numbers(self.topics, cluster, partitions))
        doubled = sum(count - 1 for count in found.values())
        missing = self.rows - len(found)
        print(f"{self.rows} rows, {missing} missing, {doubled} doubled, nothing left open", flush=True)
        assert not doubled, f"{doubled} rows are there more than once"
        return not missing

    def explore_worlds(self) -> None:
        self.expect_flaws(MUTATIONS, lambda mutation: first_flaw(self.topics, self.seeds, mutation))


def first_flaw(topics: Topics, seeds: Iterable[int], mutation: str | None) -> str | None:
    return driver_campaign.first_flaw(
        seeds,
        lambda seed: World(topics, seed),
        lambda world: world.check(within_s=MUTATED_S if mutation else 120.0),
        MUTATIONS[mutation] if mutation else None,
    )
