"""The results for people (tables) and for programs (one JSON document)."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from benchmarks.contracts.contests import Result
from benchmarks.contracts.metrics import METRICS, verdicts
from benchmarks.reports.rounds_report import cells, goal_documents, rounds_table


def results_table(results: Sequence[Result]) -> Table:
    table = rounds_table("ours by the loop beside it")
    for result in results:
        _add_rows(table, result)
    return table


def _add_rows(table: Table, result: Result) -> None:
    title = result.contest.title
    for name, metric in METRICS.items():
        label = metric.label
        for who in result.contest.contenders:
            spread = result.spread(who.name, name)
            if spread is None:
                continue
            ratio = result.ratio(who.beside, name, who.name) if who.beside is not None else None
            table.add_row(title, label, who.title, *cells(metric, spread, ratio))
            title = label = ""
    table.add_section()


def json_document(results: Sequence[Result], facts: dict[str, Any]) -> dict[str, Any]:
    return {
        **facts,
        "goals": goal_documents(verdicts(results)),
        "results": [_contest_document(result) for result in results],
    }


def _contest_document(result: Result) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": result.contest.name,
        "title": result.contest.title,
        "median": result.medians(),
        "ratio": {
            who.name: {"beside": who.beside, **_ratios(result, who.name, who.beside)}
            for who in result.contest.contenders
            if who.beside is not None and who.name in result.rounds
        },
        "rounds": result.rounds,
    }
    return document if result.failure is None else {**document, "failure": result.failure}


def _ratios(result: Result, ours: str, beside: str) -> dict[str, Any]:
    found = {name: result.ratio(beside, name, ours) for name in (*METRICS, "thread_cpu_s_per_million")}
    return {name: each._asdict() for name, each in found.items() if each is not None}
