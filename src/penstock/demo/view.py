"""Shows the demo on one screen: a tree of what flows where, the revenue, and the latest problems.

On a terminal the whole screen is drawn twice a second, and restored at the end. Without one, events are printed as they
happen, and a summary every few seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Self

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from penstock.demo.scene import STEPS, Event, EventLog, Flow, FlowKind, Health, LatestDeadLetter, Scene

#: From this width on there is room for the note of each line.
_WIDE: Final = 94
#: The heights of the lower panels, of the tree's frame, and of the first and the last line together.
_LOWER_ROWS: Final = 8
_FRAME_ROWS: Final = 3
_OTHER_ROWS: Final = 2
_EVENTS_MIN: Final = 3
_EVENTS_MAX: Final = 8
_BARS: Final = "▁▂▃▄▅▆▇█"
_STYLES: Final = {
    FlowKind.SHOP: "bold",
    FlowKind.TOPIC: "cyan",
    FlowKind.SUBSCRIBER: "green",
    FlowKind.SPARK: "magenta",
    FlowKind.TABLE: "blue",
    FlowKind.TROUBLE: "red",
    FlowKind.REPLAY: "yellow",
}
_LIGHTS: Final = {
    Health.ABSENT: ("○", "dim"),
    Health.STARTING: ("◐", "yellow"),
    Health.UP: ("●", "green"),
    Health.TROUBLED: ("●", "red"),
}
#: A lag of more records than this is highlighted.
_LAG_NOTABLE: Final = 500
_BAR_WIDTH: Final = 16
_PRODUCTS: Final = 5


def draw(scene: Scene, *, width: int, height: int) -> RenderableType:
    """Draws what fits. In a low terminal it leaves out the events first, then the lower panels, then the tree's end."""
    rows = height - _OTHER_ROWS - _FRAME_ROWS
    flows = scene.flows if len(scene.flows) <= rows else scene.flows[: max(rows - 1, 1)]
    parts: list[RenderableType] = [_head(scene, width), _tree(flows, width)]
    left = rows - len(flows)
    if left >= _LOWER_ROWS:
        parts.append(_lower(scene))
        left -= _LOWER_ROWS
    elif scene.latest_dead_letter is not None and left >= 1:
        parts.append(_dead_letter_line(scene.latest_dead_letter))
        left -= 1
    if left - 2 >= _EVENTS_MIN:
        parts.append(_events(scene.events, min(left - 2, _EVENTS_MAX)))
    elif scene.events and left >= 1:
        parts.append(_event_line(scene.events[-1], lead=" "))
    parts.append(_foot(scene))
    return Group(*parts)


def _head(scene: Scene, width: int) -> Text:
    line = Text(" Penstock demo", style="bold", no_wrap=True, overflow="ellipsis")
    line.append("   ")
    line.append_text(_light(scene.broker, f"broker {scene.address}"))
    line.append("   ")
    line.append_text(_light(scene.spark, f"Spark {scene.spark_note}"))
    clock = f"up {clock_text(scene.now_s)} "
    if width > line.cell_len + len(clock) + 2:
        line.append(" " * (width - line.cell_len - len(clock)))
        line.append(clock, style="dim not bold")
    return line


def _light(health: Health, text: str) -> Text:
    sign, style = _LIGHTS[health]
    return Text.assemble((sign, f"{style} not bold"), (f" {text}", "not bold"))


def _foot(scene: Scene) -> Text:
    return Text(
        f" Ctrl-C stops everything; the next start goes on with {scene.data}",
        style="dim",
        no_wrap=True,
        overflow="ellipsis",
    )


# The tree


