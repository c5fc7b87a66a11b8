"""What a scenario is, and what it is given to work with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.brokers import Broker
from benchmarks.measure import Metrics, Timing, WarmUp, run_workload
from benchmarks.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long everything takes: a full run for figures, a quick one for a first look."""

    timing: Timing
    warm_up: WarmUp
    rounds: int
    starts: int


FULL = Pace(timing=Timing(2, 8), warm_up=WarmUp(10, 2_000_000_000, 300_000), rounds=2, starts=5)
QUICK = Pace(timing=Timing(0.5, 1.5), warm_up=WarmUp(3, 400_000_000, 60_000), rounds=1, starts=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A warm broker of one kind, and room for fresh ones."""

    kind: type[Broker]
    broker: Broker
    folder: Path
    pace: Pace

    @contextmanager
    def fresh(self) -> Iterator[Broker]:
        """A broker that was never started, on an empty folder."""
        with TemporaryDirectory(dir=self.folder) as folder, self.kind(Path(folder) / "broker") as broker:
            yield broker


Measure = Callable[[Site], Metrics]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`shown` names the metrics that the table prints; the JSON file has them all."""

    name: str
    title: str
    measure: Measure
    shown: tuple[str, ...]
    quick: bool = False
    rounds_max: int = 99


def flat_out_or_paced(workload: Workload) -> Measure:
    return lambda site: run_workload(site.broker, workload, site.pace.timing)
