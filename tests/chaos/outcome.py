"""The result of a campaign, for people (a table) and for programs (a JSON document)."""

import dataclasses
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class Outcome:
    """`kinds` are the anomalies that the campaign looks for, `figures` its other counts."""

    seed: int
    kinds: tuple[str, ...]
    duration_s: float = 0.0
    fired: Counter[str] = field(default_factory=Counter)
    shapes: Counter[str] = field(default_factory=Counter)
    work_between: list[int] = field(default_factory=list)  # from each fault to the next
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    figures: dict[str, Any] = field(default_factory=dict)
    anomalies: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # apart from anomalies

    @property
    def is_clean(self) -> bool:
        return not self.anomalies and not self.problems

    @property
    def least_work(self) -> int:
        return min(self.work_between, default=0)

    def as_document(self) -> dict[str, Any]:
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        recoveries = {kind: _spread(times) for kind, times in self.recovery_s.items()}
        return {**fields, "recovery_s": recoveries, "least_work": self.least_work, "clean": self.is_clean}

    def print_table(self) -> None:
        console = Console(width=110)
        console.print(self._fault_table())
        console.print(self._anomaly_table())
        for kind, found in self.examples.items():
            for words in found:
                console.print(f"{kind}: {words}", markup=False)
        for words in self.problems:
            console.print(f"problem: {words}", markup=False)
        for name, value in self.figures.items():
            console.print(f"  {name}: {value if isinstance(value, str) else f'{value:,}'}", markup=False)
        console.print(
            f"least work between two faults: {self.least_work:,}; took {self.duration_s:,.0f} s; seed {self.seed}"
        )

    def _fault_table(self) -> Table:
        table = Table("fault", "fired", "longest recovery", "median", title="Faults")
        for kind, count in sorted(self.fired.items()):
            times = _spread(self.recovery_s.get(kind) or [0.0])
            table.add_row(kind, f"{count:,}", f"{times['longest']:.2f} s", f"{times['median']:.2f} s")
        for shape, count in sorted(self.shapes.items()):
            table.add_row(f"  {shape}", f"{count:,}", "", "")
        return table

    def _anomaly_table(self) -> Table:
        table = Table("anomaly", "count", title="Anomalies")
        for kind in self.kinds:
            table.add_row(kind, str(self.anomalies.get(kind, 0)))
        table.add_row("other problems", str(len(self.problems)))
        return table


def _spread(times: list[float]) -> dict[str, float]:
    return {"longest": round(max(times), 2), "median": round(statistics.median(times), 2)}
