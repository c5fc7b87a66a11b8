"""`df.write.format("penstock")` and `df.writeStream.format("penstock")`.

A task writes the rows of one attempt, from Arrow columns to the leaders of partitions. Spark creates the writers again
for every batch and for its commit, in any process; they share nothing but the commit messages of tasks.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from penstock.client.errors import ClientError
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.producer import PreparedTransaction, RawProducer, TwoPhaseKind
from penstock.client.wire.settings import ConnectionSettings
from penstock.protocol.compression import Codec
from penstock.spark.at_most_once.task_claims import TaskClaim, claim_task, current_attempt, new_task_claim
from penstock.spark.exactly_once.decisions import DecisionLog, MicroBatch, SinkError, last_decided_batch
from penstock.spark.exactly_once.two_phase_commit import (
    abort_batch,
    attempt_id_prefix,
    commit_batch,
    finish_earlier_batch,
    take_over_checkpoint,
)
from penstock.spark.option_reader import OptionError
from penstock.spark.sink.options import Contract, SinkOptions
from penstock.spark.sink.records import (
    LimitChecker,
    SinkColumns,
    WrongRow,
    combine_batches,
    records_by_partition,
)
from penstock.spark.source.task import task_cluster, warn_of_unknown_settings
from penstock.spark.workers import without_traceback

if TYPE_CHECKING:
    import pyarrow as pa


#: A codec that every client can read without further packages.
_LARGE_RECORD_CODEC: Final = Codec.GZIP


class AttemptResult(NamedTuple):
    """The result of an attempt. Nothing is prepared if there were no rows, or if the batch was already decided."""

    rows: int
    prepared: PreparedTransaction | None = None
    #: Rows that this attempt did not write, because another attempt may have written them.
    skipped: int = 0


def write_dry_run(
    cluster: Cluster, options: SinkOptions, columns: SinkColumns, batches: Iterable[pa.RecordBatch]
) -> AttemptResult:
    """Check and encode all rows, but send nothing. Raises WrongRow, Unavailable, Refused."""
    limits = LimitChecker(cluster, use_cache=False)
    sent = _send(limits, options, columns, combine_batches(batches), lambda *_: None)
    return AttemptResult(sent)


def write_at_least_once(
    cluster: Cluster, options: SinkOptions, columns: SinkColumns, batches: Iterable[pa.RecordBatch]
) -> AttemptResult:
    """Write the rows and wait for all acknowledgements. Raises WrongRow, Unavailable, Refused, TopicChanged."""
    rows = combine_batches(batches)
    first = next(rows, None)
    if first is None:
        return AttemptResult(0)
    with RawProducer(cluster) as producer:
        producer.init()
        count = _send(LimitChecker(cluster), options, columns, _prepend(first, rows), producer.send)
        producer.flush()
    return AttemptResult(count)


def write_at_most_once(
    cluster: Cluster,
    options: SinkOptions,
    columns: SinkColumns,
    batches: Iterable[pa.RecordBatch],
    may_write: Callable[[], bool],
) -> AttemptResult:
    """Write the rows unless another attempt may have. Raises the same errors as `write_at_least_once`."""
    rows = combine_batches(batches)
    first = next(rows, None)
    if first is None:
        return AttemptResult(0)
    if not may_write():
        return AttemptResult(0, skipped=first.num_rows + sum(each.num_rows for each in rows))
    return write_at_least_once(cluster, options, columns, _prepend(first, rows))


def write_exactly_once(
    cluster: Cluster,
    options: SinkOptions,
    columns: SinkColumns,
    batch: MicroBatch,
    batches: Iterable[pa.RecordBatch],
    *,
    transactional_id: str,
) -> AttemptResult:
    """Write the rows in a transaction and prepare it. The driver ends it.

    Raises WrongRow, Unavailable, Refused, TopicChanged, after it has aborted the transaction.
    """
    rows = combine_batches(batches)
    first = next(rows, None)
    if first is None:
        return AttemptResult(0)
    with _begin_transaction(cluster, options, transactional_id) as producer:
        # Look for a decision only after the transactional id is initialized: see `abort_undecided`.
        decided = last_decided_batch(cluster, batch.query, stable=False)
        if decided is not None and decided.number >= batch.number:
            drain_rows(rows)
            return AttemptResult(0)
        try:
            count = _send(LimitChecker(cluster), options, columns, _prepend(first, rows), producer.send)
            return AttemptResult(count, producer.prepare())
        except BaseException:
            with suppress(ClientError):
                producer.end(commit=False)
            raise


def drain_rows(rows: Iterator[pa.RecordBatch]) -> None:
    """Read the rows to their end, which Spark waits for."""
    for _ in rows:
        pass


def _prepend(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _send(
    limits: LimitChecker,
    options: SinkOptions,
    columns: SinkColumns,
    rows: Iterable[pa.RecordBatch],
    send: Callable[[str, int, bytearray], object],
) -> int:
    """Send the rows, and return how many there were. Raises WrongRow, and the errors of `send`."""
    count = 0
    for each in rows:
        seed = random.getrandbits(31)
        for (topic, partition), records in records_by_partition(
            each, columns, limits.partition_count, seed=seed
        ):
            limits.check_keys(topic, records)
            for data in _encode_batches(limits, options, topic, records):
                send(topic, partition, data)
        count += each.num_rows
    return count


def _encode_batches(
    limits: LimitChecker, options: SinkOptions, topic: str, records: pa.RecordBatch
) -> Iterator[bytearray]:
    """Yield batches that the topic accepts. Raises RecordTooLarge."""
    # A planning worker imports this module and encodes nothing, so it does not load the kernels.
    from penstock.spark.columns import encode

    now_ms, at = int(time.time() * 1000), 0
    bytes_max = limits.bytes_max(topic, options.batch_bytes_max)
    for encoded in encode(records, timestamp_ms=now_ms, codec=options.codec, batch_bytes_max=bytes_max):
        data = encoded.data
        if encoded.count == 1 and not limits.accepts(topic, len(data)):
            # The record may have been compressed in the topic that it was read from.
            (smaller,) = encode(records.slice(at, 1), timestamp_ms=now_ms, codec=_LARGE_RECORD_CODEC)
            if not limits.accepts(topic, len(smaller.data)):
                raise limits.too_large(topic, len(data))
            data = smaller.data
        yield data
        at += encoded.count


# Transactions of attempts

#: How long brokers without two-phase commit keep a transaction open. Each process asks once.
_TRANSACTION_TIMEOUTS_MS: Final[dict[ConnectionSettings, int]] = {}


def _begin_transaction(cluster: Cluster, options: SinkOptions, transactional_id: str) -> RawProducer:
    timeout_ms = _TRANSACTION_TIMEOUTS_MS.get(cluster.settings) if options.two_phase else None
    producer = RawProducer(
        cluster,
        transactional_id=transactional_id,
        transaction_timeout_ms=timeout_ms or options.transaction_timeout_ms,
        two_phase=options.two_phase and timeout_ms is None,
    )
    producer.init()
    if producer.two_phase_kind is TwoPhaseKind.UNTIL_TIMEOUT:
        _TRANSACTION_TIMEOUTS_MS[cluster.settings] = producer.transaction_timeout_ms
    return producer


_QUERIES_MAX: Final = 1_000


class AttemptIds:
    """Transactional ids for the attempts of one worker process, each for one attempt at one batch.

    A process reuses the ids of a batch two batches later, when all of their transactions have ended. It counts the ids
    of the queries that it worked for recently.
    """

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        """Start over with another token, so that new ids differ from those that are no longer counted."""
        self._owner = os.getpid()
        self._token = uuid.uuid4().hex
        self._used: dict[str, tuple[int, int]] = {}

    def take(self, batch: MicroBatch) -> str:
        if self._owner != os.getpid() or len(self._used) > _QUERIES_MAX:
            self._renew()
        newest, count = self._used.get(batch.query, (-1, 0))
        if batch.number < newest:
            return f"{attempt_id_prefix(batch)}{uuid.uuid4().hex}"
        count = count + 1 if batch.number == newest else 0
        self._used[batch.query] = (batch.number, count)
        return f"{attempt_id_prefix(batch)}{self._token}-{count}"


ATTEMPT_IDS: Final = AttemptIds()


_LOG: Final = logging.getLogger("penstock.spark")
#: Local properties of a job that is a batch of a streaming query.
_QUERY_ID_PROPERTY: Final = "sql.streaming.queryId"
_BATCH_ID_PROPERTY: Final = "streaming.sql.batchId"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult(WriterCommitMessage):  # type: ignore[misc, unused-ignore]
    """What a task reports to the driver."""

    rows: int
    #: With at-most-once: rows that were not written because another attempt may have written them.
    skipped: int = 0
    #: With exactly-once: the batch, and the transaction with its rows.
    batch: MicroBatch | None = None
    prepared: PreparedTransaction | None = None
    #: Why this task wrote nothing. Another attempt would fail in the same way, so the driver fails the batch.
    flaw: WrongRow | None = None


def refuse_overwrite(overwrite: bool) -> None:
    if overwrite:
        raise OptionError('a topic cannot be overwritten: use mode("append") or outputMode("append")')


class BatchWriter(DataSourceArrowWriter):  # type: ignore[misc, unused-ignore]
    """Writes a DataFrame. All tasks write under one id: the one that the user gave, for a retry, or a new one."""

    def __init__(self, options: SinkOptions, columns: SinkColumns) -> None:
        """Spark calls this once, before the tasks start. Raises SinkError, Unavailable, Refused."""
        warn_of_unknown_settings(options)
        self.options = options
        self.columns = columns
        self.batch = options.idempotent_write or MicroBatch(uuid.uuid4().hex, 0)
        self.task_claim = _task_claim_for(options)
        if options.idempotent_write is not None:
            finish_earlier_batch(
                task_cluster(options.connection), self.batch, checkpoint_name(options.checkpoint)
            )

    def write(self, iterator: Iterator[Any]) -> WriteResult:
        return _write_task(self.options, self.columns, lambda: self.batch, self.task_claim, iterator)

    @without_traceback()
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        raise_wrong_row(messages)
        if self.options.idempotent_write is None:
            self._commit_once(prepared_transactions(messages))
            return
        with self._decision_log() as decision_log:
            fails_on_loss = self.options.fail_on_data_loss
            prepared = prepared_transactions(messages)
            commit_batch(decision_log, self.batch, prepared, fails_on_loss=fails_on_loss, skips_older=True)

    @without_traceback()
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Abort the transactions that no decision includes."""
        if self.options.idempotent_write is None:
            # Decide that nothing is written, so that a late attempt writes nothing.
            self._commit_once([])
            return
        with self._decision_log() as decision_log:
            abort_batch(decision_log, self.batch, prepared_transactions(messages))

    def _commit_once(self, prepared: Sequence[PreparedTransaction]) -> None:
        if self.options.contract is not Contract.EXACTLY_ONCE:
            return
        with self._decision_log() as decision_log:
            commit_batch(decision_log, self.batch, prepared)
            decision_log.forget()

    def _decision_log(self) -> DecisionLog:
        cluster = task_cluster(self.options.connection)
        return DecisionLog(cluster, self.batch.query, is_new=self.options.idempotent_write is None)


