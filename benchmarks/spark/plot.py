"""One picture of a run: panel by panel, whoever took part beside each other, with the spread of the rounds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.plot import short
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
_BARS = 0.8


class Bar(NamedTuple):
    group: str
    contender: str
    spread: Spread


class Panel(NamedTuple):
    title: str
    unit: str
    bars: Sequence[Bar]


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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [
        panel for panel in (*(_panel(results, each) for each in _WANTED), _scaling(results)) if panel.bars
    ]
    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(5.6 * columns, 3.6 * lines + 1), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw(axis, panel)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    top = 1 - 0.65 / (3.6 * lines + 1)
    figure.legend(
        *_legend(axes),
        loc="upper left",
        bbox_to_anchor=(0.005, 1 - 0.35 / (3.6 * lines + 1)),
        ncols=6,
        frameon=False,
    )
    figure.tight_layout(rect=(0, 0, 1, top))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


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


def _draw(axis: Any, panel: Panel) -> None:
    groups = list(dict.fromkeys(bar.group for bar in panel.bars))
    contenders = [who for who in TITLES if any(bar.contender == who for bar in panel.bars)]
    width = _BARS / len(contenders)
    for index, who in enumerate(contenders):
        mine = [bar for bar in panel.bars if bar.contender == who]
        at = [groups.index(bar.group) + (index - (len(contenders) - 1) / 2) * width for bar in mine]
        heights = [bar.spread.median for bar in mine]
        errors = [
            [bar.spread.median - bar.spread.least for bar in mine],
            [bar.spread.most - bar.spread.median for bar in mine],
        ]
        style = {"ecolor": "#444444", "error_kw": {"linewidth": 0.8}}
        bars = axis.bar(at, heights, width, label=TITLES[who], color=_COLOURS[who], yerr=errors, **style)
        axis.bar_label(bars, labels=list(map(short, heights)), padding=2, fontsize=8)
    axis.set_xticks(range(len(groups)), groups, fontsize=9)
    axis.set_title(panel.title, fontsize=10, loc="left")
    axis.set_ylabel(panel.unit, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.15)
    axis.set_xlim(-0.75, max(len(groups) - 0.25, 0.75))


def _legend(axes: Any) -> tuple[list[Any], list[str]]:
    found = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
