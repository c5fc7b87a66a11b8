"""How pipelines are, as the board tells it and with the lag as it is now."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.cli.failure import Failure
from penstock.cli.output import Cell, print_facts, print_table
from penstock.cli.raw import open_cluster
from penstock.spark.pipelines.board import Board
from penstock.spark.pipelines.status import Counts, State, Status, measured, statuses


class Seen(NamedTuple):
    status: Status
    state: State
    now_ms: int

    def document(self) -> dict[str, Any]:
        return self.status.to_json() | {"state": self.state.value}


@contextmanager
def open_board(bootstrap: str, properties: Sequence[str] | None) -> Iterator[Board]:
    """Whatever goes wrong with it is a Failure."""
    with open_cluster(bootstrap, properties) as cluster:
        board = Board(cluster)
        yield board
        board.close()


def seen_all(board: Board) -> list[Seen]:
    now_ms = int(time.time() * 1000)
    return [_seen(board, each, now_ms) for each in statuses(board).values()]


def seen_one(board: Board, name: str) -> Seen:
    known = statuses(board)
    if name not in known:
        raise _unknown(name, list(known))
    return _seen(board, known[name], int(time.time() * 1000))


def _seen(board: Board, status: Status, now_ms: int) -> Seen:
    status = measured(board.cluster, status)
    state = status.seen(now_ms)
    return Seen(replace(status, rows_per_s=0.0) if state.is_over else status, state, now_ms)


def _unknown(name: str, known: list[str]) -> Failure:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "penstock pipeline list shows what there is"
    return Failure(f"there is no pipeline {name}", hint=hint)


# For people


def print_list(found: Sequence[Seen]) -> None:
    columns = ["pipeline", "state", "rows/s", "lag", "in", "out", "retried", "dead"]
    rows: list[list[Cell]] = [
        [each.status.name, each.state.value, _rate(each.status), each.status.lag, *_counts(each.status.rows)]
        for each in found
    ]
    print_table(columns, rows)


def _counts(rows: Counts) -> list[Cell]:
    return [rows.rows_in, rows.rows_out, rows.retried, rows.dead]


def print_status(seen: Seen) -> None:
    status, rows = seen.status, seen.status.rows
    error = status.error
    print_facts(
        [
            ("pipeline", status.name),
            ("state", f"{seen.state.value} for {_age(seen.now_ms - _since_ms(seen))}"),
            ("from", status.source or None),
            ("to", status.sink or None),
            ("delivery", status.delivery or None),
            ("runs on", f"{status.host}, process {status.pid}, Spark on {status.master}"),
            ("group", status.group),
            ("checkpoint", status.checkpoint),
            ("generation", status.generation),
            ("batch", _batch(status)),
            ("rows/s", _rate(status)),
            ("lag", status.lag),
            ("done", _done(status)),
            (
                "rows",
                f"{rows.rows_in} in, {rows.rows_out} out, {rows.retried} retried, {rows.dead} dead"
                + (f", {rows.skipped} skipped" if rows.skipped else ""),
            ),
            ("restarts", status.restarts),
            ("error", None if error is None else f"{error.kind}: {error.message}"),
            ("told", f"{_age(seen.now_ms - status.updated_ms)} ago"),
        ]
    )


def _since_ms(seen: Seen) -> int:
    return seen.status.updated_ms if seen.state is State.LOST else seen.status.since_ms


def _rate(status: Status) -> int | None:
    return None if status.rows_per_s is None else round(status.rows_per_s)


def _batch(status: Status) -> str | None:
    if status.batch is None:
        return None
    return f"{status.batch}, in {(status.batch_ms or 0) / 1000:.2f} s"


def _done(status: Status) -> str | None:
    if status.extent is None:
        return None
    total = "?" if status.extent.total is None else status.extent.total
    return f"{status.extent.done} of {total} {status.extent.unit}"


def _age(age_ms: int) -> str:
    seconds = max(age_ms, 0) // 1000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
