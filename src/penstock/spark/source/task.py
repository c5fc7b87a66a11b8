"""A task: one range of one partition, from raw batches of its leader to Arrow columns."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from penstock.client.batches import batches, visible
from penstock.client.cluster import Cluster
from penstock.client.errors import OutOfRange, TopicChanged, Unavailable
from penstock.client.fetching import Fetched, PartitionReader
from penstock.client.metadata import Isolation
from penstock.client.retrying import Deadline
from penstock.client.settings import ConnectionSettings
from penstock.spark.losses import Loss, outside, report
from penstock.spark.offsets import OffsetRange
from penstock.spark.options import SourceOptions

if TYPE_CHECKING:
    import pyarrow as pa

#: What is asked for is there as a rule; this is for leaders that have just begun to lead.
_WAIT_MS: Final = 500
#: An answer without records is believed the second time: the rest of the range was compacted away.
_EMPTY_ANSWERS_MAX: Final = 2


class RangeReader:
    """Fetches ahead: the next answer is on its way while the last one is decoded and handed to Spark."""

    def __init__(self, cluster: Cluster, wanted: OffsetRange, options: SourceOptions) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._isolation = options.isolation
        self._fails = options.fail_on_data_loss
        self._reader = PartitionReader(
            cluster, wanted.topic, wanted.topic_id, wanted.partition, isolation=options.isolation
        )

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Raises DataLoss, TopicChanged, CorruptRecords, Unavailable, Refused."""
        from penstock.spark.columns import decode

        wanted = self._wanted
        for fetched in self._ahead():
            aborted = fetched.aborted if self._isolation is Isolation.READ_COMMITTED else None
            inside = takewhile(lambda view: view.header.base_offset < wanted.end, batches(fetched.data))
            yield from decode(
                visible(inside, aborted),
                topic=wanted.topic,
                partition=wanted.partition,
                start_offset=fetched.offset,
                end_offset=wanted.end,
                columns=columns,
            )

    def _ahead(self) -> Iterator[Fetched]:
        answers = self._answers()
        with ThreadPoolExecutor(1, thread_name_prefix="penstock-fetch") as ahead:
            coming = ahead.submit(next, answers, None)
            while (fetched := coming.result()) is not None:
                coming = ahead.submit(next, answers, None)
                yield fetched

    def _answers(self) -> Iterator[Fetched]:
        """All that lies in the range, as it comes."""
        position, empty = self._wanted.start, 0
        deadline = Deadline(self._cluster.settings.retry_deadline_ms)
        while position < self._wanted.end:
            fetched = self._fetch(position)
            if isinstance(fetched, int):
                position = fetched
            elif (following := fetched.next_offset) > position:
                yield fetched
                position, empty = following, 0
                deadline = Deadline(self._cluster.settings.retry_deadline_ms)
            else:
                empty += self._is_there(fetched)
                if empty >= _EMPTY_ANSWERS_MAX:
                    return
                self._refuse_waiting(deadline, position, fetched)

    def _fetch(self, position: int) -> Fetched | int:
        """What is there, or where to go on when that is gone and nobody minds."""
        try:
            return self._reader.fetch(position, wait_ms=_WAIT_MS)
        except OutOfRange as error:
            loss = outside(error, self._wanted.end)
        except TopicChanged as error:
            loss = self._loss(position, str(error))
        report([loss], fails=self._fails)
        assert loss.end is not None
        return loss.end

    def _is_there(self, fetched: Fetched) -> bool:
        """Whether the leader knows of all that was planned."""
        is_committed = self._isolation is Isolation.READ_COMMITTED
        return (fetched.last_stable_offset if is_committed else fetched.high_watermark) >= self._wanted.end

    def _refuse_waiting(self, deadline: Deadline, position: int, fetched: Fetched) -> None:
        if deadline.is_over:
            raise Unavailable(
                f"offsets {position} to {self._wanted.end - 1} of {self._reader.topic}[{self._reader.partition}] "
                f"could not be had within {deadline.timeout_ms / 1000:g} s: "
                f"its leader knows of {fetched.high_watermark} offsets"
            )

    def _loss(self, position: int, why: str) -> Loss:
        wanted = self._wanted
        return Loss(topic=wanted.topic, partition=wanted.partition, start=position, end=wanted.end, why=why)


_LOCAL: Final = threading.local()


def task_cluster(settings: ConnectionSettings) -> Cluster:
    """The connections of this worker process, which outlive its tasks: the next one finds them open."""
    known: Cluster | None = getattr(_LOCAL, "cluster", None)
    if known is not None and known.settings == settings:
        return known
    if known is not None:
        known.close()
    _LOCAL.cluster = made = Cluster(settings)
    return made


def read_range(
    options: SourceOptions, wanted: OffsetRange, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Raises DataLoss, TopicChanged, CorruptRecords, Unavailable, Refused."""
    return RangeReader(task_cluster(options.connection), wanted, options).read(columns)
