"""What a siege has come to, for people and for programs."""

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.chaos.report import print_findings, spread
from tests.chaos.siege import Outcome


def as_document(outcome: Outcome) -> dict[str, Any]:
    figures = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}
    recoveries = {kind: spread(times) for kind, times in outcome.recovery_s.items()}
    return {**figures, "recovery_s": recoveries, "least_work": outcome.least_work, "clean": outcome.is_clean}


def print_table(outcome: Outcome) -> None:
    console = Console(width=110)
    console.print(_faults(outcome))
    console.print(_anomalies(outcome))
    print_findings(console, outcome.examples, outcome.problems)
    for name, value in outcome.figures.items():
        console.print(f"  {name}: {value:,}")
    console.print(
        f"least work between two faults: {outcome.least_work:,}; "
        f"took {outcome.duration_s:,.0f} s; seed {outcome.seed}"
    )


def _faults(outcome: Outcome) -> Table:
    table = Table("fault", "fired", "longest until there was work again", "median", title="Faults")
    for kind, count in sorted(outcome.fired.items()):
        times = spread(outcome.recovery_s.get(kind) or [0.0])
        table.add_row(kind, f"{count:,}", f"{times['longest']:.2f} s", f"{times['median']:.2f} s")
    for shape, count in sorted(outcome.shapes.items()):
        table.add_row(f"  {shape}", f"{count:,}", "", "")
    return table


def _anomalies(outcome: Outcome) -> Table:
    table = Table("anomaly", "count", title="Anomalies")
    for kind in outcome.kinds:
        table.add_row(kind, str(outcome.anomalies.get(kind, 0)))
    table.add_row("other problems", str(len(outcome.problems)))
    return table
