"""Runs scenarios on every broker in turn and collects the figures."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.brokers.broker import Subject
from benchmarks.load.processes import WorkerFailed
from benchmarks.measure import Metrics
from benchmarks.reports.metrics import METRICS
from benchmarks.reports.stats import median_metrics, worst_metrics
from benchmarks.scenarios.scenario import Pace, Scenario, Site, Warm
from benchmarks.wire.raw_client import BrokerError


@dataclass(slots=True, kw_only=True)
class Result:
    """All rounds of one scenario, by the broker's name; a round that failed leaves its reason."""

    scenario: Scenario
    rounds: dict[str, list[Metrics]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def median(self, broker: str) -> Metrics:
        return median_metrics(self.rounds.get(broker, []))

    def worst(self, broker: str) -> Metrics:
        """Of the metrics that can be better or worse."""
        higher_is_better = {name: metric.higher_is_better for name, metric in METRICS.items()}
        return worst_metrics(self.rounds.get(broker, []), higher_is_better)


class Step(NamedTuple):
    """The next step of the driver, for progress output."""

    broker: str
    what: str


def run_scenarios(
    scenarios: Sequence[Scenario],
    kinds: Sequence[type[Subject]],
    pace: Pace,
    warm_up: Sequence[Warm],
    folder: Path,
    results: list[Result],
) -> Iterator[Step]:
    """Yields before every step; fills `results` as it goes, so that an interrupted run keeps what it has."""
    with ExitStack() as stack:
        sites = [Site(kind=kind, folder=folder, pace=pace) for kind in kinds]
        for position, scenario in enumerate(scenarios):
            if scenario.needs_warm and not sites[0].is_warm:
                for site in sites:
                    yield Step(site.kind.name, "start and warm up")
                    _warm(stack, site, (*warm_up, *_wanted_by(scenarios, site)))
            results.append(result := Result(scenario=scenario))
            for number in range(min(pace.rounds, scenario.rounds_max)):
                # The second finds warmer caches and fuller disks, so they take turns.
                for site in sites[:: -1 if (position + number) % 2 else 1]:
                    if site.kind.name in scenario.runs_on:
                        yield Step(site.kind.name, scenario.title)
                        _run_round(site, result)


def _warm(stack: ExitStack, site: Site, warm_up: Sequence[Warm]) -> None:
    broker = stack.enter_context(site.kind(site.folder / site.kind.name))
    broker.start()
    for make_hot in warm_up:
        make_hot(broker, site.pace)
    site.settle_in(broker)


def _wanted_by(scenarios: Sequence[Scenario], site: Site) -> dict[Warm, None]:
    """Each once, however many scenarios want it."""
    return {s.warm_up: None for s in scenarios if s.warm_up is not None and site.kind.name in s.runs_on}


def _run_round(site: Site, result: Result) -> None:
    name = site.kind.name
    try:
        result.rounds.setdefault(name, []).append(result.scenario.measure(site))
    except (BrokerError, WorkerFailed, OSError) as error:
        result.failures[name] = str(error)


def quick_only(scenarios: Sequence[Scenario]) -> list[Scenario]:
    return [replace(scenario, rounds_max=1) for scenario in scenarios if scenario.quick]
