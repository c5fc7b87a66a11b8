"""The results for people (tables) and for programs (one JSON document)."""

from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.metrics import Metric
from benchmarks.report import OTHER_CORES_MAX
from benchmarks.spark.contest import OURS, Result, Spread
from benchmarks.spark.metrics import METRICS, TITLES, Scaling, Verdict, scalings, verdicts


def results_table(results: list[Result]) -> Table:
    table = Table(
        title="Medians over all rounds (least to most); ratios are ours by theirs, round by round",
        title_justify="left",
        header_style="bold",
    )
    table.add_column("contest", style="cyan")
    table.add_column("metric")
    table.add_column("who")
    for name in ("median", "least to most", "ratio", "least to most"):
        table.add_column(name, justify="right")
    for result in results:
        _add_rows(table, result)
    return table


def _add_rows(table: Table, result: Result) -> None:
    title = result.contest.title
    for name in result.contest.shown:
        label = METRICS[name].label
        for who in result.contest.contenders:
            spread = result.spread(who, name)
            if spread is None:
                continue
            ratio = result.ratio(who, name, OURS) if who != OURS else None
            table.add_row(title, label, TITLES[who], *_cells(METRICS[name], spread, ratio))
            title = label = ""
    table.add_section()


def _cells(metric: Metric, spread: Spread, ratio: Spread | None) -> tuple[str | Text, ...]:
    figure, between = metric.text(spread.median), f"{metric.text(spread.least)} to {metric.text(spread.most)}"
    if ratio is None:
        return figure, between, "", ""
    style = "green" if metric.is_win(ratio.median) else "red"
    times = Text(f"{ratio.median:.2f}x", style=style)
    return figure, between, times, f"{ratio.least:.2f} to {ratio.most:.2f}"


def goals_table(found: list[Verdict]) -> Table:
    table = Table(title="Goals", title_justify="left", header_style="bold")
    table.add_column("goal")
    table.add_column("measured", justify="right")
    table.add_column("")
    for each in found:
        mark = Text("reached", style="green") if each.is_reached else Text("missed", style="red")
        table.add_row(each.goal.text, f"{each.value:.2f}x", mark)
    return table


def scaling_lines(found: list[Scaling]) -> list[str]:
    return [
        f"{each.contest}, from one core to two: {TITLES[each.contender]} {each.factor:.2f}x" for each in found
    ]


def disturbed(results: list[Result]) -> list[str]:
    return [
        f"{who} in {result.contest.name}"
        for result in results
        for who, rounds in result.rounds.items()
        if any(each.get("other_cores", 0) > OTHER_CORES_MAX for each in rounds)
    ]


def json_document(results: list[Result], facts: dict[str, Any]) -> dict[str, Any]:
    return {
        **facts,
        "goals": [
            {
                "goal": each.goal.text,
                "value": each.value,
                "at_least": each.goal.at_least,
                "reached": each.is_reached,
            }
            for each in verdicts(results)
        ],
        "scaling": [each._asdict() for each in scalings(results)],
        "contests": [_contest_document(result) for result in results],
    }


def _contest_document(result: Result) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": result.contest.name,
        "title": result.contest.title,
        "cores": result.contest.cores,
        "median": result.medians(),
        "ratio": {who: _ratios(result, who) for who in result.rounds if who != OURS},
        "rounds": result.rounds,
    }
    return document if result.failure is None else {**document, "failure": result.failure}


def _ratios(result: Result, contender: str) -> dict[str, Any]:
    found = {name: result.ratio(contender, name, OURS) for name in result.contest.shown}
    return {name: each._asdict() for name, each in found.items() if each is not None}
