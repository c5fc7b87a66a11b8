"""The results for people (tables) and for programs (one JSON document)."""

from typing import Any

from rich.table import Table

from benchmarks.reports.rounds_report import cells, goal_documents, rounds_table
from benchmarks.spark.contest import OURS, Result
from benchmarks.spark.metrics import METRICS, TITLES, Scaling, scalings, verdicts


def results_table(results: list[Result]) -> Table:
    table = rounds_table("ours by theirs")
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
            table.add_row(title, label, TITLES[who], *cells(METRICS[name], spread, ratio))
            title = label = ""
    table.add_section()


def scaling_lines(found: list[Scaling]) -> list[str]:
    return [
        f"{each.contest}, from one core to two: {TITLES[each.contender]} {each.factor:.2f}x" for each in found
    ]


def json_document(results: list[Result], facts: dict[str, Any]) -> dict[str, Any]:
    return {
        **facts,
        "goals": goal_documents(verdicts(results)),
        "scaling": [each._asdict() for each in scalings(results)],
        "results": [_contest_document(result) for result in results],
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
