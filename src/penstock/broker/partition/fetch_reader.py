"""Reading one partition for a Fetch: by a consumer, below the high watermark, or by a follower, to the end of the log.

With `replica.selector.class` a leader sends a consumer to a follower in its rack, which serves it up to its own high
watermark (KIP-392).

A follower's good fetch says what it has, and counts towards the high watermark; one from another history, from
outside the log or under another leader epoch counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.fetch_sessions import NO_REPLICA, Key, Wanted
from penstock.broker.topology import LeaderHints, absence, topic_of
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.fetch import RACKS_FROM, TOPIC_IDS_FROM, FetchRequest, PartitionData

if TYPE_CHECKING:
    from penstock.broker.context import RequestContext
    from penstock.broker.partition import Partition
    from penstock.log.aborted import Aborted
    from penstock.log.log import Log, Slice
    from penstock.log.positions import LogPosition

_READ_COMMITTED: Final = 1
_OK: Final = ErrorCode.none.value
#: What a file that is missing or damaged looks like.
_UNREADABLE: Final = frozenset({ErrorCode.kafka_storage_error, ErrorCode.corrupt_message})

#: A partition, an offset in it, and the leader epoch: what was read in an earlier one may have been cut away since.
Place = tuple[Key, int, int]


class NotCached(Exception):
    """The bytes wanted next are not in the page cache; reading them would block the loop."""

    def __init__(self, place: Place, read: Callable[[], Stretch]) -> None:
        super().__init__(place)
        self.place = place
        self.read = read


class Stretch(NamedTuple):
    """A piece of the log, and for readers of what is committed the transactions in it that were aborted."""

    records: Slice
    aborted: tuple[Aborted, ...]


class Read(NamedTuple):
    data: PartitionData
    next_offset: int = -1  # after the records; -1 where there are none
    upto: int = -1  # how far there is something to read; -1 where that is not known

    @property
    def is_settled(self) -> bool:
        """No error, one history and the right replica: what is told now holds until there is news."""
        data = self.data
        return data.error == _OK and data.diverging_epoch is None and data.preferred_read_replica < 0

    @property
    def is_final(self) -> bool:
        """Not settled, or more than could be read in one piece: waiting would change nothing."""
        return not self.is_settled or (self.next_offset < self.upto and len(self.data.records) > 0)


class Reads:
    """The reads of one request."""

    def __init__(self, ctx: RequestContext, request: FetchRequest, heard_ms: int) -> None:
        self._node = ctx.node
        self._replica_id, self._replica_epoch = request.replica_id, request.replica_epoch
        self._heard_ms = heard_ms
        self.is_read_committed = request.isolation_level == _READ_COMMITTED
        self._by_id = ctx.version >= TOPIC_IDS_FROM
        #: Whether a follower may answer, and the rack that the consumer wants to read in (KIP-392).
        self._reads_followers = (
            ctx.node.selects_replicas and request.replica_id == NO_REPLICA and ctx.version >= RACKS_FROM
        )
        self._rack = request.rack.decode(errors="replace") if self._reads_followers else ""
        partitions = ctx.node.partitions
        self._partitions_of = partitions.by_raw_id if self._by_id else partitions.by_raw_name
        self._listener = ctx.listener
        #: Of what was read, what counts towards leader.replication.throttled.rate.
        self.throttled_bytes = 0
        self.from_disk: dict[Place, Stretch | ApiError] = {}
        self.hints: LeaderHints | None = None

    @property
    def is_replica(self) -> bool:
        return self._replica_id > NO_REPLICA

    def read(self, key: Key, wanted: Wanted, bytes_left: int, *, is_first: bool) -> Read:
        """Raises NotCached. An error of the partition is part of the answer."""
        try:
            return self._read(key, wanted, bytes_left, is_first)
        except ApiError as error:
            return Read(self._error(key, error))

    def find(self, key: Key) -> Partition:
        """Raises ApiError."""
        found = self._partitions_of.get(key[0])
        partition = None if found is None else found.get(key[1])
        if partition is None:
            topic = topic_of(self._node.image, key[0], by_id=self._by_id)
            raise absence(self._node, topic, key[1], by_id=self._by_id)
        return partition

    def _read(self, key: Key, wanted: Wanted, bytes_left: int, is_first: bool) -> Read:
        partition = self.find(key)
        if wanted.partition is not partition:
            wanted.attach(partition)
        if not partition.is_leader or -1 < wanted.leader_epoch != partition.leader_epoch:
            if self._reads_followers:
                partition.check_readable(wanted.leader_epoch)
            else:
                partition.check_leader(wanted.leader_epoch)
        if self._replica_id > NO_REPLICA:
            self._check_replica(partition, wanted)
        log = partition.log
        if wanted.last_fetched_epoch >= 0 and (diverging := _divergence(partition, wanted)) is not None:
            high, stable = partition.high.offset, partition.last_stable_offset
            return Read(PartitionData(key[1], _OK, high, stable, log.start_offset, diverging_epoch=diverging))
        if not log.start_offset <= wanted.offset <= log.end_offset:
            raise ApiError(ErrorCode.offset_out_of_range)
        if self._replica_id > NO_REPLICA:
            self._count(partition, wanted)
        elif self._rack and partition.leading is not None:
            preferred = self._preferred_replica(partition, wanted.offset)
            if preferred > NO_REPLICA:
                high, stable = partition.high.offset, partition.last_stable_offset
                aborted = () if self.is_read_committed else None
                data = PartitionData(key[1], _OK, high, stable, log.start_offset, aborted=aborted)
                return Read(data._replace(preferred_read_replica=preferred))
        return self._read_upto(key, wanted, partition, bytes_left, is_first)

    def _read_upto(
        self, key: Key, wanted: Wanted, partition: Partition, bytes_left: int, is_first: bool
    ) -> Read:
        high = partition.high.offset
        if self.is_read_committed:
            upto = partition.last_stable
            stable = upto.offset
        else:
            upto = partition.high
            stable = partition.last_stable_offset
        if self._replica_id > NO_REPLICA:
            upto = partition.log.end
            if partition.is_leader_throttled and self._is_behind(partition):
                return self._read_throttled(key, wanted, partition, bytes_left, is_first, stable)
        records: BytesLike = b""
        next_offset = -1
        aborted: tuple[Aborted, ...] | None = () if self.is_read_committed else None
        if wanted.offset < upto.offset and (bytes_left > 0 or is_first):
            size = min(wanted.max_bytes, bytes_left)
            place = (key, wanted.offset, partition.leader_epoch)
            if self.is_read_committed and partition.log.has_aborted:
                (records, next_offset), aborted = self._committed(place, partition, size, upto, is_first)
            else:
                records, next_offset = self._records(place, partition, size, upto, is_first)
        data = PartitionData(key[1], _OK, high, stable, partition.log.start_offset, records, aborted)
        return Read(data, next_offset, upto.offset)

    def _records(
        self, place: Place, partition: Partition, size: int, upto: LogPosition, is_first: bool
    ) -> Slice:
        if self.from_disk and (from_disk := self.from_disk.get(place)) is not None:
            if isinstance(from_disk, ApiError):
                raise from_disk
            return from_disk.records
        try:
            return partition.log.read(place[1], size, upto, at_least_one=is_first, nowait=True)
        except BlockingIOError:
            raise self._not_cached(place, partition, size, upto, is_first) from None

    def _committed(
        self, place: Place, partition: Partition, size: int, upto: LogPosition, is_first: bool
    ) -> Stretch:
        records = self._records(place, partition, size, upto, is_first)
        if not records.data:
            return Stretch(records, ())
        if isinstance(from_disk := self.from_disk.get(place), Stretch):
            return from_disk
        try:
            return Stretch(records, partition.log.aborted_in(place[1], records.next_offset, nowait=True))
        except BlockingIOError:
            raise self._not_cached(place, partition, size, upto, is_first) from None

    def _not_cached(
        self, place: Place, partition: Partition, size: int, upto: LogPosition, is_first: bool
    ) -> NotCached:
        return NotCached(
            place, partial(_stretch, partition.log, place[1], size, upto, is_first, self.is_read_committed)
        )

    # -- racks ---------------------------------------------------------------------------------------

    def _preferred_replica(self, partition: Partition, offset: int) -> int:
        """The in-sync follower in the consumer's rack that has the most, if it has this offset; else -1.

        A consumer in the leader's own rack stays with the leader.
        """
        brokers, leading = self._node.image.brokers, partition.leading
        assert leading is not None
        here = brokers.get(self._node.node_id)
        if here is not None and here.rack == self._rack:
            return NO_REPLICA
        best, best_offset = NO_REPLICA, -1
        for waiter in tuple(partition.followers):
            heard = waiter.standing(partition.leader_epoch)
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
        self, key: Key, wanted: Wanted, partition: Partition, bytes_left: int, is_first: bool, stable: int
    ) -> Read:
        """For a follower that is not in sync: no more than leader.replication.throttled.rate leaves."""
        throttle, upto = self._node.leader_throttle, partition.log.end
        records: BytesLike = b""
        next_offset = -1
        left = throttle.left()[0] - self.throttled_bytes if throttle.is_limited else bytes_left
        if wanted.offset < upto.offset and left > 0 and (bytes_left > 0 or is_first):
            place = (key, wanted.offset, partition.leader_epoch)
            size = min(wanted.max_bytes, bytes_left, left)
            records, next_offset = self._records(place, partition, size, upto, is_first)
            self.throttled_bytes += len(records)
        high, start = partition.high.offset, partition.log.start_offset
        return Read(PartitionData(key[1], _OK, high, stable, start, records), next_offset, upto.offset)

    def _check_replica(self, partition: Partition, wanted: Wanted) -> None:
        """Raises ApiError for a broker that is no replica here, or for one from before its restart."""
        if self._replica_id not in partition.replicas:
            # It knows of an assignment that this node has not heard of yet, or the other way round.
            knows_epoch = wanted.leader_epoch >= 0
            raise ApiError(
                ErrorCode.unknown_leader_epoch if knows_epoch else ErrorCode.not_leader_or_follower
            )
        broker = self._node.image.brokers.get(self._replica_id)
        if broker is not None and -1 < self._replica_epoch < broker.epoch:
            raise ApiError(ErrorCode.not_leader_or_follower, "the broker has registered again since")

    def _count(self, partition: Partition, wanted: Wanted) -> None:
        if not wanted.is_uncounted or partition.leading is None:
            return
        wanted.is_uncounted = False
        if wanted.leader_epoch != partition.leader_epoch:
            return
        wanted.counted_epoch = partition.leader_epoch
        if partition.leading.fetched(self._replica_id, wanted.offset, self._replica_epoch, self._heard_ms):
            self._node.isr.wake(partition)

    # -- errors --------------------------------------------------------------------------------------

    def _error(self, key: Key, error: ApiError) -> PartitionData:
        self._node.metrics.count_error("fetch", error.code.name)
        found = (self._partitions_of.get(key[0]) or {}).get(key[1])
        if found is not None and error.code in _UNREADABLE:
            self._node.partitions.unreadable(found, error)
        if found is None or error.code is not ErrorCode.offset_out_of_range:
            return PartitionData(key[1], error.code.value, current_leader=self._leader(key, error.code))
        high, stable = found.high.offset, found.last_stable_offset
        return PartitionData(key[1], error.code.value, high, stable, found.log.start_offset)

    def _leader(self, key: Key, error: ErrorCode) -> tuple[int, int] | None:
        if self.hints is None:
            self.hints = LeaderHints(self._node, self._listener, by_id=self._by_id)
        return self.hints.leader(*key, error)


def _stretch(
    log: Log, offset: int, size: int, upto: LogPosition, is_first: bool, read_committed: bool
) -> Stretch:
    """In any thread: what was aborted below a last stable offset is the same at any later moment."""
    records = log.read(offset, size, upto, at_least_one=is_first)
    if not (read_committed and records.data):
        return Stretch(records, ())
    return Stretch(records, log.aborted_in(offset, records.next_offset))


def _divergence(partition: Partition, wanted: Wanted) -> tuple[int, int] | None:
    """Where the reader's history leaves ours, if it does (KIP-595, KIP-320)."""
    epoch, end_offset = partition.end_of_epoch(wanted.last_fetched_epoch)
    if epoch < 0:
        raise ApiError(ErrorCode.offset_out_of_range)
    if epoch < wanted.last_fetched_epoch or end_offset < wanted.offset:
        return epoch, end_offset
    return None
