"""`df.write.format("penstock")` and `df.writeStream.format("penstock")`: Spark's names for what others here do.

Writers are made anew for every batch and again for its commit, in whatever process Spark likes; all that they know of
each other is in the messages of tasks.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from penstock.client.cluster import Cluster
from penstock.client.prepared import Prepared
from penstock.spark.concluding import conclude, finish_before, succeed, withdraw
from penstock.spark.decisions import Ledger, MicroBatch, SinkError
from penstock.spark.option_values import OptionError
from penstock.spark.plainly import told_plainly
from penstock.spark.reading import task_cluster
from penstock.spark.sink_options import Contract, SinkOptions
from penstock.spark.sink_rows import SinkColumns, WrongRow
from penstock.spark.tasks import warn_of_unknown
from penstock.spark.tickets import Ticket, fresh_ticket, redeem, this_attempt

_LOG: Final = logging.getLogger("penstock.spark")
#: Local properties of a job that is a batch of a streaming query.
_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written(WriterCommitMessage):  # type: ignore[misc, unused-ignore]
    """What a task tells the driver."""

    rows: int
    #: With at-most-once: rows that were left out because another attempt may have written them.
    skipped: int = 0
    #: With exactly-once.
    batch: MicroBatch | None = None
    prepared: Prepared | None = None
    #: Why this task has written nothing that lasts. Another attempt at it would find the same, so the driver fails.
    flaw: WrongRow | None = None


def refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise OptionError('a topic can only be added to: use mode("append") or outputMode("append")')


class BatchWriter(DataSourceArrowWriter):  # type: ignore[misc, unused-ignore]
    """All tasks of a job write under one id: that which the user gave, so that it can be repeated, or a new one."""

    def __init__(self, options: SinkOptions, columns: SinkColumns) -> None:
        """Called once, before there are tasks. Raises SinkError, Unavailable, Refused."""
        warn_of_unknown(options)
        self.options = options
        self.columns = columns
        self.batch = options.repeatable or MicroBatch(uuid.uuid4().hex, 0)
        self.ticket = _ticket(options)
        if options.repeatable is not None:
            finish_before(task_cluster(options.connection), self.batch, checkpoint_name(options.checkpoint))

    def write(self, iterator: Iterator[Any]) -> Written:
        return _write(self.options, self.columns, lambda: self.batch, self.ticket, iterator)

    @told_plainly()
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        refuse_flawed(messages)
        if self.options.repeatable is None:
            self._conclude_once(prepared_by(messages))
            return
        with self._ledger() as ledger:
            fails_on_loss = self.options.fail_on_data_loss
            prepared = prepared_by(messages)
            conclude(ledger, self.batch, prepared, fails_on_loss=fails_on_loss, skips_older=True)

    @told_plainly()
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """What was decided before stands."""
        if self.options.repeatable is None:
            # Decides that nothing is written, so that attempts which come late know.
            self._conclude_once([])
            return
        with self._ledger() as ledger:
            withdraw(ledger, self.batch, prepared_by(messages))

    def _conclude_once(self, prepared: Sequence[Prepared]) -> None:
        if self.options.contract is not Contract.EXACTLY_ONCE:
            return
        with self._ledger() as ledger:
            conclude(ledger, self.batch, prepared)
            ledger.forget()

    def _ledger(self) -> Ledger:
        cluster = task_cluster(self.options.connection)
        return Ledger(cluster, self.batch.query, is_new=self.options.repeatable is None)


class StreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc, unused-ignore]
    def __init__(self, options: SinkOptions, columns: SinkColumns) -> None:
        """Called once for the tasks of each batch, and again for its commit. Raises Unavailable, Refused."""
        self.options = options
        self.columns = columns
        self.ticket = _ticket(options)

    def write(self, iterator: Iterator[Any]) -> Written:
        return _write(self.options, self.columns, this_batch, self.ticket, iterator)

    @told_plainly()
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        refuse_flawed(messages)
        batch = batch_of(messages, batchId)
        if self.options.contract is not Contract.EXACTLY_ONCE or batch is None:
            return
        cluster, checkpoint = task_cluster(self.options.connection), checkpoint_name(self.options.checkpoint)
        if batch.number == 0 and checkpoint is not None:
            succeed(cluster, checkpoint, batch.query)
        with Ledger(cluster, batch.query) as ledger:
            fails_on_loss = self.options.fail_on_data_loss
            conclude(ledger, batch, prepared_by(messages), fails_on_loss=fails_on_loss)

    @told_plainly()
    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        batch = batch_of(messages, batchId)
        if self.options.contract is not Contract.EXACTLY_ONCE or batch is None:
            return
        with Ledger(task_cluster(self.options.connection), batch.query) as ledger:
            withdraw(ledger, batch, prepared_by(messages))


def checkpoint_name(location: str | None) -> str | None:
    """The same for all who mean the same folder: a path means another one on another machine."""
    if location is None:
        return None
    parts = urlsplit(location)
    is_local = parts.scheme in ("", "file")
    return f"{socket.gethostname()}:{os.path.abspath(parts.path)}" if is_local else location.rstrip("/")


def _ticket(options: SinkOptions) -> Ticket | None:
    """What the attempts at each task know each other by."""
    is_needed = options.contract is Contract.AT_MOST_ONCE
    return fresh_ticket(task_cluster(options.connection)) if is_needed else None


@told_plainly()
def _write(
    options: SinkOptions,
    columns: SinkColumns,
    find_batch: Callable[[], MicroBatch],
    ticket: Ticket | None,
    batches: Iterable[Any],
) -> Written:
    from penstock.spark.writing import skip

    rows = iter(batches)
    try:
        return _write_rows(options, columns, find_batch, ticket, rows)
    except WrongRow as flaw:
        skip(rows)
        return Written(rows=0, flaw=flaw)


def _write_rows(
    options: SinkOptions,
    columns: SinkColumns,
    find_batch: Callable[[], MicroBatch],
    ticket: Ticket | None,
    batches: Iterable[Any],
) -> Written:
    from penstock.spark.writing import NAMES, write_at_least_once, write_exactly_once, write_nowhere

    cluster = task_cluster(options.connection)
    if options.dry_run:
        return Written(rows=write_nowhere(cluster, options, columns, batches).rows)
    if ticket is not None:
        return _write_at_most_once(cluster, options, columns, ticket, batches)
    if options.contract is not Contract.EXACTLY_ONCE:
        return Written(rows=write_at_least_once(cluster, options, columns, batches).rows)
    batch = find_batch()
    done = write_exactly_once(cluster, options, columns, batch, batches, name=NAMES.take(batch))
    return Written(rows=done.rows, batch=batch, prepared=done.prepared)


def _write_at_most_once(
    cluster: Cluster, options: SinkOptions, columns: SinkColumns, ticket: Ticket, batches: Iterable[Any]
) -> Written:
    from penstock.spark.writing import write_at_most_once

    attempt = this_attempt()
    own = ticket._replace(number=attempt.partition)
    done = write_at_most_once(cluster, options, columns, batches, lambda: redeem(cluster, own, attempt))
    if done.skipped:
        _LOG.warning(
            "attempt %d at task %d does not write its %d rows: another attempt may have",
            *(attempt.attempt, attempt.partition, done.skipped),
        )
    return Written(rows=done.rows, skipped=done.skipped)


def this_batch() -> MicroBatch:
    """Of the query that this task works for. Raises SinkError."""
    context = TaskContext.get()
    query = context.getLocalProperty(_QUERY) if context is not None else None
    number = context.getLocalProperty(_BATCH) if context is not None else None
    if query is None or number is None:
        raise SinkError(
            "Spark does not tell which batch of which query this is, so it cannot be written once"
        )
    return MicroBatch(query, int(number))


def batch_of(messages: Iterable[WriterCommitMessage | None], number: int) -> MicroBatch | None:
    """None where no task has told anything. Raises SinkError where they tell of different batches."""
    found = {each.batch for each in messages if isinstance(each, Written) and each.batch is not None}
    if not found:
        return None
    if len(found) > 1 or next(iter(found)).number != number:
        raise SinkError(
            f"tasks of {', '.join(map(str, sorted(found)))} are to be committed as batch {number}"
        )
    return next(iter(found))


def refuse_flawed(messages: Iterable[WriterCommitMessage | None]) -> None:
    """Raises WrongRow. Spark then has the writer abort."""
    for each in messages:
        if isinstance(each, Written) and each.flaw is not None:
            raise each.flaw


def prepared_by(messages: Iterable[WriterCommitMessage | None]) -> list[Prepared]:
    told = (each.prepared for each in messages if isinstance(each, Written))
    return [prepared for prepared in told if prepared is not None]
