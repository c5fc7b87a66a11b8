"""`penstock pipeline run`: makes a runner from the command line, shows its progress, and turns its outcome into an exit
code.

A terminal shows a line that changes, or a bar if the work has an end; a pipe gets plain lines.
"""

import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Protocol

from penstock.cli.connection import ConnectionOptions
from penstock.cli.connection.cluster import check_reachable
from penstock.cli.errors import EXIT_FAILURE, EXIT_USAGE, CommandError, report_error
from penstock.cli.options import parse_pairs
from penstock.cli.output import print_table
from penstock.client.errors import ClientError
from penstock.spark.pipelines.checkpoints import checkpoint_path, log_path
from penstock.spark.pipelines.declaration import Pipeline
from penstock.spark.pipelines.loader import BUILT_IN, LoadingError, load, settings_usage
from penstock.spark.pipelines.runner import LaunchSettings, Runner
from penstock.spark.pipelines.status import PipelineState, PipelineStatus, RunningAlready

#: The interval between two lines about a pipeline whose state does not change.
LINE_EVERY_S = 10.0


class Screen(Protocol):
    def __enter__(self) -> "Screen": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, status: PipelineStatus) -> None:
        """Shows the status; the first call also prints the heading."""

    def note(self, text: str) -> None:
        """Prints a finding of a job."""

    def warn(self, text: str) -> None:
        """Prints what has happened, with the time."""


def make_screen(runnable: Any, launch: LaunchSettings) -> Screen:
    is_bounded = launch.once or not isinstance(runnable, Pipeline) or runnable.available_now
    if not sys.stdout.isatty():
        return LineScreen(runnable, launch)
    return ProgressBarScreen(runnable, launch) if is_bounded else SpinnerScreen(runnable, launch)


def heading_lines(runnable: Any, launch: LaunchSettings) -> list[str]:
    if not isinstance(runnable, Pipeline):
        return [f"{runnable.name} on Spark {launch.master}"]
    sink = f" -> {runnable.sink.describe()}" if runnable.sink is not None else ""
    folder = os.path.dirname(checkpoint_path(launch.checkpoints, runnable.name, 0))
    return [
        f"{runnable.name}: {runnable.source.describe()}{sink}, {runnable.delivery.value}",
        f"group {runnable.group}, Spark on {launch.master}",
        f"checkpoint in {_short_path(folder)}, "
        f"Spark's log in {_short_path(str(log_path(launch.checkpoints, runnable.name)))}",
    ]


def _short_path(path: str) -> str:
    return min(os.path.relpath(path), path, key=len) if path.startswith("/") else path


def status_line(status: PipelineStatus) -> str:
    """All that changes, the most important first, because a narrow terminal truncates the line."""
    parts = [status.state.value]
    if status.extent is not None:
        parts.append(_progress_text(status))
    if status.batch is not None and status.rows_per_s:
        parts.append(f"{status.rows_per_s:,.0f} rows/s")
    if status.lag is not None:
        parts.append(f"lag {status.lag:,}")
    if status.group is not None:
        parts.append(_rows_text(status))
    if status.batch is not None:
        parts.append(f"batch {status.batch} in {(status.batch_ms or 0) / 1000:.2f} s")
    if status.restarts:
        parts.append(f"restarts {status.restarts}")
    return "  ".join(parts)


def _progress_text(status: PipelineStatus) -> str:
    assert status.extent is not None
    done, total, unit = status.extent.done, status.extent.total, status.extent.unit
    return f"{done:,} {unit}" if total is None else f"{done:,} of {total:,} {unit}"


def _rows_text(status: PipelineStatus) -> str:
    rows = status.rows.to_json()
    shown = {name: count for name, count in rows.items() if count or name in ("in", "out")}
    return "  ".join(f"{name} {count:,}" for name, count in shown.items())


class LineScreen:
    """For logs: one line for each change of state, and another line every LINE_EVERY_S if something changed."""

    def __init__(self, runnable: Any, launch: LaunchSettings) -> None:
        self._heading = heading_lines(runnable, launch)
        self._name = runnable.name
        self._last: PipelineStatus | None = None
        self._last_s = 0.0

    def __enter__(self) -> "LineScreen":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, status: PipelineStatus) -> None:
        before, now_s = self._last, time.monotonic()
        if before is None:
            print(*self._heading, sep="\n")
        is_news = before is None or before.state is not status.state
        is_other = before is None or status_line(before) != status_line(status)
        if is_news or (is_other and now_s - self._last_s >= LINE_EVERY_S):
            print(f"{time.strftime('%H:%M:%S')} {self._name} {status_line(status)}", flush=True)
            self._last, self._last_s = status, now_s

    def note(self, text: str) -> None:
        print(text, flush=True)

    def warn(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self._name} {text}", flush=True)


