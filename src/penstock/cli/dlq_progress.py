"""How far a replay is: a bar for people who look on, a line now and then for logs. Both on stderr."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.cli.output import note

LINE_EVERY_S = 5.0


@contextmanager
def progress(total: int, noun: str) -> Iterator[Callable[[int], None]]:
    """Gives a function to be told how many are done."""
    if not sys.stderr.isatty():
        yield _lines(total, noun)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TextColumn(noun),
        TimeRemainingColumn(),
        console=Console(stderr=True, highlight=False),
    )
    with bar:
        task = bar.add_task(noun, total=total)
        yield lambda done: bar.update(task, completed=done)


def _lines(total: int, noun: str) -> Callable[[int], None]:
    last_s = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= LINE_EVERY_S:
            last_s = time.monotonic()
            note(f"{done} of {total} {noun}")

    return tell


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or SIGTERM asked for an end, which comes between two steps; a second one does not wait."""
    asked = False

    def ask(_number: int, _frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = {each: signal.signal(each, ask) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
