"""What a campaign of copiers has found, for people and for programs."""

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.chaos.copier.campaign import Result
from tests.chaos.copier.judge import ANOMALIES
from tests.chaos.report import print_findings, spread


def as_document(result: Result) -> dict[str, Any]:
    figures = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    recoveries = {kind: spread(times) for kind, times in result.recovery_s.items()}
    return {**figures, "recovery_s": recoveries, "least_work": result.least_work, "clean": result.is_clean}


def print_table(result: Result) -> None:
    console = Console(width=110)
    console.print(_faults(result))
    console.print(_anomalies(result))
    print_findings(console, result.examples, result.problems)
    done = ", ".join(f"{name} {count:,}" for name, count in sorted(result.transactions.items()))
    console.print(
        f"copiers ({result.library}, {result.protocol} group): {done}; gave up {result.restarts} times"
    )
    for words, count in result.reasons.most_common():
        console.print(f"  {count:,} x {words}", markup=False)
    console.print(
        f"{result.messages:,} messages; least work between two faults: {result.least_work:,} messages; "
        f"took {result.duration_s:,.0f} s; seed {result.seed}"
    )


def _faults(result: Result) -> Table:
    table = Table("fault", "fired", "longest until all was copied again", "median", title="Faults")
    for kind, count in sorted(result.fired.items()):
        times = spread(result.recovery_s.get(kind) or [0.0])
        table.add_row(kind, str(count), f"{times['longest']:.2f} s", f"{times['median']:.2f} s")
    for shape, count in sorted(result.shapes.items()):
        table.add_row(f"  {shape}", str(count), "", "")
    return table


def _anomalies(result: Result) -> Table:
    table = Table("anomaly", "count", title="Anomalies")
    for kind in ANOMALIES:
        table.add_row(kind, str(result.anomalies.get(kind, 0)))
    table.add_row("other problems", str(len(result.problems)))
    return table
