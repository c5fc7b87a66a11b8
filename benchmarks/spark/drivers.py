"""Driver processes as the harness sees them: started with their own session, asked, watched, stopped."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks.brokers import procfs
from benchmarks.brokers.broker import Subject

_STOP_S = 60
_SAMPLES_MAX = 20
#: More than any file of a contest has.
_FILE_BYTES = str(4 << 30)
#: Both sides get the same; ANSI off because sums of hashes wrap around.
SETTINGS = {
    "spark.driver.memory": "2g",
    "spark.sql.ansi.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.numRecentProgressUpdates": "10000",
}


class DriverFailed(Exception):
    """A driver could not do what it was asked for, or ended."""


class Spent(NamedTuple):
    """CPU-seconds: of the driver with its Java and Python workers, of the broker, of everything on the machine."""

    spark_s: float
    broker_s: float
    machine_s: float
    wall_s: float

    def since(self, before: "Spent") -> "Spent":
        return Spent(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def other_cores(self) -> float:
        """What somebody else used meanwhile, which makes a round doubtful."""
        return max(self.machine_s - self.spark_s - self.broker_s, 0) / self.wall_s if self.wall_s else 0.0


class Driver:
    """A session on so many cores. Leaving the context ends its process, and those below it."""

    def __init__(self, *, cores: int, tasks: int, jars: Sequence[Path], folder: Path) -> None:
        self.cores = cores
        self._log = folder / f"driver-{cores}.log"
        self._arguments = {"master": f"local[{cores}]", "spark": _settings(tasks, jars, folder)}
        self._process: subprocess.Popen[str] | None = None
        self.spark_version = ""

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.spark.child", json.dumps(self._arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.spark_version = self._answer()["spark"]
        return self

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self._process = None

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Raises DriverFailed."""
        process = self._running
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"operation": operation, **arguments}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def watch(self, broker: Subject, operation: str, **arguments: Any) -> tuple[dict[str, Any], Spent]:
        """Ask, and tell what it took."""
        before = self._sample(broker)
        answer = self.ask(operation, **arguments)
        return answer, self._sample(broker).since(before)

    def _answer(self) -> dict[str, Any]:
        assert self._running.stdout is not None
        line = self._running.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DriverFailed(answer["error"])
        return answer

    def _sample(self, broker: Subject) -> Spent:
        spark_s = _cpu_seconds(self._running.pid)
        return Spent(spark_s, broker.cpu_seconds(), procfs.machine_cpu_seconds(), time.monotonic())

    @property
    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None, "not started"
        return self._process

    def _ended(self) -> DriverFailed:
        return DriverFailed(f"the driver ended:\n{self._log.read_text(errors='replace')[-2000:]}")


def _settings(tasks: int, jars: Sequence[Path], folder: Path) -> dict[str, str]:
    warehouse = {"spark.sql.warehouse.dir": str(folder / "warehouse"), "spark.local.dir": str(folder)}
    # A table is written with a file for each partition of its topic. Opening one is said to cost as much as a task may
    # read, so that each is read whole by a task of its own, and all have the same number of tasks.
    dealt = {
        "spark.sql.files.minPartitionNum": str(tasks),
        "spark.sql.files.maxPartitionBytes": _FILE_BYTES,
        "spark.sql.files.openCostInBytes": _FILE_BYTES,
    }
    peer = {"spark.jars": ",".join(map(str, jars))} if jars else {}
    return {**SETTINGS, **warehouse, **dealt, **peer}


def _cpu_seconds(pid: int) -> float:
    """Workers come and go, and one that goes while it is looked at is looked for again."""
    for _ in range(_SAMPLES_MAX):
        try:
            return procfs.cpu_seconds(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    raise DriverFailed("its processes do not hold still to be looked at")
