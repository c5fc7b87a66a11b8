"""What a scenario is, and what it is given to work with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.brokers.broker import Subject
from benchmarks.load.workload import Workload
from benchmarks.measure import Metrics, Timing, WarmUp, run_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long everything takes: a full run for figures, a quick one for a first look."""

    timing: Timing
    warm_up: WarmUp
    rounds: int
    starts: int = 1
    #: How often each kind of fault strikes.
    faults: int = 1
    #: Whether leaders that are the active controller too are struck as well.
    hits_controllers: bool = True
    idle_s: float = 5


FULL = Pace(timing=Timing(2, 8), warm_up=WarmUp(10, 2_000_000_000, 300_000), rounds=2, starts=5)
QUICK = Pace(timing=Timing(0.5, 1.5), warm_up=WarmUp(3, 400_000_000, 60_000), rounds=1, starts=1)


@dataclass(slots=True, kw_only=True)
class Site:
    """A warm broker (or cluster) of one kind, and room for fresh ones."""

    kind: type[Subject]
    folder: Path
    pace: Pace
    _warm: Subject | None = None

    def settle_in(self, broker: Subject) -> None:
        """It has been warmed up, and serves from here on."""
        self._warm = broker

    @property
    def is_warm(self) -> bool:
        return self._warm is not None

    @property
    def broker(self) -> Subject:
        assert self._warm is not None, "this scenario needs no warm broker, by its own word"
        return self._warm

    @contextmanager
    def fresh(self) -> Iterator[Subject]:
        """A broker that was never started, on an empty folder."""
        with TemporaryDirectory(dir=self.folder) as folder, self.kind(Path(folder) / "broker") as broker:
            yield broker


Measure = Callable[[Site], Metrics]
#: What makes a broker hot before anything counts.
Warm = Callable[[Subject, Pace], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`shown` names the metrics that the table prints; the JSON file has them all."""

    name: str
    title: str
    measure: Measure
    shown: tuple[str, ...]
    quick: bool = False
    rounds_max: int = 99
    #: Whether it is run on a broker that has been warmed up.
    needs_warm: bool = True
    #: What it wants to be hot besides.
    warm_up: Warm | None = None
    #: Whose kind of thing it is, by name.
    runs_on: tuple[str, ...] = ("penstock", "kafka")


def flat_out_or_paced(workload: Workload) -> Measure:
    return lambda site: run_workload(site.broker, workload, site.pace.timing)
