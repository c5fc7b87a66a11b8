"""Runs scenarios on every broker in turn and collects the figures."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.brokers import Broker
from benchmarks.crew import WorkerFailed
from benchmarks.measure import Metrics, warm_up
from benchmarks.raw_client import BrokerError
from benchmarks.scenarios.scenario import Pace, Scenario, Site
from benchmarks.scenarios.unbatched import FLAT_OUT
from benchmarks.stats import median_metrics
from benchmarks.workload import Client, Workload

#: What has to be hot before anything counts: both kinds of clients, large and small requests.
WARM_UP = (Workload(value_bytes=100), Workload(value_bytes=1024, client=Client.LIBRDKAFKA), FLAT_OUT)


@dataclass(slots=True, kw_only=True)
class Result:
    """All rounds of one scenario, by the broker's name; a round that failed leaves its reason."""

    scenario: Scenario
    rounds: dict[str, list[Metrics]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def median(self, broker: str) -> Metrics:
        return median_metrics(self.rounds.get(broker, []))


class Step(NamedTuple):
    """Something the driver is about to do, for whoever watches."""

    broker: str
    what: str


def run_scenarios(
    scenarios: Sequence[Scenario],
    kinds: Sequence[type[Broker]],
    pace: Pace,
    folder: Path,
    results: list[Result],
) -> Iterator[Step]:
    """Yields before every step; fills `results` as it goes, so that an interrupted run keeps what it has."""
    with ExitStack() as stack:
        sites = []
        for kind in kinds:
            yield Step(kind.name, "start and warm up")
            sites.append(_warm_site(stack, kind, pace, folder))
        for position, scenario in enumerate(scenarios):
            results.append(result := Result(scenario=scenario))
            for number in range(min(pace.rounds, scenario.rounds_max)):
                # Whoever goes second finds warmer caches and fuller disks, so they take turns.
                for site in sites[:: -1 if (position + number) % 2 else 1]:
                    yield Step(site.kind.name, scenario.title)
                    _run_round(site, result)


def _warm_site(stack: ExitStack, kind: type[Broker], pace: Pace, folder: Path) -> Site:
    broker = stack.enter_context(kind(folder / kind.name))
    broker.start()
    for workload in WARM_UP:
        warm_up(broker, workload, pace.warm_up)
    return Site(kind=kind, broker=broker, folder=folder, pace=pace)


def _run_round(site: Site, result: Result) -> None:
    name = site.kind.name
    try:
        result.rounds.setdefault(name, []).append(result.scenario.measure(site))
    except (BrokerError, WorkerFailed, OSError) as error:
        result.failures[name] = str(error)


def quick_only(scenarios: Sequence[Scenario]) -> list[Scenario]:
    return [replace(scenario, rounds_max=1) for scenario in scenarios if scenario.quick]
