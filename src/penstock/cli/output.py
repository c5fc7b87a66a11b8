"""What commands print: tables for people, JSON for scripts, notes on stderr. No other module prints tables."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.cli.errors import EXIT_USAGE, CommandError

#: Stands for a secret, as in Apache Kafka.
HIDDEN = "[hidden]"
Cell = str | int | float | bool | None
PIPE_WIDTH_CHARS = 100_000  # a pipe has no width, so lines are never wrapped there
WATCH_EVERY_S = 2.0  # how often --watch refreshes


def print_json(document: Any) -> None:
    """Prints one indented document. Its keys are a stable interface."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    unfolded: Sequence[str] = (),
    styles: Sequence[str] = (),
) -> None:
    """Aligns columns of numbers right; None is a dash. On a narrow terminal, columns in `unfolded` are not wrapped.

    `styles` has a style of rich for each row, or is empty.
    """
    cells = [list(row) for row in rows]
    for_people = sys.stdout.isatty()
    if not for_people and (plain := _plain_lines(columns, cells)) is not None:
        print("\n".join(plain))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD if for_people else None,
        show_edge=False,
        pad_edge=False,
        header_style="bold cyan",
    )
    for index, column in enumerate(columns):
        numeric = _is_numeric(row[index] for row in cells)
        # People copy names, so a long name is wrapped rather than truncated.
        table.add_column(
            column,
            justify="right" if numeric else "left",
            overflow="fold",
            no_wrap=numeric or column in unfolded,
        )
    for index, row in enumerate(cells):
        style = styles[index] if styles else ""
        table.add_row(*(Text(_cell_text(cell), style="dim" if cell is None else style) for cell in row))
    console = Console(width=None if for_people else PIPE_WIDTH_CHARS, highlight=False)
    with console.capture() as capture:
        console.print(table)
    lines = (line.rstrip() for line in capture.get().splitlines())
    print("\n".join(line for line in lines if line))


def _plain_lines(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str] | None:
    """What rich makes of such a table in a pipe, for which it needs a millisecond per row.

    None if a text has characters that are wider or narrower than others, breaks lines, or has spaces around it.
    """
    texts = [[*columns], *([_cell_text(cell) for cell in row] for row in rows)]
    plain = (
        text.isascii() and text.isprintable() and text == text.strip() for line in texts for text in line
    )
    if not all(plain):
        return None
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    numeric = [_is_numeric(column) for column in zip(*rows, strict=True)] or [False] * len(columns)
    aligned = (
        "  ".join(
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in texts
    )
    return [line for line in aligned if line]


def print_rows(
    rows: Sequence[dict[str, Any]],
    *,
    as_json: bool,
    if_none: str = "",
    print_one: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Prints rows as JSON, one after another with `print_one`, or as a table, for which all have the same keys.

    If there are none, people read `if_none`.
    """
    if as_json:
        print_json(rows)
    elif print_one is not None:
        for index, row in enumerate(rows):
            if index:
                print()
            print_one(row)
    elif rows:
        print_table([column.replace("_", " ") for column in rows[0]], (list(row.values()) for row in rows))
    else:
        note(if_none)


def print_facts(facts: Iterable[tuple[str, Cell]]) -> None:
    """Prints a short list of names and values, aligned."""
    known = [(name, _cell_text(value)) for name, value in facts]
    width = max(len(name) for name, _ in known)
    for name, value in known:
        print(f"{_bold(name.ljust(width))}  {value}")


def note(text: str) -> None:
    """Prints something on stderr that a person should know, but that is not part of the result."""
    print(text, file=sys.stderr)


def confirm(question: str, *, yes: bool) -> None:
    """Raises CommandError unless the user agrees, with --yes or at a terminal."""
    import typer

    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandError("this needs a confirmation", hint="add --yes", exit_code=EXIT_USAGE)
    if not typer.confirm(question, err=True):
        raise CommandError("nothing was changed")


def clear_screen(as_json: bool) -> None:
    """For --watch. Does nothing for JSON, or if stdout is not a terminal."""
    if sys.stdout.isatty() and not as_json:
        print("\x1b[H\x1b[2J", end="")


def human_bytes(count: int | None) -> str | None:
    if count is None:
        return None
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{count} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def plain_number(value: float) -> str:
    """All digits of whole numbers, which people compare with what they have typed."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.10g}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _is_numeric(cells: Iterable[Cell]) -> bool:
    present = [cell for cell in cells if cell is not None]
    return bool(present) and all(
        isinstance(cell, (int, float)) and not isinstance(cell, bool) for cell in present
    )


def _cell_text(cell: Cell) -> str:
    match cell:
        case None:
            return "-"
        case bool():
            return "yes" if cell else "no"
        case _:
            return str(cell)


def _bold(text: str) -> str:
    import os

    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text
