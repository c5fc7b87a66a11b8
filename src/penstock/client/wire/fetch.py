"""Fetches raw record batches of a partition from its leader, checks them, and hides aborted transactions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

from penstock.client.errors import (
    UNKNOWN_TOPIC_ERRORS,
    CorruptRecords,
    OutOfRange,
    Refused,
    TopicChanged,
    Unavailable,
    parse_error_code,
    raise_for_error,
)
from penstock.client.retry import Deadline
from penstock.client.wire.cluster import Cluster
from penstock.client.wire.connection import Connection
from penstock.client.wire.metadata import IsolationLevel
from penstock.client.wire.offsets import EARLIEST, LATEST, list_offsets
from penstock.protocol import fetch
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.protocol.fetch import TOPIC_IDS_FROM, FetchPartition, PartitionData
from penstock.protocol.record_batch import (
    BATCH_HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    BatchHeader,
    checksum,
    iter_batches,
    parse_end_marker,
)

_MAGIC: Final = 2
_MAGIC_OFFSET: Final = 16
#: Producer id and first offset of a transaction that was aborted.
AbortedTransaction = tuple[int, int]


class BatchView(NamedTuple):
    header: BatchHeader
    data: memoryview


def whole_batches(data: memoryview) -> memoryview:
    """Returns the data without a partial batch at its end. Raises CorruptRecords if the end is not a batch."""
    end = 0
    for header, _ in iter_batches(data):
        end += header.size
    if end < len(data):
        _check_partial_batch(data[end:])
    return data[:end]


def _check_partial_batch(data: memoryview) -> None:
    """Raises CorruptRecords for another format, or a length that no batch has."""
    if len(data) > _MAGIC_OFFSET and data[_MAGIC_OFFSET] != _MAGIC:
        raise CorruptRecords(
            f"records of format {data[_MAGIC_OFFSET]} are not supported, only those of format {_MAGIC} "
            "(Apache Kafka 0.11 and newer)"
        )
    length = int.from_bytes(data[8:12], "big", signed=True) if len(data) >= LOG_OVERHEAD_BYTES else None
    if length is not None and length + LOG_OVERHEAD_BYTES < BATCH_HEADER_BYTES:
        raise CorruptRecords(f"{length} bytes are too short for a record batch")


def checked_batches(data: BytesLike, *, checks_crc: bool = True) -> Iterator[BatchView]:
    """Yields whole batches, including control batches. Raises CorruptRecords."""
    for header, batch in iter_batches(data):
        if header.magic != _MAGIC:
            _check_partial_batch(batch)
        if checks_crc and checksum(batch) != header.crc:
            raise CorruptRecords(f"the checksum of the batch at offset {header.base_offset} is wrong")
        yield BatchView(header, batch)


def visible_batches(
    found: Iterable[BatchView], aborted: Iterable[AbortedTransaction] | None
) -> Iterator[BatchView]:
    """Yields the batches that have records for an application: no control batches, and none of aborted transactions.

    `aborted` is the list of aborted transactions in the fetch response; None for READ_UNCOMMITTED. The batches of an
    aborted transaction are those from its first offset to its abort marker.
    """
    if aborted is None:
        yield from (view for view in found if not view.header.is_control)
        return
    to_come = sorted(aborted, key=lambda each: each[1], reverse=True)
    hidden: set[int] = set()
    for view in found:
        while to_come and to_come[-1][1] <= view.header.last_offset:
            hidden.add(to_come.pop()[0])
        if view.header.is_control:
            marker = parse_end_marker(view.data)
            if marker is not None and not marker.committed:
                hidden.discard(marker.producer_id)
        elif not (view.header.is_transactional and view.header.producer_id in hidden):
            yield view


FETCH: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchResult:
    """Whole batches, from the batch that contains `offset`, which may start before it."""

    offset: int
    data: memoryview
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    #: With READ_COMMITTED, the aborted transactions of these batches.
    aborted: tuple[AbortedTransaction, ...] = ()

    @property
    def next_offset(self) -> int:
        """The offset after the last batch."""
        following = self.offset
        for header, _ in iter_batches(self.data):
            following = header.last_offset + 1
        return following


class PartitionReader:
    """Fetches from the current leader. With a `topic_id`, never reads a later topic of the same name."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        topic_id: UUID | None,
        partition: int,
        *,
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
        bytes_max: int | None = None,
    ) -> None:
        self._cluster = cluster
        self.topic = topic
        self.topic_id = topic_id
        self.partition = partition
        self._isolation = isolation
        self._bytes_max = bytes_max or cluster.settings.fetch_bytes_max

    def __repr__(self) -> str:
        return f"<PartitionReader of {self.topic}[{self.partition}]>"

    def fetch(self, offset: int, *, wait_ms: int, bytes_min: int = 1) -> FetchResult:
        """Fetches batches; waits up to `wait_ms` for `bytes_min` bytes. The result may be empty.

        Raises OutOfRange, TopicChanged, Unavailable, Refused.
        """
        deadline = Deadline(self._cluster.settings.retry_deadline_ms + wait_ms)
        for _ in self._cluster.attempts(deadline):
            try:
                return self._fetch(offset, wait_ms, bytes_min, deadline)
            except Refused as error:
                if error.code in UNKNOWN_TOPIC_ERRORS and self.topic_id is not None:
                    self._refuse_deleted(self.topic_id)
                if error.code is not ErrorCode.offset_out_of_range:
                    raise
                self._refuse_outside(offset)
        raise Unavailable(
            f"offset {offset} of {self.topic}[{self.partition}] was not available within "
            f"{deadline.timeout_ms / 1000:g} s: its leader answers OFFSET_OUT_OF_RANGE for an offset in its log"
        )

    def _refuse_deleted(self, topic_id: UUID) -> None:
        """Raises TopicChanged, unless the topic exists and only the partition is missing."""
        found = self._cluster.topics([self.topic]).get(self.topic)
        if found is None or found.id != topic_id:
            raise TopicChanged(f"topic {self.topic} with the id {topic_id} was deleted") from None

    def _refuse_outside(self, offset: int) -> None:
        """Raises OutOfRange, unless the offset is in the log by now."""
        bounds = [
            list_offsets(self._cluster, {(self.topic, self.partition): which})[self.topic, self.partition]
            for which in (EARLIEST, LATEST)
        ]
        first, last = (each.offset if each is not None else 0 for each in bounds)
        if not first <= offset <= last:
            raise OutOfRange(self.topic, self.partition, offset, first, last)

    def _fetch(self, offset: int, wait_ms: int, bytes_min: int, deadline: Deadline) -> FetchResult:
        def call(connection: Connection) -> FetchResult:
            found = self._send_fetch(connection, offset, wait_ms, bytes_min)
            raise_for_error(
                parse_error_code(found.error), f"{self.topic}[{self.partition}] at offset {offset}"
            )
            return FetchResult(
                offset=offset,
                data=whole_batches(memoryview(found.records)),
                high_watermark=found.high_watermark,
                last_stable_offset=found.last_stable_offset,
                log_start_offset=found.log_start_offset,
                aborted=found.aborted or (),
            )

        return self._cluster.call_leader(
            self.topic, self.partition, call, topic_id=self.topic_id, deadline=deadline
        )

    def _send_fetch(self, connection: Connection, offset: int, wait_ms: int, bytes_min: int) -> PartitionData:
        info = self._cluster.leader(self.topic, self.partition, self.topic_id)
        topic_id = self.topic_id or self._cluster.topic(self.topic).id
        newest = fetch.CONSUMER_VERSION_MAX if topic_id is not None else TOPIC_IDS_FROM - 1
        version = connection.version(FETCH, newest, fetch.CONSUMER_VERSION_MIN)
        by_id = topic_id is not None and version >= TOPIC_IDS_FROM
        key = topic_id.bytes if topic_id is not None and by_id else self.topic.encode()
        requested = FetchPartition(self.partition, info.leader_epoch, offset, -1, -1, self._bytes_max)
        body = fetch.encode_consumer_fetch_request(
            version,
            key,
            requested,
            wait_ms=wait_ms,
            bytes_min=bytes_min,
            bytes_max=self._bytes_max,
            isolation=self._isolation,
        )
        timeout_ms = self._cluster.settings.request_timeout_ms + wait_ms
        response = connection.call_raw(FETCH, version, [body], timeout_ms=timeout_ms)
        return self._parse_fetch(connection, response, version, key)

    def _parse_fetch(
        self, connection: Connection, response: memoryview, version: int, key: bytes
    ) -> PartitionData:
        """Raises Unavailable for a response about another partition."""
        try:
            error, partitions = fetch.parse_consumer_fetch_response(response, version)
        except MalformedFrame as flaw:
            connection.close()
            raise Unavailable(f"{connection.peer}: {flaw}") from None
        raise_for_error(parse_error_code(error), f"{self.topic}[{self.partition}]")
        if len(partitions) != 1 or (partitions[0][0], partitions[0][1].partition) != (key, self.partition):
            connection.close()
            raise Unavailable(f"{connection.peer} sent a response about another topic than {self.topic}")
        return partitions[0][1]
