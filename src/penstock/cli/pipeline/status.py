"""How pipelines are, as the board tells it and with the lag as it is now."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.cli.failure import Failure
from penstock.cli.held_back import documents, sentence, topics_of
from penstock.cli.output import Cell, note, print_facts, print_table
from penstock.cli.raw import open_cluster
from penstock.client.positions import committed
from penstock.client.transactions import TransactionInfo, open_transactions
from penstock.spark.concluding import query_of
from penstock.spark.pipelines.board import Board
from penstock.spark.pipelines.leftovers import sink_queries
from penstock.spark.pipelines.status import Counts, State, Status, measured, statuses

#: Batches have transactions open all the time, and not for so long.
_NOTABLE_S = 30.0


class Seen(NamedTuple):
    status: Status
    state: State
    now_ms: int
    #: Transactions of its own that are open, and those of others because of which it does not get on.
    open_transactions: list[dict[str, Any]]
    held_back_by: list[dict[str, Any]]

    def document(self) -> dict[str, Any]:
        return self.status.to_json() | {
            "state": self.state.value,
            "open_transactions": self.open_transactions,
            "held_back_by": self.held_back_by,
        }


@contextmanager
def open_board(bootstrap: str, properties: Sequence[str] | None) -> Iterator[Board]:
    """Whatever goes wrong with it is a Failure."""
    with open_cluster(bootstrap, properties) as cluster:
        board = Board(cluster)
        yield board
        board.close()


def seen_all(board: Board) -> list[Seen]:
    now_ms = int(time.time() * 1000)
    known = statuses(board)
    transactions = open_transactions(board.cluster) if known else []
    return [_seen(board, each, now_ms, known, transactions) for each in known.values()]


def seen_one(board: Board, name: str) -> Seen:
    known = statuses(board)
    if name not in known:
        raise _unknown(name, list(known))
    transactions = open_transactions(board.cluster)
    return _seen(board, known[name], int(time.time() * 1000), known, transactions)


def _seen(
    board: Board,
    status: Status,
    now_ms: int,
    known: dict[str, Status],
    transactions: Sequence[TransactionInfo],
) -> Seen:
    status = measured(board.cluster, status)
    state = status.seen(now_ms)
    own = set(sink_queries(status))
    mine = [each for each in transactions if query_of(each.transactional_id) in own]
    sources = set() if status.group is None else set(committed(board.cluster, status.group, stable=False))
    others = [each for each in transactions if each not in mine and sources.intersection(each.partitions)]
    return Seen(
        replace(status, rows_per_s=0.0) if state.is_over else status,
        state,
        now_ms,
        documents(mine, known),
        documents(others, known, sources),
    )


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
    for each in found:
        if each.state.is_over and each.open_transactions:
            name, topics = each.status.name, topics_of(each.open_transactions)
            note(f"{name} has left transactions open in {topics}: penstock pipeline release {name} ends them")


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
            *_open_facts(seen),
            ("error", None if error is None else f"{error.kind}: {error.message}"),
            ("told", f"{_age(seen.now_ms - status.updated_ms)} ago"),
        ]
    )


def _open_facts(seen: Seen) -> list[tuple[str, Cell]]:
    """What readers wait for: all that it has left behind, or what a batch of it has been at for long."""
    least_s = 0 if seen.state.is_over else _NOTABLE_S
    mine = [each for each in seen.open_transactions if each["open_s"] >= least_s]
    others = [each for each in seen.held_back_by if each["open_s"] >= _NOTABLE_S]
    facts: list[tuple[str, Cell]] = []
    if mine:
        facts.append(("holds back", f"{topics_of(mine)}: {sentence(mine)}"))
    if others:
        facts.append(("held back by", f"{topics_of(others)}: {sentence(others)}"))
    return facts


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
