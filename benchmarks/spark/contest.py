"""A contest: who takes part, and rounds in which they take turns, so that a busy moment of the machine meets all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.measure import Metrics
from benchmarks.spark.drivers import Driver
from benchmarks.spark.stage import Stage
from benchmarks.stats import median, ratio

#: Whoever is measured, by the name that results have for it.
OURS = "penstock"
CONNECTOR = "connector"


class WrongRows(Exception):
    """Somebody read or wrote other rows than the others did."""


class Round(NamedTuple):
    """What one turn took, and what must be the same for all."""

    metrics: Metrics
    checksum: object


class Turn(NamedTuple):
    contender: str
    take: Callable[[], Round]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """`contenders` in the order in which they are shown, the first of them ours; `shown` names metrics."""

    name: str
    title: str
    cores: int
    contenders: tuple[str, ...]
    shown: tuple[str, ...]
    #: Makes topics and tables, and gives a turn for each who takes part.
    prepare: Callable[[Stage, Driver], AbstractContextManager[Sequence[Turn]]]


class Spread(NamedTuple):
    median: float
    least: float
    most: float


@dataclass(slots=True, kw_only=True)
class Result:
    contest: Contest
    rounds: dict[str, list[Metrics]] = field(default_factory=dict)
    failure: str | None = None

    def spread(self, contender: str, metric: str) -> Spread | None:
        return _spread([each[metric] for each in self.rounds.get(contender, ()) if metric in each])

    def ratio(self, contender: str, metric: str, ours: str) -> Spread | None:
        """Ours divided by theirs, round by round: what disturbs a round disturbs both."""
        pairs = zip(self.rounds.get(ours, ()), self.rounds.get(contender, ()), strict=False)
        found = (ratio(mine.get(metric), theirs.get(metric)) for mine, theirs in pairs)
        return _spread([each for each in found if each is not None])

    def medians(self) -> Mapping[str, Metrics]:
        names = {
            who: dict.fromkeys(name for each in rounds for name in each)
            for who, rounds in self.rounds.items()
        }
        return {who: {name: self._median(who, name) for name in named} for who, named in names.items()}

    def _median(self, contender: str, metric: str) -> float:
        found = self.spread(contender, metric)
        assert found is not None
        return found.median


def _spread(values: Sequence[float]) -> Spread | None:
    return Spread(median(values), min(values), max(values)) if values else None


def hold(contest: Contest, stage: Stage, driver: Driver, result: Result) -> Iterator[str]:
    """Yields what comes next. Raises WrongRows, DriverFailed and what brokers raise."""
    yield "make topics and tables"
    with contest.prepare(stage, driver) as turns:
        agreed: dict[str, object] = {}
        for number in range(stage.pace.warm_ups):
            for turn in turns:
                yield f"{turn.contender}, warming up ({number + 1})"
                _agree(agreed, turn, turn.take())
        for number in range(stage.pace.rounds):
            for turn in turns:
                yield f"{turn.contender}, round {number + 1}"
                driver.ask("collect_garbage")
                taken = turn.take()
                _agree(agreed, turn, taken)
                result.rounds.setdefault(turn.contender, []).append(taken.metrics)


def _agree(agreed: dict[str, object], turn: Turn, taken: Round) -> None:
    agreed[turn.contender] = taken.checksum
    first, expected = next(iter(agreed.items()))
    if taken.checksum != expected:
        raise WrongRows(f"{turn.contender} has {taken.checksum} where {first} has {expected}")