def _tree(flows: Sequence[Flow], width: int) -> RenderableType:
    is_wide = width >= _WIDE
    table = Table(box=None, expand=True, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("what flows where", no_wrap=True)
    if is_wide:
        table.add_column("", ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column("per s", justify="right", no_wrap=True, min_width=6)
    table.add_column("", no_wrap=True, min_width=STEPS)
    table.add_column("records", justify="right", no_wrap=True, min_width=8)
    table.add_column("lag", justify="right", no_wrap=True, min_width=6)
    for flow in flows:
        cells = [_name(flow), _note(flow), *_numbers(flow)]
        table.add_row(*(cells if is_wide else cells[:1] + cells[2:]))
    return Panel(table, box=box.ROUNDED, border_style="dim", padding=(0, 1))


def _name(flow: Flow) -> Text:
    style = "bold red" if flow.trouble else _STYLES[flow.kind]
    return Text.assemble((branches(flow.last), "dim"), (flow.name, style))


def branches(last: tuple[bool, ...]) -> str:
    """The branch before a name. For the name and its ancestors, `last` says which are the last of their siblings."""
    if not last:
        return ""
    above = "".join("   " if each else "│  " for each in last[:-1])
    return above + ("└─▶ " if last[-1] else "├─▶ ")


def _note(flow: Flow) -> Text:
    if flow.trouble:
        return Text(flow.trouble, style="red")
    return Text(flow.note, style="dim")


def _numbers(flow: Flow) -> list[Text]:
    is_moving = any(flow.history) or bool(flow.per_s)
    return [
        Text(f"{flow.per_s:,.1f}" if flow.per_s is not None and is_moving else ""),
        Text(sparkline(flow.history) if is_moving else "", style=_STYLES[flow.kind]),
        Text("" if flow.total is None else f"{flow.total:,}", style="bold" if flow.total else "dim"),
        _lag(flow.lag),
    ]


def _lag(lag: int | None) -> Text:
    if lag is None:
        return Text("")
    return Text(f"{lag:,}", style="green" if lag == 0 else "yellow" if lag > _LAG_NOTABLE else "")


def sparkline(values: Iterable[float]) -> str:
    """One bar per value; the highest has the full height of the line."""
    known = list(values)
    highest = max(known, default=0.0)
    if highest <= 0:
        return _BARS[0] * len(known)
    return "".join(_BARS[round(max(value, 0.0) / highest * (len(_BARS) - 1))] for value in known)


# Below the tree


def _lower(scene: Scene) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(
        _panel(_sales(scene), "revenue, last minute", _LOWER_ROWS),
        _panel(_dead_letters(scene), "dead letters", _LOWER_ROWS),
    )
    return grid


def _panel(content: RenderableType, title: str, rows: int) -> Panel:
    return Panel(content, title=title, title_align="left", box=box.ROUNDED, border_style="dim", height=rows)


def _sales(scene: Scene) -> RenderableType:
    if not scene.sales:
        return Text("no window of time is finished yet", style="dim")
    totals: Counter[str] = Counter()
    for sale in scene.sales:
        totals[sale.product] += round(sale.total)
    best = totals.most_common(_PRODUCTS)
    table = Table.grid(padding=(0, 1))
    for product, total in best:
        bar = "━" * max(round(total / best[0][1] * _BAR_WIDTH), 1)
        table.add_row(product, Text(f"{total:,}", justify="right"), Text(bar, style="magenta"))
    note = f"{scene.duplicates_dropped:,} duplicates were not counted" if scene.duplicates_dropped else ""
    return Group(table, Text(note, style="dim", no_wrap=True, overflow="ellipsis"))


def _dead_letters(scene: Scene) -> RenderableType:
    letter = scene.latest_dead_letter
    if letter is None:
        return Text("none yet", style="dim")
    waiting = max(scene.dead_letters - scene.replayed, 0)
    return Group(
        Text.assemble(
            (f"{scene.dead_letters:,}", "bold red"),
            (" in all, "),
            (f"{scene.replayed:,}", "bold yellow"),
            (" replayed, "),
            (f"{waiting:,}", "bold"),
            (" wait"),
            no_wrap=True,
            overflow="ellipsis",
        ),
        Text.assemble(("latest: ", "dim"), (letter.error, "red"), no_wrap=True, overflow="ellipsis"),
        Text(letter.message, overflow="ellipsis"),
    )


def _dead_letter_line(letter: LatestDeadLetter) -> Text:
    """The latest dead letter in one line, if there is no room for the panel."""
    return Text.assemble(
        (" latest dead letter: ", "dim"),
        (letter.error, "red"),
        f", {letter.message}",
        no_wrap=True,
        overflow="ellipsis",
    )


def _events(events: tuple[Event, ...], rows: int) -> RenderableType:
    return _panel(Group(*(_event_line(event) for event in events[-rows:])), "what happened", rows + 2)


def _event_line(event: Event, lead: str = "") -> Text:
    return Text.assemble(
        (f"{lead}{clock_text(event.at_s)}  ", "dim"),
        (event.text, "red" if event.is_trouble else ""),
        no_wrap=True,
        overflow="ellipsis",
    )


def clock_text(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


_INDENT: Final = " " * 8


class LineOutput:
    def __init__(self, journal: EventLog, write: Callable[[str], None], *, every_s: float) -> None:
        self._journal = journal
        self._write = write
        self._seen = 0
        self._every_s = every_s
        self._printed_at = 0.0

    def show(self, scene: Scene) -> None:
        self._seen, events = self._journal.since(self._seen)
        for event in events:
            self._write(f"{clock_text(event.at_s):>6}  {event.text}")
        if scene.now_s - self._printed_at >= self._every_s:
            self._printed_at = scene.now_s
            for line in summary_lines(scene):
                self._write(line)


def summary_lines(scene: Scene) -> list[str]:
    """The totals of the lines, and the lag of the readers."""
    totals = [
        f"{flow.name.partition(' ')[0]} {flow.total:,}" + (f" ({flow.per_s:,.0f}/s)" if flow.per_s else "")
        for flow in scene.flows
        if flow.total is not None
    ]
    lags = [f"{flow.name} {flow.lag:,}" for flow in scene.flows if flow.lag is not None]
    return [
        f"{clock_text(scene.now_s):>6}  {' · '.join(totals)}",
        f"{_INDENT}lag: {', '.join(lags) or 'no readers yet'}",
    ]


class Screen:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(
            console=console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, scene: Scene) -> None:
        width, height = self._console.size
        self._live.update(draw(scene, width=width, height=height), refresh=True)
