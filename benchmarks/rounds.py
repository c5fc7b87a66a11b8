"""Rounds in which contenders take turns, so that other load affects all of them, and their statistics."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.measure import Metrics
from benchmarks.reports.stats import median, median_metrics, ratio


class WrongRows(Exception):
    """Somebody read or wrote other rows than the others did."""


class Round(NamedTuple):
    """What one turn took, and what must be the same for all."""

    metrics: Metrics
    checksum: object


class Turn(NamedTuple):
    contender: str
    take: Callable[[], Round]


class Spread(NamedTuple):
    median: float
    least: float
    most: float


@dataclass(slots=True, kw_only=True)
class Rounds:
    """What was measured of each who takes part, round by round."""

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
        return {who: median_metrics(rounds) for who, rounds in self.rounds.items()}


def _spread(values: Sequence[float]) -> Spread | None:
    return Spread(median(values), min(values), max(values)) if values else None


def take_turns(
    turns: Sequence[Turn],
    result: Rounds,
    *,
    warm_ups: int,
    rounds: int,
    before_each: Callable[[], object] = lambda: None,
) -> Iterator[str]:
    """Yields what comes next. Raises WrongRows."""
    agreed: dict[str, object] = {}
    for number in range(warm_ups):
        for turn in turns:
            yield f"{turn.contender}, warming up ({number + 1})"
            _agree(agreed, turn, turn.take())
    for number in range(rounds):
        for turn in turns:
            yield f"{turn.contender}, round {number + 1}"
            before_each()
            taken = turn.take()
            _agree(agreed, turn, taken)
            result.rounds.setdefault(turn.contender, []).append(taken.metrics)


def _agree(agreed: dict[str, object], turn: Turn, taken: Round) -> None:
    agreed[turn.contender] = taken.checksum
    first, expected = next(iter(agreed.items()))
    if taken.checksum != expected:
        raise WrongRows(f"{turn.contender} has {taken.checksum} where {first} has {expected}")