class StreamWriter(DataSourceStreamArrowWriter):  # type: ignore[misc, unused-ignore]
    def __init__(self, options: SinkOptions, columns: SinkColumns) -> None:
        """Spark calls this once for the tasks of each batch, and again for its commit. Raises Unavailable, Refused."""
        self.options = options
        self.columns = columns
        self.task_claim = _task_claim_for(options)

    def write(self, iterator: Iterator[Any]) -> WriteResult:
        return _write_task(self.options, self.columns, current_batch, self.task_claim, iterator)

    @without_traceback()
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        raise_wrong_row(messages)
        batch = batch_of_messages(messages, batchId)
        if self.options.contract is not Contract.EXACTLY_ONCE or batch is None:
            return
        cluster, checkpoint = task_cluster(self.options.connection), checkpoint_name(self.options.checkpoint)
        if batch.number == 0 and checkpoint is not None:
            take_over_checkpoint(cluster, checkpoint, batch.query)
        with DecisionLog(cluster, batch.query) as decision_log:
            fails_on_loss = self.options.fail_on_data_loss
            commit_batch(decision_log, batch, prepared_transactions(messages), fails_on_loss=fails_on_loss)

    @without_traceback()
    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        batch = batch_of_messages(messages, batchId)
        if self.options.contract is not Contract.EXACTLY_ONCE or batch is None:
            return
        with DecisionLog(task_cluster(self.options.connection), batch.query) as decision_log:
            abort_batch(decision_log, batch, prepared_transactions(messages))


