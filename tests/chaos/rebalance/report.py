"""What a campaign of rebalances has found, for people and for programs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.chaos.rebalance.campaign import Result
from tests.chaos.rebalance.judge import ANOMALIES
from tests.chaos.report import print_findings


def as_document(result: Result) -> dict[str, Any]:
    figures = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return {**figures, "clean": result.is_clean}


def print_table(result: Result) -> None:
    console = Console(width=110)
    console.print(_table("Churn", "event", result.churn))
    console.print(_table("Times of ownership", "ended", result.tenures))
    found = {kind: result.anomalies.get(kind, 0) for kind in ANOMALIES}
    console.print(_table("Anomalies", "anomaly", {**found, "other problems": len(result.problems)}))
    print_findings(console, result.examples, result.problems)
    console.print(f"believed to own what another had been given, and had been fenced: {dict(result.zombies)}")
    console.print(f"commits that were refused: {result.refusals}")
    console.print(
        f"{result.rebalances:,} rebalances; {result.members:,} members; {result.records:,} records, read "
        f"{result.readings:,} times; {result.commits:,} positions kept; {result.log_records:,} records of the "
        f"coordinator; least work after a fault: {result.least_work:,} records; took {result.duration_s:,.0f} s; "
        f"seed {result.seed}"
    )


def _table(title: str, column: str, counts: Mapping[str, int]) -> Table:
    table = Table(column, "count", title=title)
    for name, count in counts.items():
        table.add_row(name, f"{count:,}")
    return table
