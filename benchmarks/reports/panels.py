"""Panels of bars in one picture: the contenders side by side, with the spread of the rounds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.reports.plot import short
from benchmarks.rounds import Spread

_BARS = 0.8


class Bar(NamedTuple):
    group: str
    contender: str
    spread: Spread


class Panel(NamedTuple):
    title: str
    unit: str
    bars: Sequence[Bar]


class Look(NamedTuple):
    """By contender: what people read, in the order of the bars, and its colour."""

    titles: Mapping[str, str]
    colours: Mapping[str, str]


def save_panels(panels: Sequence[Panel], look: Look, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [panel for panel in panels if panel.bars]
    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(5.6 * columns, 3.6 * lines + 1), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw(axis, panel, look)
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


def _draw(axis: Any, panel: Panel, look: Look) -> None:
    groups = list(dict.fromkeys(bar.group for bar in panel.bars))
    contenders = [who for who in look.titles if any(bar.contender == who for bar in panel.bars)]
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
        bars = axis.bar(
            at, heights, width, label=look.titles[who], color=look.colours[who], yerr=errors, **style
        )
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