def checkpoint_name(location: str | None) -> str | None:
    """Return a name for the checkpoint folder. It includes the host if the folder is on a local disk."""
    if location is None:
        return None
    parts = urlsplit(location)
    is_local = parts.scheme in ("", "file")
    return f"{socket.gethostname()}:{os.path.abspath(parts.path)}" if is_local else location.rstrip("/")


def _task_claim_for(options: SinkOptions) -> TaskClaim | None:
    """Return the claim for the tasks of this write, if it delivers at most once."""
    is_needed = options.contract is Contract.AT_MOST_ONCE
    return new_task_claim(task_cluster(options.connection)) if is_needed else None


@without_traceback()
def _write_task(
    options: SinkOptions,
    columns: SinkColumns,
    find_batch: Callable[[], MicroBatch],
    task_claim: TaskClaim | None,
    batches: Iterable[Any],
) -> WriteResult:
    rows = iter(batches)
    cluster = task_cluster(options.connection)
    try:
        if options.dry_run:
            return WriteResult(rows=write_dry_run(cluster, options, columns, rows).rows)
        if task_claim is not None:
            return _write_at_most_once(cluster, options, columns, task_claim, rows)
        if options.contract is not Contract.EXACTLY_ONCE:
            return WriteResult(rows=write_at_least_once(cluster, options, columns, rows).rows)
        batch = find_batch()
        transactional_id = ATTEMPT_IDS.take(batch)
        done = write_exactly_once(cluster, options, columns, batch, rows, transactional_id=transactional_id)
        return WriteResult(rows=done.rows, batch=batch, prepared=done.prepared)
    except WrongRow as flaw:
        drain_rows(rows)
        return WriteResult(rows=0, flaw=flaw)