class SpinnerScreen:
    """For terminals: the latest status, with a spinner."""

    def __init__(self, runnable: Any, launch: LaunchSettings) -> None:
        from rich.console import Console

        self._heading = heading_lines(runnable, launch)
        self._name = runnable.name
        self._console = Console(highlight=False)
        self._spinner = self._console.status(f"starting Spark on {launch.master}")
        self._last: PipelineStatus | None = None

    def __enter__(self) -> "SpinnerScreen":
        return self

    def __exit__(self, *_: object) -> None:
        self._spinner.stop()
        if self._last is not None:
            self._console.print(f"{self._name} {status_line(self._last)}", markup=False)

    def show(self, status: PipelineStatus) -> None:
        from rich.text import Text

        if self._last is None:
            for each in [*self._heading, "Ctrl-C stops it when its batch is done"]:
                self._console.print(each, markup=False)
            self._spinner.start()
        self._last = status
        if status.state is not PipelineState.STARTING:
            self._spinner.update(
                Text(
                    status_line(status),
                    style=_STATE_STYLES.get(status.state, ""),
                    no_wrap=True,
                    overflow="ellipsis",
                )
            )

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def warn(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, style="yellow")


_STATE_STYLES = {
    PipelineState.RUNNING: "green",
    PipelineState.RESTARTING: "yellow",
    PipelineState.FAILED: "red",
}


class ProgressBarScreen:
    """For terminals, if the work has an end."""

    def __init__(self, runnable: Any, launch: LaunchSettings) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._heading = heading_lines(runnable, launch)
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
        self._last: PipelineStatus | None = None

    def __enter__(self) -> "ProgressBarScreen":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._last is not None:
            self._console.print(f"{self._name} {status_line(self._last)}", markup=False)

    def show(self, status: PipelineStatus) -> None:
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


REQUIRED_PACKAGES = ("pyspark", "pyarrow", "numba")


def run_target(
    target: str,
    settings: Sequence[str],
    connection: ConnectionOptions,
    *,
    master: str,
    checkpoints: str,
    once: bool,
    name: str | None,
    restarts: int | None,
    take_over: bool,
    conf: Sequence[str],
) -> int:
    """Returns the exit code."""
    missing = [each for each in REQUIRED_PACKAGES if find_spec(each) is None]
    if missing:
        raise CommandError(
            f"pipelines need Spark, and {' and '.join(missing)} is not installed",
            hint="pip install 'penstock[spark]'",
        )
    check_reachable(connection)
    launch = LaunchSettings(
        bootstrap=connection.addresses,
        checkpoints=checkpoints,
        connection=connection.given_settings(),
        master=master,
        conf=parse_pairs(conf, "--conf"),
        once=once,
        restarts=restarts,
        take_over=take_over,
    )
    runnable = _load_target(target, parse_pairs(settings, "a setting"), name)
    return _run_pipeline(runnable, launch)


def _load_target(target: str, settings: dict[str, str], name: str | None) -> Any:
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"pyspark\.")
    try:
        runnable = load(target, settings)
        if name is None:
            return runnable
        if not is_dataclass(runnable) or isinstance(runnable, type):
            raise CommandError(f"{target} cannot be given another name", exit_code=EXIT_USAGE)
        return replace(runnable, name=name)
    except ClientError as error:
        raise CommandError(str(error), exit_code=EXIT_USAGE) from None


def _run_pipeline(runnable: Any, launch: Any) -> int:
    screen = make_screen(runnable, launch)
    _log_warnings_to(screen.warn)
    try:
        with screen:
            outcome = Runner(runnable, launch, listener=screen.show, note=screen.note, warn=screen.warn).run()
    except RunningAlready as error:
        raise CommandError(
            str(error), hint=f"`penstock pipeline stop {runnable.name}` stops it; --take-over runs it anyway"
        ) from None
    except ClientError as error:
        raise CommandError(str(error)) from None
    if outcome.trouble is not None:
        trouble = outcome.trouble
        message = (
            trouble.message
            if outcome.state is PipelineState.STOPPED
            else f"{trouble.kind}: {trouble.message}"
        )
        return report_error(CommandError(message))
    return 0 if outcome.state in (PipelineState.STOPPED, PipelineState.FINISHED) else EXIT_FAILURE


def _log_warnings_to(warn: Any) -> None:
    """Shows warnings of penstock's own code in this process; Spark has its own log."""

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warn(f"{record.levelname.lower()}: {record.getMessage()}")

    # These loggers print many lines about failures that the outcome reports in one.
    for name in ("py4j", "DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logger = logging.getLogger("penstock")
    logger.addHandler(Notes(logging.WARNING))
    logger.propagate = False


def print_built_in() -> None:
    rows = []
    for name, each in BUILT_IN.items():
        try:
            usage = settings_usage(name)
        except LoadingError as error:
            usage = f"({error})"
        rows.append([name, each.help, usage])
    print_table(["name", "what it does", "settings"], rows)
    sys.stdout.flush()
