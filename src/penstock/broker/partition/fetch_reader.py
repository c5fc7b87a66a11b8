"""Reads partitions for a Fetch: a consumer reads up to the high watermark, a follower up to the end of the log.

With `replica.selector.class` a leader sends a consumer to a follower in its rack, which serves it up to the follower's
own high watermark (KIP-392).

A node that reads for itself, and no replica, uses the id of Kafka's debugging consumer. Such a reader gets only records
whose checksum the leader has verified, in a thread. It gets CORRUPT_MESSAGE only if the records are lost for good, and
KAFKA_STORAGE_ERROR while another read or another leader may still find them.

A valid fetch of a follower shows which records the follower has, and counts towards the high watermark. A fetch that
has diverged, that is out of range, or that names another leader epoch does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.network.topic_access import known_decisions, may_use_topic, topic_refused
from penstock.broker.partition.client_view import LeaderHints, find_topic
from penstock.broker.partition.fetch_sessions import CONSUMER_REPLICA_ID, PartitionKey, RequestedPartition
from penstock.log.validation import read_intact
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.fetch import (
    DEBUGGING_REPLICA_ID,
    RACKS_FROM,
    TOPIC_IDS_FROM,
    FetchRequest,
    PartitionData,
)

if TYPE_CHECKING:
    from penstock.broker.network.requests import RequestContext
    from penstock.broker.partition.partition import Partition
    from penstock.log.indexes import AbortedTransaction
    from penstock.log.log import Log, LogSlice
    from penstock.log.segment import LogOffsetMetadata

_READ_COMMITTED: Final = 1
_OK: Final = ErrorCode.none.value

#: A partition, an offset in it, and the leader epoch: records read in an earlier epoch may have been truncated since.
ReadKey = tuple[PartitionKey, int, int]


class NotCached(Exception):
    """The bytes to read next are not in the page cache; reading them would block the event loop."""

    def __init__(self, place: ReadKey, read: Callable[[], FetchDataInfo]) -> None:
        super().__init__(place)
        self.key = place
        self.read = read


class FetchDataInfo(NamedTuple):
    """A slice of the log, and for read_committed consumers the aborted transactions in it."""

    records: LogSlice
    aborted: tuple[AbortedTransaction, ...]


class LogReadResult(NamedTuple):
    data: PartitionData
    next_offset: int = -1  # after the records; -1 if there are none
    upto: int = -1  # end of what the reader may read; -1 if unknown

    @property
    def is_settled(self) -> bool:
        """Whether there is no error, no divergence and no preferred replica.

        Such a result stays valid until the partition changes.
        """
        data = self.data
        return data.error == _OK and data.diverging_epoch is None and data.preferred_read_replica < 0

    @property
    def is_final(self) -> bool:
        """Whether to reply at once: the result is not settled, or one read could not return everything."""
        return not self.is_settled or (self.next_offset < self.upto and len(self.data.records) > 0)


class FetchReader:
    """The reads of one request."""

    def __init__(self, ctx: RequestContext, request: FetchRequest, heard_ms: int) -> None:
        self._ctx = ctx
        self._has_authorizer = ctx.services.authorizer is not None
        self._services = ctx.services
        self._replica_id, self._replica_epoch = request.replica_id, request.replica_epoch
        self._heard_ms = heard_ms
        self.is_read_committed = request.isolation_level == _READ_COMMITTED
        self._by_id = ctx.version >= TOPIC_IDS_FROM
        #: Whether a follower may serve the request, and the rack that the consumer wants to read in (KIP-392).
        self._reads_followers = (
            ctx.services.selects_replicas
            and request.replica_id == CONSUMER_REPLICA_ID
            and ctx.version >= RACKS_FROM
        )
        self._rack = request.rack.decode(errors="replace") if self._reads_followers else ""
        partitions = ctx.services.partitions
        self._partitions_of = partitions.by_raw_id if self._by_id else partitions.by_raw_name
        self._listener = ctx.listener
        #: Bytes read that count towards leader.replication.throttled.rate.
        self.throttled_bytes = 0
        self.from_disk: dict[ReadKey, FetchDataInfo | ApiError] = {}
        self.hints: LeaderHints | None = None

    @property
    def is_replica(self) -> bool:
        return self._replica_id > CONSUMER_REPLICA_ID

    def read(
        self, key: PartitionKey, wanted: RequestedPartition, bytes_left: int, *, is_first: bool
    ) -> LogReadResult:
        """Read one partition. Raises NotCached. An error of the partition is part of the result."""
        try:
            return self._read(key, wanted, bytes_left, is_first)
        except ApiError as error:
            return LogReadResult(self._error(key, error))

    def find(self, key: PartitionKey) -> Partition:
        """Raises ApiError."""
        found = self._partitions_of.get(key[0])
        partition = None if found is None else found.get(key[1])
        if partition is None:
            topic = find_topic(self._services.image, key[0], by_id=self._by_id)
            raise self._services.partitions.missing_partition_error(topic, key[1], by_id=self._by_id)
        return partition

    def _check_access(self, key: PartitionKey) -> None:
        """Raises ApiError if the consumer may not read the topic, or a follower is no node."""
        if self._replica_id > CONSUMER_REPLICA_ID:
            allowed = self._ctx.demand(Operation.CLUSTER_ACTION, ResourceType.CLUSTER)
        else:
            decisions = known_decisions(self._ctx)
            if decisions is not None and key[0] in decisions.readable[self._by_id]:
                return
            allowed = may_use_topic(self._ctx, Operation.READ, key[0], self._partitions_of.get(key[0]))
        if not allowed:
            raise topic_refused()

    def _read(
        self, key: PartitionKey, wanted: RequestedPartition, bytes_left: int, is_first: bool
    ) -> LogReadResult:
        if self._has_authorizer:
            self._check_access(key)
        partition = self.find(key)
        if wanted.partition is not partition:
            wanted.attach(partition)
        if not partition.is_leader or -1 < wanted.leader_epoch != partition.leader_epoch:
            if self._reads_followers:
                partition.check_readable(wanted.leader_epoch)
            else:
                partition.check_leader(wanted.leader_epoch)
        if self._replica_id > CONSUMER_REPLICA_ID:
            self._check_replica(partition, wanted)
        log = partition.log
        if wanted.last_fetched_epoch >= 0 and (diverging := _divergence(partition, wanted)) is not None:
            high, stable = partition.high.offset, partition.last_stable_offset
            return LogReadResult(
                PartitionData(key[1], _OK, high, stable, log.start_offset, diverging_epoch=diverging)
            )
        if not log.start_offset <= wanted.offset <= log.end_offset:
            raise ApiError(ErrorCode.offset_out_of_range)
        if self._replica_id > CONSUMER_REPLICA_ID:
            self._count(partition, wanted)
        elif self._rack and partition.leading is not None:
            preferred = self._preferred_replica(partition, wanted.offset)
            if preferred > CONSUMER_REPLICA_ID:
                high, stable = partition.high.offset, partition.last_stable_offset
                aborted = () if self.is_read_committed else None
                data = PartitionData(key[1], _OK, high, stable, log.start_offset, aborted=aborted)
                return LogReadResult(data._replace(preferred_read_replica=preferred))
        return self._read_upto(key, wanted, partition, bytes_left, is_first)

    def _read_upto(
        self,
        key: PartitionKey,
        wanted: RequestedPartition,
        partition: Partition,
        bytes_left: int,
        is_first: bool,
    ) -> LogReadResult:
        high = partition.high.offset
        if self.is_read_committed:
            upto = partition.last_stable
            stable = upto.offset
        else:
            upto = partition.high
            stable = partition.last_stable_offset
        if self._replica_id > CONSUMER_REPLICA_ID:
            upto = partition.log.end
            if partition.is_leader_throttled and self._is_behind(partition):
                return self._read_throttled(key, wanted, partition, bytes_left, is_first, stable)
        records: BytesLike = b""
        next_offset = -1
        aborted: tuple[AbortedTransaction, ...] | None = () if self.is_read_committed else None
        if wanted.offset < upto.offset and (bytes_left > 0 or is_first):
            size = min(wanted.max_bytes, bytes_left)
            place = (key, wanted.offset, partition.leader_epoch)
            if self.is_read_committed and partition.log.has_aborted:
                (records, next_offset), aborted = self._committed(place, partition, size, upto, is_first)
            else:
                records, next_offset = self._records(place, partition, size, upto, is_first)
        data = PartitionData(key[1], _OK, high, stable, partition.log.start_offset, records, aborted)
        return LogReadResult(data, next_offset, upto.offset)

    def _records(
        self, place: ReadKey, partition: Partition, size: int, upto: LogOffsetMetadata, is_first: bool
    ) -> LogSlice:
        if self.from_disk and (from_disk := self.from_disk.get(place)) is not None:
            if isinstance(from_disk, ApiError):
                raise from_disk
            return from_disk.records
        if self._replica_id == DEBUGGING_REPLICA_ID:
            raise self._not_cached(place, partition, size, upto, is_first)
        try:
            return partition.log.read(place[1], size, upto, at_least_one=is_first, nowait=True)
        except BlockingIOError:
            raise self._not_cached(place, partition, size, upto, is_first) from None

    def _committed(
        self, place: ReadKey, partition: Partition, size: int, upto: LogOffsetMetadata, is_first: bool
    ) -> FetchDataInfo:
        records = self._records(place, partition, size, upto, is_first)
        if not records.data:
            return FetchDataInfo(records, ())
        if isinstance(from_disk := self.from_disk.get(place), FetchDataInfo):
            return from_disk
        try:
            return FetchDataInfo(
                records, partition.log.aborted_in(place[1], records.next_offset, nowait=True)
            )
        except BlockingIOError:
            raise self._not_cached(place, partition, size, upto, is_first) from None

    def _not_cached(
        self, place: ReadKey, partition: Partition, size: int, upto: LogOffsetMetadata, is_first: bool
    ) -> NotCached:
        read: Callable[[], LogSlice] = partial(
            partition.log.read, place[1], size, upto, at_least_one=is_first
        )
        if self._replica_id == DEBUGGING_REPLICA_ID:
            read = partial(read_intact, partition.log, place[1], size, upto)
        return NotCached(
            place, partial(_read_from_disk, partition.log, place[1], read, self.is_read_committed)
        )

    # -- racks ---------------------------------------------------------------------------------------

    def _preferred_replica(self, partition: Partition, offset: int) -> int:
        """Return the in-sync follower in the consumer's rack with the most records, if it has this offset; else -1.

        A consumer in the leader's own rack stays with the leader.
        """
        brokers, leading = self._services.image.brokers, partition.leading
        assert leading is not None
        here = brokers.get(self._services.node_id)
        if here is not None and here.rack == self._rack:
            return CONSUMER_REPLICA_ID
        best, best_offset = CONSUMER_REPLICA_ID, -1
        for waiter in tuple(partition.followers):
            heard = waiter.fetch_state(partition.leader_epoch)
            if heard is None or heard.replica not in leading.rules.isr:
                continue
            broker = brokers.get(heard.replica)
            if broker is None or broker.rack != self._rack or not broker.is_active:
                continue
            is_served = self._listener in broker.endpoints
            if is_served and heard.start_offset <= offset <= heard.offset and heard.offset > best_offset:
                best, best_offset = heard.replica, heard.offset
        return best

    # -- followers -----------------------------------------------------------------------------------

    def _is_behind(self, partition: Partition) -> bool:
        return partition.leading is not None and self._replica_id not in partition.leading.rules.isr

    def _read_throttled(
        self,
        key: PartitionKey,
        wanted: RequestedPartition,
        partition: Partition,
        bytes_left: int,
        is_first: bool,
        stable: int,
    ) -> LogReadResult:
        """Read for a follower that is not in sync, within what leader.replication.throttled.rate leaves."""
        throttle, upto = self._services.leader_throttle, partition.log.end
        records: BytesLike = b""
        next_offset = -1
        left = throttle.left()[0] - self.throttled_bytes if throttle.is_limited else bytes_left
        if wanted.offset < upto.offset and left > 0 and (bytes_left > 0 or is_first):
            place = (key, wanted.offset, partition.leader_epoch)
            size = min(wanted.max_bytes, bytes_left, left)
            records, next_offset = self._records(place, partition, size, upto, is_first)
            self.throttled_bytes += len(records)
        high, start = partition.high.offset, partition.log.start_offset
        return LogReadResult(
            PartitionData(key[1], _OK, high, stable, start, records), next_offset, upto.offset
        )

    def _check_replica(self, partition: Partition, wanted: RequestedPartition) -> None:
        """Raises ApiError if the broker is no replica of this partition, or sent this fetch before its restart."""
        if self._replica_id not in partition.replicas:
            # The follower knows an assignment that this node has not received yet, or the reverse.
            knows_epoch = wanted.leader_epoch >= 0
            raise ApiError(
                ErrorCode.unknown_leader_epoch if knows_epoch else ErrorCode.not_leader_or_follower
            )
        broker = self._services.image.brokers.get(self._replica_id)
        if broker is not None and -1 < self._replica_epoch < broker.epoch:
            raise ApiError(ErrorCode.not_leader_or_follower, "the broker has registered again since")

    def _count(self, partition: Partition, wanted: RequestedPartition) -> None:
        if not wanted.is_uncounted or partition.leading is None:
            return
        wanted.is_uncounted = False
        if wanted.leader_epoch != partition.leader_epoch:
            return
        wanted.counted_epoch = partition.leader_epoch
        if partition.leading.fetched(self._replica_id, wanted.offset, self._replica_epoch, self._heard_ms):
            self._services.isr.wake(partition)

    # -- errors --------------------------------------------------------------------------------------

    def _error(self, key: PartitionKey, error: ApiError) -> PartitionData:
        self._services.metrics.count_error("fetch", error.code.name)
        found = (self._partitions_of.get(key[0]) or {}).get(key[1])
        if found is not None:
            exact = self._services.partitions.handle_read_error(found, error)
            if self._replica_id == DEBUGGING_REPLICA_ID:
                error = exact
        if found is None or error.code is not ErrorCode.offset_out_of_range:
            return PartitionData(key[1], error.code.value, current_leader=self._leader(key, error.code))
        high, stable = found.high.offset, found.last_stable_offset
        return PartitionData(key[1], error.code.value, high, stable, found.log.start_offset)

    def _leader(self, key: PartitionKey, error: ErrorCode) -> tuple[int, int] | None:
        if self.hints is None:
            self.hints = LeaderHints(
                self._services.metadata, self._services.partitions, self._listener, by_id=self._by_id
            )
        return self.hints.leader(*key, error)


def _read_from_disk(
    log: Log, offset: int, read: Callable[[], LogSlice], read_committed: bool
) -> FetchDataInfo:
    """Blocking. Safe in any thread, because the aborted transactions below a last stable offset never change."""
    records = read()
    if not (read_committed and records.data):
        return FetchDataInfo(records, ())
    return FetchDataInfo(records, log.aborted_in(offset, records.next_offset))


def _divergence(partition: Partition, wanted: RequestedPartition) -> tuple[int, int] | None:
    """Return the epoch and end offset where the reader's log diverges from ours, if it does (KIP-595, KIP-320)."""
    epoch, end_offset = partition.end_of_epoch(wanted.last_fetched_epoch)
    if epoch < 0:
        raise ApiError(ErrorCode.offset_out_of_range)
    if epoch < wanted.last_fetched_epoch or end_offset < wanted.offset:
        return epoch, end_offset
    return None
