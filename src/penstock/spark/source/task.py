"""A task of a batch or streaming read: one range of one partition, from raw batches of its leader to Arrow columns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import InputPartition

from penstock.client.errors import OutOfRange, TopicChanged, Unavailable
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.fetch import FetchResult, PartitionReader, checked_batches, visible_batches
from penstock.client.wire.metadata import IsolationLevel
from penstock.client.wire.settings import ConnectionSettings
from penstock.spark.at_most_once.task_claims import TaskClaim, claim_task, current_attempt, record_skipped
from penstock.spark.offsets import OffsetRange
from penstock.spark.schema import Projection
from penstock.spark.sink.options import SinkOptions
from penstock.spark.source.discovery import LostRange, lost_outside_log, report_lost_ranges
from penstock.spark.source.options import SourceOptions
from penstock.spark.workers import until_reader_closes, without_traceback

if TYPE_CHECKING:
    import pyarrow as pa


#: The planned records are normally there. A new leader may need this time to make them visible.
_WAIT_MS: Final = 500
#: After this many empty fetches of offsets that exist, the rest of the range must have been compacted.
_EMPTY_FETCHES_MAX: Final = 2


class RangeReader:
    """Reads one range, and fetches ahead while Spark takes the decoded batches."""

    def __init__(self, cluster: Cluster, wanted: OffsetRange, options: SourceOptions) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._isolation = options.isolation
        self._fails = options.fail_on_data_loss
        self._reader = PartitionReader(
            cluster, wanted.topic, wanted.topic_id, wanted.partition, isolation=options.isolation
        )

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield decoded batches. Raises DataLoss, TopicChanged, CorruptRecords, Unavailable, Refused."""
        # A planning worker imports this module and decodes nothing, so it does not load the kernels.
        from penstock.spark.columns import decode

        wanted = self._wanted
        for fetched in self._fetch_ahead():
            aborted = fetched.aborted if self._isolation is IsolationLevel.READ_COMMITTED else None
            inside = takewhile(
                lambda view: view.header.base_offset < wanted.end, checked_batches(fetched.data)
            )
            yield from decode(
                visible_batches(inside, aborted),
                topic=wanted.topic,
                partition=wanted.partition,
                start_offset=fetched.offset,
                end_offset=wanted.end,
                columns=columns,
            )

    def _fetch_ahead(self) -> Iterator[FetchResult]:
        results = self._fetch_range()
        with ThreadPoolExecutor(1, thread_name_prefix="penstock-fetch") as executor:
            pending = executor.submit(next, results, None)
            while (fetched := pending.result()) is not None:
                pending = executor.submit(next, results, None)
                yield fetched

    def _fetch_range(self) -> Iterator[FetchResult]:
        position, empty = self._wanted.start, 0
        deadline = Deadline(self._cluster.settings.retry_deadline_ms)
        while position < self._wanted.end:
            fetched = self._fetch(position)
            if isinstance(fetched, int):
                position = fetched
            elif (next_position := fetched.next_offset) > position:
                yield fetched
                position, empty = next_position, 0
                deadline = Deadline(self._cluster.settings.retry_deadline_ms)
            else:
                empty += self._is_there(fetched)
                if empty >= _EMPTY_FETCHES_MAX:
                    return
                self._refuse_timeout(deadline, position, fetched)

    def _fetch(self, position: int) -> FetchResult | int:
        """Fetch at this offset. If the records are lost, and data loss is allowed, return the offset to continue at."""
        try:
            return self._reader.fetch(position, wait_ms=_WAIT_MS)
        except OutOfRange as error:
            loss = lost_outside_log(error, self._wanted.end)
        except TopicChanged as error:
            wanted = self._wanted
            loss = LostRange(
                topic=wanted.topic,
                partition=wanted.partition,
                start=position,
                end=wanted.end,
                why=str(error),
            )
        report_lost_ranges([loss], fails=self._fails)
        assert loss.end is not None
        return loss.end

    def _is_there(self, fetched: FetchResult) -> bool:
        """Return whether the leader has all records of the range."""
        is_committed = self._isolation is IsolationLevel.READ_COMMITTED
        return (fetched.last_stable_offset if is_committed else fetched.high_watermark) >= self._wanted.end

    def _refuse_timeout(self, deadline: Deadline, position: int, fetched: FetchResult) -> None:
        if deadline.is_over:
            raise Unavailable(
                f"{self._reader.topic}[{self._reader.partition}]: offsets {position} to {self._wanted.end - 1} "
                f"could not be read within {deadline.timeout_ms / 1000:g} s: "
                f"the high watermark of its leader is {fetched.high_watermark}"
            )


_THREAD_LOCAL: Final = threading.local()


def task_cluster(settings: ConnectionSettings) -> Cluster:
    """Return the connections of this worker process. They stay open for its next task."""
    known: Cluster | None = getattr(_THREAD_LOCAL, "cluster", None)
    if known is not None and known.settings == settings:
        return known
    if known is not None:
        known.close()
    _THREAD_LOCAL.cluster = made = Cluster(settings)
    return made


def read_range(
    options: SourceOptions, wanted: OffsetRange, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Read a range in a task. Raises DataLoss, TopicChanged, CorruptRecords, Unavailable, Refused."""
    return RangeReader(task_cluster(options.connection), wanted, options).read(columns)


_LOG: Final = logging.getLogger("penstock.spark")


class RangePartition(InputPartition):  # type: ignore[misc, unused-ignore]
    """The part of a read that one task does."""

    def __init__(self, wanted: OffsetRange, task_claim: TaskClaim | None = None) -> None:
        super().__init__(wanted)
        self.wanted = wanted
        self.task_claim = task_claim


def read_task(options: SourceOptions, projection: Projection, partition: Any) -> Iterator[Any]:
    """Yield Arrow batches. Spark may pass an empty partition of its own if the read has none; it yields nothing."""
    if not isinstance(partition, RangePartition):
        return
    with without_traceback():
        if partition.task_claim is not None and not _claim_range(
            options, partition.task_claim, partition.wanted
        ):
            return
        fit = projection.fit()
        yield from until_reader_closes(map(fit, read_range(options, partition.wanted, projection.columns)))


def _claim_range(options: SourceOptions, task_claim: TaskClaim, wanted: OffsetRange) -> bool:
    cluster, attempt = task_cluster(options.connection), current_attempt()
    if claim_task(cluster, task_claim, attempt):
        return True
    record_skipped(cluster, task_claim, wanted, attempt)
    return False


def warn_of_unknown_settings(options: SourceOptions | SinkOptions) -> None:
    if options.connection.unknown:
        names = ", ".join(f"kafka.{name}" for name in options.connection.unknown)
        _LOG.warning("unknown settings are ignored: %s", names)
