"""Drivers of real Spark killed at seeded points: at most once gives nothing twice, at least once gives everything.

    python -m tests.spark.claims.campaign --kills 10 --seed 1 [--contract at-least-once]
    python -m tests.spark.claims.campaign --worlds 300 --seed 1                (orders of steps without Spark)
    python -m tests.spark.claims.campaign --worlds 300 --seed 1 --mutations    (is each missing safeguard noticed?)

In some runs there are two drivers at once, in some the broker is killed too and started again, before some the
checkpoint is deleted, and some have a session that speculates.
"""

import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.command import Say, option, run_command, silent
from tests.spark import driver_campaign
from tests.spark.claims.mutations import MUTATIONS
from tests.spark.claims.world import World
from tests.spark.driver_campaign import DriverCampaign, DriverPlan
from tests.spark.sink.ambushed import AFTER_COMMIT, READER_POINTS
from tests.spark.sink.readers import committed_numbers
from tests.spark.source.topics import Topics

from penstock.spark.at_most_once.offset_claims import count_skipped

AT_MOST, AT_LEAST = "at-most-once", "at-least-once"
ROWS_PER_BATCH, PARTITIONS = 60, 3
GROUP = "campaign"
#: Points of drivers that claim offsets.
CLAIMING = ("before the claim", "in the claim", "after the claim", "task claimed")
#: How often a driver passes a point before it dies there, at most.
COUNTS = {"task claimed": 4, "task begun": 4}
LOCAL = "local[2,4]"
SPECULATING = {"spark.speculation": "true"}


POINTS = (*READER_POINTS, "task begun", AFTER_COMMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(DriverPlan):
    contract: str = option(AT_MOST, "of source and sink", choices=(AT_MOST, AT_LEAST))
    point: str | None = option(None, "kill at this point only", choices=POINTS)


class Campaign(DriverCampaign[Plan]):
    run_timeout_s = 300.0
    check_every = 4

    def __init__(self, folder: Path, plan: Plan, say: Say = silent) -> None:
        super().__init__(folder, plan, say)
        self.contract = plan.contract
        self.rows = 0

    def points(self) -> Sequence[str]:
        if self.plan.point:
            return [self.plan.point]
        return [each for each in POINTS if self.contract == AT_MOST or each not in CLAIMING]

    def prepare(self) -> None:
        self.source = self.topics.create("in", PARTITIONS)
        self.target = self.topics.create("out", PARTITIONS)

    def kill_drivers(self) -> None:
        super().kill_drivers()
        self.speculate()
        self.check()

    def feed(self) -> range:
        """Enough for two batches, so that some batches begin after others of the same run."""
        first, count = self.rows, 2 * ROWS_PER_BATCH // PARTITIONS
        for partition in range(PARTITIONS):
            self.topics.count(self.source, range(self.rows, self.rows + count), partition=partition)
            self.rows += count
        return range(first, self.rows)

    def start(self, point: str | None, *, speculates: bool = False) -> subprocess.Popen[bytes]:
        ambush = self.ambush(point, COUNTS.get(point or "", 2))
        return self.launch(
            {
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
        )

    def kill(self, point: str) -> None:
        self.feed()
        if self.chance.random() < 0.25:
            shutil.rmtree(self.folder / "checkpoint", ignore_errors=True)
            self.outcome.shapes["without its checkpoint"] += 1
        drivers = [self.start(point)]
        if self.chance.random() < 0.25:
            drivers.append(self.start(None))
        if self.chance.random() < 0.25:
            self.restart_broker()
        self.end_killed(point, drivers, self.start)

    def speculate(self) -> None:
        """A source that reads at most once refuses a session that speculates."""
        self.feed()
        code = self.end(self.start(None, speculates=True))
        is_refused = "needs spark.speculation=false" in self.driver_log.read_text()
        assert (code != 0 and is_refused) == (self.contract == AT_MOST), f"speculation ended with {code}"
        self.outcome.shapes["with speculation"] += 1

    def check(self) -> None:
        """Without kills, all that is new is read; what is lost or doubled is what the contract allows."""
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

    def explore_worlds(self) -> None:
        self.expect_flaws(MUTATIONS, lambda mutation: first_flaw(self.topics, self.seeds, mutation))


def first_flaw(topics: Topics, seeds: Iterable[int], mutation: str | None) -> str | None:
    return driver_campaign.first_flaw(
        seeds,
        lambda seed: World(topics, seed),
        World.check,
        MUTATIONS[mutation] if mutation else None,
    )


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:], Plan, Campaign, __doc__, "python -m tests.spark.claims.campaign"))
