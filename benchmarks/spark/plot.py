"""One picture of a run: the contenders side by side in each panel, with the spread of the rounds."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.reports.panels import Bar, Look, Panel, save_panels
from benchmarks.spark.contest import Result, Spread
from benchmarks.spark.metrics import TITLES, scalings

_COLOURS = {
    "penstock": "#1b7f79",
    "penstock-narrow": "#6cc2b8",
    "penstock-pipeline": "#3fa39b",
    "penstock-exactly-once": "#0d4f4b",
    "connector": "#b0b7bf",
    "parquet": "#e0c27a",
    "nowhere": "#e9e4d4",
}


class _Wanted(NamedTuple):
    """A panel, from contests by the beginning of their names."""

    title: str
    unit: str
    prefix: str
    metric: str
    factor: float


_WANTED = (
    _Wanted("Read and hash, 100 B", "million rows/s", "read-100B-", "rows_per_s", 1e-6),
    _Wanted("Read and hash, 1 KB", "million rows/s", "read-1KB-", "rows_per_s", 1e-6),
    _Wanted("Write", "million rows/s", "write-", "rows_per_s", 1e-6),
    _Wanted(
        "Read 100 B: CPU, broker included (lower is better)",
        "CPU-seconds per million rows",
        "read-100B-",
        "cpu_s_per_million",
        1,
    ),
    _Wanted(
        "Read 1 KB: CPU, broker included (lower is better)",
        "CPU-seconds per million rows",
        "read-1KB-",
        "cpu_s_per_million",
        1,
    ),
    _Wanted(
        "Write: CPU, broker included (lower is better)",
        "CPU-seconds per million rows",
        "write-",
        "cpu_s_per_million",
        1,
    ),
    _Wanted(
        "Archive: Delta, and plain Parquet by the connector", "million rows/s", "archive-", "rows_per_s", 1e-6
    ),
    _Wanted("A trigger of 1,000 rows, median (lower is better)", "ms", "batches-", "trigger_p50_ms", 1),
    _Wanted("A trigger of 1,000 rows, p90 (lower is better)", "ms", "batches-", "trigger_p90_ms", 1),
)


def save_plot(results: list[Result], title: str, path: Path) -> None:
    panels = [*(_panel(results, each) for each in _WANTED), _scaling(results)]
    save_panels(panels, Look(TITLES, _COLOURS), title, path)


def _panel(results: list[Result], wanted: _Wanted) -> Panel:
    bars = []
    for result in results:
        name = result.contest.name
        if not name.startswith(wanted.prefix) or name.endswith("-core"):
            continue
        for who in result.contest.contenders:
            spread = result.spread(who, wanted.metric)
            if spread is not None:
                scaled = Spread(*(each * wanted.factor for each in spread))
                bars.append(Bar(name.removeprefix(wanted.prefix), who, scaled))
    return Panel(wanted.title, wanted.unit, bars)


def _scaling(results: list[Result]) -> Panel:
    bars = [Bar(each.contest, each.contender, Spread(*[each.factor] * 3)) for each in scalings(results)]
    return Panel("Two cores over one", "times the rows/s", bars)
