"""A contest: who takes part, and what each does in its turn."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from benchmarks.rounds import Round, Rounds, Spread, Turn, WrongRows, take_turns
from benchmarks.spark.drivers import Driver
from benchmarks.spark.stage import Stage

__all__ = ["CONNECTOR", "OURS", "Contest", "Result", "Round", "Spread", "Turn", "WrongRows", "hold"]

#: The contenders, by their names in the results.
OURS = "penstock"
CONNECTOR = "connector"


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


@dataclass(slots=True, kw_only=True)
class Result(Rounds):
    contest: Contest


def hold(contest: Contest, stage: Stage, driver: Driver, result: Result) -> Iterator[str]:
    """Yields what comes next. Raises WrongRows, DriverFailed and what brokers raise."""
    yield "make topics and tables"
    pace = stage.pace
    with contest.prepare(stage, driver) as turns:
        yield from take_turns(
            turns,
            result,
            warm_ups=pace.warm_ups,
            rounds=pace.rounds,
            before_each=lambda: driver.ask("collect_garbage"),
        )