def _write_at_most_once(
    cluster: Cluster,
    options: SinkOptions,
    columns: SinkColumns,
    task_claim: TaskClaim,
    batches: Iterable[Any],
) -> WriteResult:
    attempt = current_attempt()
    own = task_claim._replace(number=attempt.partition)
    done = write_at_most_once(cluster, options, columns, batches, lambda: claim_task(cluster, own, attempt))
    if done.skipped:
        _LOG.warning(
            "attempt %d at task %d does not write its %d rows: another attempt may have written them",
            *(attempt.attempt, attempt.partition, done.skipped),
        )
    return WriteResult(rows=done.rows, skipped=done.skipped)


def current_batch() -> MicroBatch:
    """Return the batch that this task belongs to. Raises SinkError outside of a streaming query."""
    context = TaskContext.get()
    query = context.getLocalProperty(_QUERY_ID_PROPERTY) if context is not None else None
    number = context.getLocalProperty(_BATCH_ID_PROPERTY) if context is not None else None
    if query is None or number is None:
        raise SinkError(
            "Spark does not say which batch of which query this is, so it cannot be written exactly once"
        )
    return MicroBatch(query, int(number))


def batch_of_messages(messages: Iterable[WriterCommitMessage | None], number: int) -> MicroBatch | None:
    """Return the batch of the tasks, or None if no task reports one. Raises SinkError if they report different ones."""
    found = {each.batch for each in messages if isinstance(each, WriteResult) and each.batch is not None}
    if not found:
        return None
    if len(found) > 1 or next(iter(found)).number != number:
        raise SinkError(
            f"tasks of {', '.join(map(str, sorted(found)))} cannot be committed as batch {number}"
        )
    return next(iter(found))


def raise_wrong_row(messages: Iterable[WriterCommitMessage | None]) -> None:
    """Raise the WrongRow that a task reports. Spark then calls `abort`."""
    for each in messages:
        if isinstance(each, WriteResult) and each.flaw is not None:
            raise each.flaw


def prepared_transactions(messages: Iterable[WriterCommitMessage | None]) -> list[PreparedTransaction]:
    found = (each.prepared for each in messages if isinstance(each, WriteResult))
    return [prepared for prepared in found if prepared is not None]
