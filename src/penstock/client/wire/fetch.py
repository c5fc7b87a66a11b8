"""Reading one partition from whoever leads it, batch by batch, untouched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from penstock.client.batches import Aborted, whole
from penstock.client.cluster import Cluster
from penstock.client.connection import Connection
from penstock.client.errors import OutOfRange, Refused, TopicChanged, Unavailable, check, code_of
from penstock.client.metadata import Isolation
from penstock.client.positions import EARLIEST, LATEST, list_offsets
from penstock.client.remedies import UNKNOWN_TOPIC
from penstock.client.retrying import Deadline
from penstock.protocol import client_fetch
from penstock.protocol.errors import ErrorCode, MalformedFrame
from penstock.protocol.fetch import TOPIC_IDS_FROM, FetchPartition, PartitionData
from penstock.protocol.records import iter_batches

FETCH: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Whole batches from the one that holds `offset` on, which may begin before it."""

    offset: int
    data: memoryview
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    #: Transactions among these batches that were aborted, when only committed ones are to be read.
    aborted: tuple[Aborted, ...] = ()

    @property
    def next_offset(self) -> int:
        """Where to go on."""
        following = self.offset
        for header, _ in iter_batches(self.data):
            following = header.last_offset + 1
        return following


class PartitionReader:
    """Follows the leader. With a `topic_id` it reads that topic and no later one of the same name."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        topic_id: UUID | None,
        partition: int,
        *,
        isolation: Isolation = Isolation.READ_UNCOMMITTED,
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

    def fetch(self, offset: int, *, wait_ms: int, bytes_min: int = 1) -> Fetched:
        """What is there, after waiting up to `wait_ms` for `bytes_min` bytes; nothing at the end of the log.

        Raises OutOfRange, TopicChanged, Unavailable, Refused.
        """
        deadline = Deadline(self._cluster.settings.retry_deadline_ms + wait_ms)
        for _ in self._cluster.attempts(deadline):
            try:
                return self._fetch(offset, wait_ms, bytes_min, deadline)
            except Refused as error:
                if error.code in UNKNOWN_TOPIC and self.topic_id is not None:
                    self._refuse_deleted(self.topic_id)
                if error.code is not ErrorCode.offset_out_of_range:
                    raise
                self._refuse_outside(offset)
        raise Unavailable(
            f"offset {offset} of {self.topic}[{self.partition}] could not be had within "
            f"{deadline.timeout_ms / 1000:g} s: its leader does not have what it says that it has"
        )

    def _refuse_deleted(self, topic_id: UUID) -> None:
        """Raises TopicChanged, unless the topic is there and only has no such partition."""
        found = self._cluster.topics([self.topic]).get(self.topic)
        if found is None or found.id != topic_id:
            raise TopicChanged(f"topic {self.topic} with the id {topic_id} was deleted") from None

    def _refuse_outside(self, offset: int) -> None:
        """Raises OutOfRange, unless the log has moved meanwhile so that the offset is in it after all."""
        bounds = [
            list_offsets(self._cluster, {(self.topic, self.partition): which})[self.topic, self.partition]
            for which in (EARLIEST, LATEST)
        ]
        first, last = (each.offset if each is not None else 0 for each in bounds)
        if not first <= offset <= last:
            raise OutOfRange(self.topic, self.partition, offset, first, last)

    def _fetch(self, offset: int, wait_ms: int, bytes_min: int, deadline: Deadline) -> Fetched:
        def ask(connection: Connection) -> Fetched:
            found = self._ask(connection, offset, wait_ms, bytes_min)
            check(code_of(found.error), f"{self.topic}[{self.partition}] at offset {offset}")
            return Fetched(
                offset=offset,
                data=whole(memoryview(found.records)),
                high_watermark=found.high_watermark,
                last_stable_offset=found.last_stable_offset,
                log_start_offset=found.log_start_offset,
                aborted=found.aborted or (),
            )

        return self._cluster.call_leader(
            self.topic, self.partition, ask, topic_id=self.topic_id, deadline=deadline
        )

    def _ask(self, connection: Connection, offset: int, wait_ms: int, bytes_min: int) -> PartitionData:
        info = self._cluster.leader(self.topic, self.partition, self.topic_id)
        topic_id = self.topic_id or self._cluster.topic(self.topic).id
        newest = client_fetch.NEWEST if topic_id is not None else TOPIC_IDS_FROM - 1
        version = connection.version(FETCH, newest, client_fetch.OLDEST)
        by_id = topic_id is not None and version >= TOPIC_IDS_FROM
        key = topic_id.bytes if topic_id is not None and by_id else self.topic.encode()
        asked = FetchPartition(self.partition, info.leader_epoch, offset, -1, -1, self._bytes_max)
        body = client_fetch.encode_client_fetch(
            version,
            key,
            asked,
            wait_ms=wait_ms,
            bytes_min=bytes_min,
            bytes_max=self._bytes_max,
            isolation=self._isolation,
        )
        timeout_ms = self._cluster.settings.request_timeout_ms + wait_ms
        answer = connection.call_raw(FETCH, version, [body], timeout_ms=timeout_ms)
        return self._found(connection, answer, version, key)

    def _found(self, connection: Connection, answer: memoryview, version: int, key: bytes) -> PartitionData:
        """Raises Unavailable for an answer to something else."""
        try:
            error, partitions = client_fetch.parse_client_fetch(answer, version)
        except MalformedFrame as flaw:
            connection.close()
            raise Unavailable(f"{connection.peer}: {flaw}") from None
        check(code_of(error), f"{self.topic}[{self.partition}]")
        if len(partitions) != 1 or (partitions[0][0], partitions[0][1].partition) != (key, self.partition):
            connection.close()
            raise Unavailable(f"{connection.peer} answered about something else than {self.topic}")
        return partitions[0][1]
