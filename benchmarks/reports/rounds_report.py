"""Rounds for people: a table with the spread of every figure, and the goals that were reached or missed."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from benchmarks.reports.metrics import Metric
from benchmarks.reports.report import OTHER_CORES_MAX
from benchmarks.rounds import Rounds, Spread


class Goal(NamedTuple):
    """A bound on the ratio of one of our figures to another's."""

    text: str
    contest: str
    metric: str
    at_least: float


class Verdict(NamedTuple):
    goal: Goal
    value: float

    @property
    def is_reached(self) -> bool:
        return self.value >= self.goal.at_least


def rounds_table(ratios: str) -> Table:
    """Without rows yet; `ratios` says of what."""
    table = Table(
        title=f"Medians over all rounds (least to most); ratios are {ratios}, round by round",
        title_justify="left",
        header_style="bold",
    )
    table.add_column("contest", style="cyan")
    table.add_column("metric")
    table.add_column("who")
    for name in ("median", "least to most", "ratio", "least to most"):
        table.add_column(name, justify="right")
    return table


def cells(metric: Metric, spread: Spread, ratio: Spread | None) -> tuple[str | Text, ...]:
    figure, between = metric.text(spread.median), f"{metric.text(spread.least)} to {metric.text(spread.most)}"
    if ratio is None:
        return figure, between, "", ""
    style = "green" if metric.is_win(ratio.median) else "red"
    times = Text(f"{ratio.median:.2f}x", style=style)
    return figure, between, times, f"{ratio.least:.2f} to {ratio.most:.2f}"


def goals_table(found: Sequence[Verdict]) -> Table:
    table = Table(title="Goals", title_justify="left", header_style="bold")
    table.add_column("goal")
    table.add_column("measured", justify="right")
    table.add_column("")
    for each in found:
        mark = Text("reached", style="green") if each.is_reached else Text("missed", style="red")
        table.add_row(each.goal.text, f"{each.value:.2f}x", mark)
    return table


def goal_documents(found: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [
        {
            "goal": each.goal.text,
            "value": each.value,
            "at_least": each.goal.at_least,
            "reached": each.is_reached,
        }
        for each in found
    ]


def disturbed(named: Iterable[tuple[str, Rounds]]) -> list[str]:
    """Who had a neighbour with a good part of a core: "connector in read-100B-none"."""
    return [
        f"{who} in {name}"
        for name, result in named
        for who, rounds in result.rounds.items()
        if any(each.get("other_cores", 0) > OTHER_CORES_MAX for each in rounds)
    ]
