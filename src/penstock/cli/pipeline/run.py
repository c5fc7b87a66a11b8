"""What people see while a pipeline runs: a line that changes, a bar where there is an end, plain lines in a pipe."""

import os
import sys
import time
from types import TracebackType
from typing import Any, Protocol

from penstock.spark.pipelines.declaration import Pipeline
from penstock.spark.pipelines.places import checkpoint_of, log_of
from penstock.spark.pipelines.runner import Launch
from penstock.spark.pipelines.status import State, Status

#: Between two lines about a pipeline whose state does not change.
LINE_EVERY_S = 10.0


class Screen(Protocol):
    def __enter__(self) -> "Screen": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, status: Status) -> None:
        """How it is; the first time, what it is too."""

    def note(self, text: str) -> None:
        """What a job has found."""

    def warn(self, text: str) -> None:
        """What has happened."""


def screen_for(runnable: Any, launch: Launch) -> Screen:
    is_bounded = launch.once or not isinstance(runnable, Pipeline) or runnable.available_now
    if not sys.stdout.isatty():
        return Lines(runnable, launch)
    return Bar(runnable, launch) if is_bounded else LiveLine(runnable, launch)


def heading(runnable: Any, launch: Launch) -> list[str]:
    if not isinstance(runnable, Pipeline):
        return [f"{runnable.name} on Spark {launch.master}"]
    sink = f" -> {runnable.sink.describe()}" if runnable.sink is not None else ""
    folder = os.path.dirname(checkpoint_of(launch.checkpoints, runnable.name, 0))
    return [
        f"{runnable.name}: {runnable.source.describe()}{sink}, {runnable.delivery.value}",
        f"group {runnable.group}, Spark on {launch.master}",
        f"checkpoint in {_short(folder)}, Spark's log in {_short(str(log_of(launch.checkpoints, runnable.name)))}",
    ]


def _short(path: str) -> str:
    return min(os.path.relpath(path), path, key=len) if path.startswith("/") else path


def line(status: Status) -> str:
    """All that changes, what matters most first: a narrow terminal cuts the rest off."""
    parts = [status.state.value]
    if status.extent is not None:
        parts.append(_extent(status))
    if status.batch is not None and status.rows_per_s:
        parts.append(f"{status.rows_per_s:,.0f} rows/s")
    if status.lag is not None:
        parts.append(f"lag {status.lag:,}")
    if status.group is not None:
        parts.append(_rows(status))
    if status.batch is not None:
        parts.append(f"batch {status.batch} in {(status.batch_ms or 0) / 1000:.2f} s")
    if status.restarts:
        parts.append(f"restarts {status.restarts}")
    return "  ".join(parts)


def _extent(status: Status) -> str:
    assert status.extent is not None
    done, total, unit = status.extent.done, status.extent.total, status.extent.unit
    return f"{done:,} {unit}" if total is None else f"{done:,} of {total:,} {unit}"


def _rows(status: Status) -> str:
    rows = status.rows.to_json()
    shown = {name: count for name, count in rows.items() if count or name in ("in", "out")}
    return "  ".join(f"{name} {count:,}" for name, count in shown.items())


class Lines:
    """For logs: one line for each change of state, and now and then one more."""

    def __init__(self, runnable: Any, launch: Launch) -> None:
        self._heading = heading(runnable, launch)
        self._name = runnable.name
        self._last: Status | None = None
        self._last_s = 0.0

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, status: Status) -> None:
        before, now_s = self._last, time.monotonic()
        if before is None:
            print(*self._heading, sep="\n")
        is_news = before is None or before.state is not status.state
        is_other = before is None or line(before) != line(status)
        if is_news or (is_other and now_s - self._last_s >= LINE_EVERY_S):
            print(f"{time.strftime('%H:%M:%S')} {self._name} {line(status)}", flush=True)
            self._last, self._last_s = status, now_s

    def note(self, text: str) -> None:
        print(text, flush=True)

    def warn(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self._name} {text}", flush=True)


class LiveLine:
    """For people who look on: the last word, and that somebody is at work."""

    def __init__(self, runnable: Any, launch: Launch) -> None:
        from rich.console import Console

        self._heading = heading(runnable, launch)
        self._name = runnable.name
        self._console = Console(highlight=False)
        self._spinner = self._console.status(f"starting Spark on {launch.master}")
        self._last: Status | None = None

    def __enter__(self) -> "LiveLine":
        return self

    def __exit__(self, *_: object) -> None:
        self._spinner.stop()
        if self._last is not None:
            self._console.print(f"{self._name} {line(self._last)}", markup=False)

    def show(self, status: Status) -> None:
        from rich.text import Text

        if self._last is None:
            for each in [*self._heading, "Ctrl-C stops it when its batch is done"]:
                self._console.print(each, markup=False)
            self._spinner.start()
        self._last = status
        if status.state is not State.STARTING:
            self._spinner.update(
                Text(line(status), style=_STYLES.get(status.state, ""), no_wrap=True, overflow="ellipsis")
            )

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def warn(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, style="yellow")


_STYLES = {State.RUNNING: "green", State.RESTARTING: "yellow", State.FAILED: "red"}


class Bar:
    """For work that has an end."""

    def __init__(self, runnable: Any, launch: Launch) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._heading = heading(runnable, launch)
        self._name = runnable.name
        self._console = Console(highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("records"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("starting Spark", total=None)
        self._last: Status | None = None

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._last is not None:
            self._console.print(f"{self._name} {line(self._last)}", markup=False)

    def show(self, status: Status) -> None:
        if self._last is None:
            for each in self._heading:
                self._console.print(each, markup=False)
            self._bar.start()
        self._last = status
        self._bar.update(self._task, description=status.state.value)
        if status.extent is not None:
            self._bar.update(self._task, completed=status.extent.done, total=status.extent.total)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def warn(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, style="yellow")
