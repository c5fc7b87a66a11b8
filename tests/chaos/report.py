"""What a campaign has found, for people and for programs."""

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.chaos import checker
from tests.chaos.campaign import Result


def as_document(result: Result) -> dict[str, Any]:
    verdict = {
        field.name: dict(getattr(result.verdict, field.name)) for field in dataclasses.fields(result.verdict)
    }
    figures = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    spreads = {kind: spread(times) for kind, times in result.unavailable_s.items()}
    return {**figures, "unavailable_s": spreads, "verdict": verdict, "clean": result.is_clean}


def print_table(result: Result) -> None:
    console = Console(width=110)
    console.print(_operations(result))
    console.print(_faults(result))
    console.print(_anomalies(result))
    print_findings(console, result.verdict.examples, result.problems)
    reported = ", ".join(f"{name} {count:,}" for name, count in sorted(result.verdict.reported.items()))
    console.print(f"reported: {reported}; bytes that power losses took: {result.bytes_lost:,}")
    console.print(
        f"least work between two faults: {result.least_work}; took {result.duration_s:,.0f} s; seed {result.seed}"
    )


def print_findings(console: Console, examples: Mapping[str, list[str]], problems: list[str]) -> None:
    for kind, found in examples.items():
        for words in found:
            console.print(f"{kind}: {words}", markup=False)
    for words in problems:
        console.print(f"problem: {words}", markup=False)


def spread(times: list[float]) -> dict[str, float]:
    return {"longest": round(max(times), 2), "median": round(statistics.median(times), 2)}


def _operations(result: Result) -> Table:
    table = Table("operation", "count", title="Operations")
    for name, count in sorted(result.verdict.operations.items()):
        table.add_row(name, f"{count:,}")
    return table


def _faults(result: Result) -> Table:
    table = Table("fault", "fired", "longest without an acknowledgement", "median", title="Faults")
    for kind, count in sorted(result.fired.items()):
        times_s = spread(result.unavailable_s.get(kind) or [0.0])
        table.add_row(kind, str(count), f"{times_s['longest']:.2f} s", f"{times_s['median']:.2f} s")
        for shape, times in sorted(result.shapes.items()):
            if shape.startswith(f"{kind}: "):
                table.add_row(f"  {shape.removeprefix(f'{kind}: ')}", str(times), "", "")
    for name, count in sorted(result.upkeep.items()):
        table.add_row(name, str(count), "", "")
    return table


def _anomalies(result: Result) -> Table:
    table = Table("anomaly", "count", title="Anomalies")
    for kind in checker.ANOMALIES:
        table.add_row(kind, str(result.verdict.anomalies.get(kind, 0)))
    table.add_row("other problems", str(len(result.problems)))
    return table
