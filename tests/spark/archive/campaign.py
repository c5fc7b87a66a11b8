"""Drivers of real Spark killed at seeded points on one table: in the end each record is there once.

    python -m tests.spark.archive.campaign --kills 10 --seed 1
    python -m tests.spark.archive.campaign --worlds 500 --seed 1      (orders of steps without Spark, many a second)
    python -m tests.spark.archive.campaign --mutations --worlds 100   (is each missing safeguard noticed?)

Before some runs the checkpoint is deleted, and some have two drivers at once.
"""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.command import Say, run_command, silent
from tests.spark.archive.lake import rows_in
from tests.spark.archive.mutations import WITH_TOPIC, WITHOUT_TOPIC
from tests.spark.archive.query import POINTS
from tests.spark.archive.worlds import first_flaw
from tests.spark.driver_campaign import DriverCampaign, DriverPlan

ROWS, PARTITIONS = 120, 3


class Campaign(DriverCampaign[DriverPlan]):
    driver = "tests.spark.archive.query"
    killed_share = 0.4

    def __init__(self, folder: Path, plan: DriverPlan, say: Say = silent) -> None:
        super().__init__(folder, plan, say)
        self.table, self.checkpoint = folder / "table", folder / "checkpoint"
        self.ends = [0] * PARTITIONS

    def points(self) -> Sequence[str]:
        return list(POINTS)

    def prepare(self) -> None:
        self.topic = self.topics.create("orders", PARTITIONS)

    def feed(self) -> None:
        """Enough for two batches, so that some batches begin after others of the same run."""
        for partition in range(PARTITIONS):
            count = self.chance.randint(1, 2 * ROWS // PARTITIONS)
            self.topics.count(self.topic, range(count), partition=partition)
            self.ends[partition] += count

    def start(self, point: str | None) -> subprocess.Popen[bytes]:
        self.outcome.shapes["runs"] += 1
        return self.launch(
            {
                "bootstrap": self.topics.bootstrap,
                "topic": self.topic,
                "table": str(self.table),
                "checkpoint": str(self.checkpoint),
                "tasks": self.chance.randint(1, 6),
                "point": point,
                "number": self.chance.randint(1, 2),
                "sprung": str(self.folder / f"sprung-{self.outcome.shapes['runs']}"),
            }
        )

    def kill(self, point: str) -> None:
        self.feed()
        if self.chance.random() < 0.3:
            shutil.rmtree(self.checkpoint, ignore_errors=True)
            self.outcome.shapes["with the checkpoint deleted"] += 1
        drivers = [self.start(point)]
        if self.chance.random() < 0.3:
            drivers.append(self.start(None))
        self.end_killed(point, drivers, self.start)

    def check(self) -> None:
        assert self.end(self.start(None)) == 0, f"a driver failed; see {self.driver_log}"
        expected = [(partition, offset) for partition, end in enumerate(self.ends) for offset in range(end)]
        found = rows_in(self.table)
        doubled = len(found) - len(set(found))
        missing = len(set(expected) - set(found))
        print(f"{len(expected)} records, {missing} missing, {doubled} doubled", flush=True)
        assert not missing, f"{missing} records are missing"
        assert not doubled, f"{doubled} records are there more than once"

    def explore_worlds(self) -> None:
        for counts_offsets, known in ((True, WITH_TOPIC), (False, WITHOUT_TOPIC)):
            print("of a topic" if counts_offsets else "of batches only", flush=True)
            self.expect_flaws(
                known,
                lambda mutation: first_flaw(self.seeds, mutation, counts_offsets=counts_offsets),  # noqa: B023
            )


if __name__ == "__main__":
    program = "python -m tests.spark.archive.campaign"
    sys.exit(run_command(sys.argv[1:], DriverPlan, Campaign, __doc__, program))
