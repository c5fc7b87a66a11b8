"""A task: the rows of one attempt, from Arrow columns to the leaders of partitions."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.client.cluster import Cluster
from penstock.client.errors import ClientError
from penstock.client.prepared import Prepared
from penstock.client.producing import RawProducer, TwoPhaseKind
from penstock.client.settings import ConnectionSettings
from penstock.protocol.compression import Codec
from penstock.spark.concluding import attempts_prefix
from penstock.spark.decisions import MicroBatch, last_mark
from penstock.spark.sink_limits import Limits
from penstock.spark.sink_options import SinkOptions
from penstock.spark.sink_rows import SinkColumns, by_place, collected

if TYPE_CHECKING:
    import pyarrow as pa


#: Every client can read it, whatever is installed beside it.
_CODEC_OF_LARGE: Final = Codec.GZIP


class Attempt(NamedTuple):
    """What became of it. Nothing is prepared where there were no rows, or the batch was decided before."""

    rows: int
    prepared: Prepared | None = None
    #: Rows that this attempt does not write, because another one may have.
    skipped: int = 0


def write_nowhere(
    cluster: Cluster, options: SinkOptions, columns: SinkColumns, batches: Iterable[pa.RecordBatch]
) -> Attempt:
    """All of it but the sending. Raises WrongRow, Unavailable, Refused."""
    limits = Limits(cluster, afresh=True)
    sent = _send(limits, options, columns, collected(batches), lambda *_: None)
    return Attempt(sent)


def write_at_least_once(
    cluster: Cluster, options: SinkOptions, columns: SinkColumns, batches: Iterable[pa.RecordBatch]
) -> Attempt:
    """Returns when all is acknowledged. Raises WrongRow, Unavailable, Refused, TopicChanged."""
    rows = collected(batches)
    first = next(rows, None)
    if first is None:
        return Attempt(0)
    with RawProducer(cluster) as producer:
        producer.init()
        count = _send(Limits(cluster), options, columns, _before(first, rows), producer.send)
        producer.flush()
    return Attempt(count)


def write_at_most_once(
    cluster: Cluster,
    options: SinkOptions,
    columns: SinkColumns,
    batches: Iterable[pa.RecordBatch],
    may_write: Callable[[], bool],
) -> Attempt:
    """Nothing where another attempt at this task may have written before. Raises as `write_at_least_once` does."""
    rows = collected(batches)
    first = next(rows, None)
    if first is None:
        return Attempt(0)
    if not may_write():
        return Attempt(0, skipped=first.num_rows + sum(each.num_rows for each in rows))
    return write_at_least_once(cluster, options, columns, _before(first, rows))


def write_exactly_once(
    cluster: Cluster,
    options: SinkOptions,
    columns: SinkColumns,
    batch: MicroBatch,
    batches: Iterable[pa.RecordBatch],
    *,
    name: str,
) -> Attempt:
    """Leaves all in a transaction of that name, acknowledged, for the driver to end.

    Raises WrongRow, Unavailable, Refused, TopicChanged; then the transaction is aborted.
    """
    rows = collected(batches)
    first = next(rows, None)
    if first is None:
        return Attempt(0)
    with _begin(cluster, options, name) as producer:
        # The name is taken before this question: `concluding.sweep` tells why.
        mark = last_mark(cluster, batch.query, stable=False)
        if mark is not None and mark.number >= batch.number:
            skip(rows)
            return Attempt(0)
        try:
            count = _send(Limits(cluster), options, columns, _before(first, rows), producer.send)
            return Attempt(count, producer.prepare())
        except BaseException:
            with suppress(ClientError):
                producer.end(commit=False)
            raise


def skip(rows: Iterator[pa.RecordBatch]) -> None:
    """Spark takes a task for done when it has seen the end of its rows."""
    for _ in rows:
        pass


def _before(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _send(
    limits: Limits,
    options: SinkOptions,
    columns: SinkColumns,
    rows: Iterable[pa.RecordBatch],
    send: Callable[[str, int, bytearray], object],
) -> int:
    """How many rows. Raises WrongRow, and what `send` raises."""
    count = 0
    for each in rows:
        seed = random.getrandbits(31)
        for (topic, partition), records in by_place(each, columns, limits.partition_count, seed=seed):
            limits.check_keys(topic, records)
            for data in _encoded(limits, options, topic, records):
                send(topic, partition, data)
        count += each.num_rows
    return count


def _encoded(
    limits: Limits, options: SinkOptions, topic: str, records: pa.RecordBatch
) -> Iterator[bytearray]:
    """Batches that the topic takes. Raises RecordTooLarge."""
    from penstock.spark.columns import encode

    now_ms, at = int(time.time() * 1000), 0
    bytes_max = limits.bytes_max(topic, options.batch_bytes_max)
    for encoded in encode(records, timestamp_ms=now_ms, codec=options.codec, batch_bytes_max=bytes_max):
        data = encoded.data
        if encoded.count == 1 and not limits.takes(topic, len(data)):
            # It may have been compressed where it comes from.
            (smaller,) = encode(records.slice(at, 1), timestamp_ms=now_ms, codec=_CODEC_OF_LARGE)
            if not limits.takes(topic, len(smaller.data)):
                raise limits.too_large(topic, len(data))
            data = smaller.data
        yield data
        at += encoded.count


# Beginning transactions

#: For how long brokers that know no second phase keep a transaction open; asked once by each process.
_TIMEOUTS_MS: Final[dict[ConnectionSettings, int]] = {}


def _begin(cluster: Cluster, options: SinkOptions, name: str) -> RawProducer:
    timeout_ms = _TIMEOUTS_MS.get(cluster.settings) if options.two_phase else None
    producer = RawProducer(
        cluster,
        transactional_id=name,
        transaction_timeout_ms=timeout_ms or options.transaction_timeout_ms,
        two_phase=options.two_phase and timeout_ms is None,
    )
    producer.init()
    if producer.two_phase_kind is TwoPhaseKind.UNTIL_TIMEOUT:
        _TIMEOUTS_MS[cluster.settings] = producer.transaction_timeout_ms
    return producer


_QUERIES_MAX: Final = 1_000


class Names:
    """Transactional ids for the attempts of one worker process, each for one attempt at one batch.

    A process uses its ids again: those of a batch two batches later, when all of them have ended. It remembers this of
    the queries that it worked for lately.
    """

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        """With another token, which keeps apart what is forgotten from what is to come."""
        self._owner = os.getpid()
        self._token = uuid.uuid4().hex
        self._used: dict[str, tuple[int, int]] = {}

    def take(self, batch: MicroBatch) -> str:
        if self._owner != os.getpid() or len(self._used) > _QUERIES_MAX:
            self._renew()
        newest, count = self._used.get(batch.query, (-1, 0))
        if batch.number < newest:
            return f"{attempts_prefix(batch)}{uuid.uuid4().hex}"
        count = count + 1 if batch.number == newest else 0
        self._used[batch.query] = (batch.number, count)
        return f"{attempts_prefix(batch)}{self._token}-{count}"


NAMES: Final = Names()
