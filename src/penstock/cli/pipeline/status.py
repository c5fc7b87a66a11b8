"""`penstock pipeline list` and `status`: pipelines as they report themselves, with their current lag and the open
transactions that they or others hold.

`topic describe` and `transaction` show open transactions too: who owns them, which partitions they hold back, since
when, and what ends them.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.cli.connection import ConnectionOptions, open_cluster
from penstock.cli.connection.offsets import did_you_mean
from penstock.cli.errors import CommandError
from penstock.cli.output import Cell, note, print_facts, print_table
from penstock.client.errors import ClientError
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.metadata import IsolationLevel, TopicPartition
from penstock.client.wire.offsets import LATEST, committed_offsets, list_offsets
from penstock.client.wire.transactions import TransactionInfo, open_transactions
from penstock.spark.exactly_once.two_phase_commit import query_of_transactional_id
from penstock.spark.internal_topics import DocumentStore
from penstock.spark.pipelines.open_transactions import sink_queries, transaction_owner
from penstock.spark.pipelines.status import PipelineState, PipelineStatus, RowCounts, read_statuses, with_lag

_PIPELINE_PREFIX = "pipeline "


def blocking_transactions(cluster: Cluster, partitions: Sequence[TopicPartition]) -> list[dict[str, Any]]:
    """Open transactions that keep read_committed consumers from reaching the end of these partitions.

    Returns none if the brokers cannot report transactions.
    """
    with suppress(ClientError):
        edges = dict.fromkeys(partitions, LATEST)
        ends = list_offsets(cluster, edges)
        stable = list_offsets(cluster, edges, isolation=IsolationLevel.READ_COMMITTED)
        behind = {
            partition
            for partition in partitions
            if _offset_or_zero(stable[partition]) < _offset_or_zero(ends[partition])
        }
        if not behind:
            return []
        found = [each for each in open_transactions(cluster) if behind.intersection(each.partitions)]
        return transaction_documents(found, read_statuses(DocumentStore(cluster)), behind)
    return []


def _offset_or_zero(found: Any) -> int:
    return found.offset if found is not None else 0


def transaction_documents(
    found: Iterable[TransactionInfo],
    known: dict[str, PipelineStatus],
    tps: set[TopicPartition] | None = None,
) -> list[dict[str, Any]]:
    """Rows for JSON output; restricted to `tps` if given."""
    now_s = time.time()
    return [
        {
            "transactional_id": each.transactional_id,
            "owner": transaction_owner(each.transactional_id, known),
            "since_ms": each.start_ms,
            "open_s": round(max(now_s - each.start_ms / 1000, 0.0), 1),
            "timeout_ms": each.timeout_ms,
            "partitions": [
                {"topic": topic, "partition": partition}
                for topic, partition in each.partitions
                if tps is None or (topic, partition) in tps
            ],
        }
        for each in found
    ]


def blocking_text(rows: Sequence[dict[str, Any]]) -> str | None:
    """Describes the transaction that has been open longest, and says how many more there are."""
    if not rows:
        return None
    first = max(rows, key=lambda row: float(row["open_s"]))
    who = first["owner"] or f"transaction {first['transactional_id']}"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first["since_ms"] / 1000))
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return f"{who}{more}, since {since} ({first['open_s']:.0f} s): {remedy_text(first)}"


def remedy_text(row: dict[str, Any]) -> str:
    owner = row["owner"]
    if owner is None:
        return f"`penstock transaction abort {row['transactional_id']}` ends it"
    name = owner.removeprefix(_PIPELINE_PREFIX).removeprefix("query ")
    return f"it ends when the query runs again, or with `penstock pipeline release {name}`"


def topic_names(rows: Iterable[dict[str, Any]]) -> str:
    return ", ".join(sorted({partition["topic"] for row in rows for partition in row["partitions"]}))


#: Batches always have transactions open, but usually not for this long.
_NOTABLE_AFTER_S = 30.0


class PipelineView(NamedTuple):
    status: PipelineStatus
    state: PipelineState
    now_ms: int
    #: Open transactions of the pipeline itself, and those of others that keep it from reading on.
    open_transactions: list[dict[str, Any]]
    held_back_by: list[dict[str, Any]]

    def document(self) -> dict[str, Any]:
        return self.status.to_json() | {
            "state": self.state.value,
            "open_transactions": self.open_transactions,
            "held_back_by": self.held_back_by,
        }


@contextmanager
def open_status_store(connection: ConnectionOptions) -> Iterator[DocumentStore]:
    """Raises every client error as a CommandError."""
    with open_cluster(connection) as cluster:
        store = DocumentStore(cluster)
        yield store
        store.close()


def view_pipelines(store: DocumentStore) -> list[PipelineView]:
    now_ms = int(time.time() * 1000)
    known = read_statuses(store)
    transactions = open_transactions(store.cluster) if known else []
    return [_make_view(store, each, now_ms, known, transactions) for each in known.values()]


def view_pipeline(store: DocumentStore, name: str) -> PipelineView:
    known = read_statuses(store)
    if name not in known:
        raise CommandError(
            f"pipeline {name} does not exist",
            hint=did_you_mean(name, known, "`penstock pipeline list` shows all pipelines"),
        )
    transactions = open_transactions(store.cluster)
    return _make_view(store, known[name], int(time.time() * 1000), known, transactions)


def _make_view(
    store: DocumentStore,
    status: PipelineStatus,
    now_ms: int,
    known: dict[str, PipelineStatus],
    transactions: Sequence[TransactionInfo],
) -> PipelineView:
    status = with_lag(store.cluster, status)
    state = status.current_state(now_ms)
    own = set(sink_queries(status))
    mine = [each for each in transactions if query_of_transactional_id(each.transactional_id) in own]
    sources = (
        set() if status.group is None else set(committed_offsets(store.cluster, status.group, stable=False))
    )
    others = [each for each in transactions if each not in mine and sources.intersection(each.partitions)]
    return PipelineView(
        replace(status, rows_per_s=0.0) if state.is_over else status,
        state,
        now_ms,
        transaction_documents(mine, known),
        transaction_documents(others, known, sources),
    )


# Output for people


def print_list(found: Sequence[PipelineView]) -> None:
    columns = ["pipeline", "state", "rows/s", "lag", "in", "out", "retried", "dead"]
    rows: list[list[Cell]] = [
        [
            each.status.name,
            each.state.value,
            _rows_per_second(each.status),
            each.status.lag,
            *_row_counts(each.status.rows),
        ]
        for each in found
    ]
    print_table(columns, rows)
    for each in found:
        if each.state.is_over and each.open_transactions:
            name, topics = each.status.name, topic_names(each.open_transactions)
            note(f"{name} left transactions open in {topics}; `penstock pipeline release {name}` ends them")


def _row_counts(rows: RowCounts) -> list[Cell]:
    return [rows.rows_in, rows.rows_out, rows.retried, rows.dead]


def print_status(seen: PipelineView) -> None:
    status, rows = seen.status, seen.status.rows
    error = status.error
    print_facts(
        [
            ("pipeline", status.name),
            ("state", f"{seen.state.value} for {_age_text(seen.now_ms - _since_ms(seen))}"),
            ("from", status.source or None),
            ("to", status.sink or None),
            ("delivery", status.delivery or None),
            ("runs on", f"{status.host}, process {status.pid}, Spark on {status.master}"),
            ("group", status.group),
            ("checkpoint", status.checkpoint),
            ("generation", status.generation),
            ("batch", _batch_text(status)),
            ("rows/s", _rows_per_second(status)),
            ("lag", status.lag),
            ("done", _progress_text(status)),
            (
                "rows",
                f"{rows.rows_in} in, {rows.rows_out} out, {rows.retried} retried, {rows.dead} dead"
                + (f", {rows.skipped} skipped" if rows.skipped else ""),
            ),
            ("restarts", status.restarts),
            *_transaction_facts(seen),
            ("error", None if error is None else f"{error.kind}: {error.message}"),
            ("reported", f"{_age_text(seen.now_ms - status.updated_ms)} ago"),
        ]
    )


def _transaction_facts(seen: PipelineView) -> list[tuple[str, Cell]]:
    """The transactions that readers wait for: all that a stopped pipeline left open, else those open for long."""
    least_s = 0 if seen.state.is_over else _NOTABLE_AFTER_S
    mine = [each for each in seen.open_transactions if each["open_s"] >= least_s]
    others = [each for each in seen.held_back_by if each["open_s"] >= _NOTABLE_AFTER_S]
    facts: list[tuple[str, Cell]] = []
    if mine:
        facts.append(("holds back", f"{topic_names(mine)}: {blocking_text(mine)}"))
    if others:
        facts.append(("held back by", f"{topic_names(others)}: {blocking_text(others)}"))
    return facts


def _since_ms(seen: PipelineView) -> int:
    return seen.status.updated_ms if seen.state is PipelineState.LOST else seen.status.since_ms


def _rows_per_second(status: PipelineStatus) -> int | None:
    return None if status.rows_per_s is None else round(status.rows_per_s)


def _batch_text(status: PipelineStatus) -> str | None:
    if status.batch is None:
        return None
    return f"{status.batch}, in {(status.batch_ms or 0) / 1000:.2f} s"


def _progress_text(status: PipelineStatus) -> str | None:
    if status.extent is None:
        return None
    total = "?" if status.extent.total is None else status.extent.total
    return f"{status.extent.done} of {total} {status.extent.unit}"


def _age_text(age_ms: int) -> str:
    seconds = max(age_ms, 0) // 1000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
