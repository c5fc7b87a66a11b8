"""The schedule of a broker: movers for the source partitions that it leads, and the schedule shards that it leads.

`RetentionHold` bounds how long retention waits for held records to be moved: a schedule that is stuck must not fill
the disk.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from penstock.broker.config.internal_topics import SCHEDULE_TOPIC
from penstock.broker.coordinators.runtime.sharded_coordinator import ShardedTopic
from penstock.broker.coordinators.schedule.active_shard import ActiveScheduleShard
from penstock.broker.coordinators.schedule.messages import (
    ScheduleOperation,
    ScheduleRequest,
    decode_response,
    encode_request,
)
from penstock.broker.coordinators.schedule.mover import Mover
from penstock.broker.metrics.counters import Histogram
from penstock.broker.network.apis import SCHEDULE_API as API_KEY
from penstock.cluster.image import ImageDelta
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame
from penstock.scheduling.intake import ScheduleLimits
from penstock.scheduling.schedule_log import DueEntry, ScheduleSource, SourcePosition

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.broker.coordinators.runtime.sharded_coordinator import CoordinatorContext
    from penstock.broker.environment import PeerCalls
    from penstock.broker.partition.idempotent_append import PlannedAppends
    from penstock.broker.partition.partition import Partition


class ScheduleCounters:
    def __init__(self) -> None:
        self.released_count = self.dropped_count = 0
        self.lateness = Histogram()

    def released(self, dues: Sequence[DueEntry], now_ms: int) -> None:
        """Count released records, and observe one lateness for all of them: the longest, that of the first."""
        self.released_count += len(dues)
        self.lateness.observe(max(now_ms - dues[0].due_ms, 0) / 1000)


logger = logging.getLogger("penstock.schedule")

_HoldKey = tuple[str, int]


class RetentionHold:
    def __init__(self, seconds_max: float) -> None:
        self._seconds_max = seconds_max
        self._stuck: dict[_HoldKey, tuple[int, float]] = {}  # offset, and since when it has not advanced
        self._given_up: set[_HoldKey] = set()

    def bounded(self, key: _HoldKey, offset: int, end_offset: int, now: float) -> int:
        """Return `offset`, below which all records are moved, or `end_offset` if it has not advanced for too long."""
        stuck = self._stuck.get(key)
        if offset >= end_offset or stuck is None or stuck[0] != offset:
            self._given_up.discard(key)
            self._stuck[key] = offset, now
            return offset
        if now - stuck[1] < self._seconds_max:
            return offset
        if key not in self._given_up:
            self._given_up.add(key)
            extra = {"partition": f"{key[0]}-{key[1]}", "offset": offset}
            logger.error("retention no longer waits for held records: some may be lost", extra=extra)
        return end_offset


_HEADER: Final = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
_NO_CLIENT_ID: Final = -1
_CORRELATION_BYTES: Final = 4
#: Added to the commit timeout, so that a shard's own timeout error arrives before the request times out.
_RESPONSE_MARGIN_S: Final = 1.0
_RELOAD_DELAY_S: Final = 1.0
#: How long a follower uses a position that it received, and how long it does not ask a silent shard again.
_POSITION_CACHE_S: Final = 10.0
#: How often `wait_until_moved` checks the progress of a mover.
_POLL_S: Final = 0.01

#: Sources that release records at the same time, and how many more whose partitions have been slow.
_CONCURRENT_SOURCES_MAX: Final = 32
_CONCURRENT_SLOW_SOURCES_MAX: Final = 8
#: Sources that read ahead at the same time: each holds some 16 MB in memory.
_READ_AHEAD_SOURCES_MAX: Final = 4
_THREADS_MAX: Final = 2

_PartitionKey = tuple[str, int]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Permits:
    """A limit on something optional: `take` does not wait, but returns whether a permit was left."""

    def __init__(self, count: int) -> None:
        self._left = count

    def take(self) -> bool:
        is_left = self._left > 0
        self._left -= is_left
        return is_left

    def give_back(self) -> None:
        self._left += 1


class ScheduleCoordinator(ShardedTopic):
    """It does not use the coordinator runtime, because held records do not fit into memory."""

    def __init__(
        self,
        context: CoordinatorContext,
        *,
        directory: Path,
        appends: PlannedAppends,
        peers: Callable[[], PeerCalls],
    ) -> None:
        """`directory` is for the files that sort held records by due time."""
        super().__init__(context, SCHEDULE_TOPIC)
        settings = context.settings
        self.environment = context.environment
        self.metadata = context.metadata
        self.directory = directory
        self.appends = appends
        self._partitions = context.partitions
        self._peers = peers
        self.counts = ScheduleCounters()
        self._is_closed = False
        self._delay_ms_max = settings.integer("penstock.schedule.delay.max.ms")
        self._commit_s = settings.integer(SCHEDULE_TOPIC.commit_timeout_ms) / 1000
        self.source_limit, self.slow_source_limit = (
            asyncio.Semaphore(_CONCURRENT_SOURCES_MAX),
            asyncio.Semaphore(_CONCURRENT_SLOW_SOURCES_MAX),
        )
        self.readers_ahead = Permits(_READ_AHEAD_SOURCES_MAX)
        self._threads = asyncio.Semaphore(_THREADS_MAX)
        self._hold = RetentionHold(settings.integer("penstock.schedule.retention.hold.max.ms") / 1000)
        self._known: dict[
            _PartitionKey, tuple[int, float]
        ] = {}  # of partitions that other brokers lead: offset, and until when it is valid
        self._silent_until: dict[int, float] = {}  # by shard: do not ask it before this time
        self.hosts: dict[int, ActiveScheduleShard] = {}
        self.movers: dict[_PartitionKey, Mover] = {}

    def limits(self, partition: Partition) -> ScheduleLimits:
        """May be called in any thread."""
        return ScheduleLimits(
            self.environment.now_ms(), self._delay_ms_max, partition.log.config.max_message_bytes
        )

    def image_changed(self, delta: ImageDelta) -> None:
        """Start shards and movers for partitions that this node now leads, and close the others."""
        self._update_shards()
        self._update_movers()
        if delta.topics_deleted:
            for host in self.hosts.values():
                host.releaser.wake()

    def _update_shards(self) -> None:
        if self._is_closed:
            return
        led = {index: self._partitions.led(SCHEDULE_TOPIC.name, index) for index in self.shards()}
        for index, host in list(self.hosts.items()):
            if led.get(index) is not host.partition or not host.is_current:
                self.hosts.pop(index).close()
        for index, partition in led.items():
            if partition is not None and index not in self.hosts:
                self.hosts[index] = ActiveScheduleShard(self, partition)

    def reload_later(self, host: ActiveScheduleShard) -> None:
        """Load the shard again from its log, after a delay, because something failed that should not."""
        index = host.partition.index
        if self.hosts.get(index) is host:
            self.hosts.pop(index).close()
            asyncio.get_running_loop().call_later(_RELOAD_DELAY_S, self._update_shards)

    def _update_movers(self) -> None:
        for key, mover in list(self.movers.items()):
            if self._partitions.get(*key) is not mover.partition or not mover.is_current:
                self.movers.pop(key).close()
        has_topic = SCHEDULE_TOPIC.name in self.metadata.image.topics
        for partition in self._partitions:
            # Records that were held before a topic's schedule was disabled still have to be moved.
            may_hold = (partition.is_scheduled or has_topic) and not partition.is_internal
            if may_hold and partition.is_leader:
                if partition.key in self.movers:
                    self.movers[partition.key].configured()
                else:
                    self.movers[partition.key] = Mover(self, partition)

    async def in_thread(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Run a long call in a thread. Only a few run at once, so that threads remain for reads from disk."""
        async with self._threads:
            return await self.environment.in_thread(call, *args, **kwargs)

    def handle_read_error(self, partition: Partition, error: ApiError) -> None:
        """If this copy is damaged, another replica takes over, and this one fetches the log again."""
        self._partitions.handle_read_error(partition, error)

    def has_active_mover(self, partition: Partition) -> bool:
        """Whether this node leads the partition and records may have been held in it."""
        mover = self.movers.get(partition.key)
        return mover is not None and mover.has_position

    async def retention_limit(self, partition: Partition) -> int:
        """The offset that retention must not pass. It holds retention back for a bounded time only."""
        offset = await self.known_moved_offset(partition)
        return self._hold.bounded(partition.key, offset, partition.high_watermark, time.monotonic())

    async def known_moved_offset(self, partition: Partition) -> int:
        """The offset below which all held records are moved to the schedule; 0 while it is unknown."""
        try:
            return await self._moved_offset(partition)
        except (ApiError, ConnectionError, TimeoutError):
            return 0

    async def _moved_offset(self, partition: Partition) -> int:
        if partition.is_leader:
            mover = self.movers.get(partition.key)
            return 0 if mover is None else mover.moved_offset
        known = self._known.get(partition.key)
        if known is None or time.monotonic() > known[1]:
            position = await self._position_of(ScheduleSource(partition.topic_id, partition.index))
            offset = partition.log.end_offset if position is None else position.offset
            known = self._known[partition.key] = offset, time.monotonic() + _POSITION_CACHE_S
        return known[0]

    async def _position_of(self, source: ScheduleSource) -> SourcePosition | None:
        """Ask the shard of a source. A shard that did not answer is not asked again for a while.

        Retention asks for every partition and must not wait for the same shard each time.
        """
        shard = self.shard_of(_shard_key(source))
        if time.monotonic() < self._silent_until.get(shard, 0.0):
            raise ApiError(ErrorCode.coordinator_not_available, "the shard did not answer a moment ago")
        try:
            return await self.ask(ScheduleRequest(ScheduleOperation.POSITION, source))
        except (ApiError, ConnectionError, TimeoutError):
            self._silent_until[shard] = time.monotonic() + _POSITION_CACHE_S
            raise

    async def wait_until_moved(self, partition: Partition, offset: int) -> None:
        """Wait until all held records below `offset` are moved. Raises ApiError REQUEST_TIMED_OUT."""
        deadline = time.monotonic() + self._commit_s
        while await self._moved_offset(partition) < offset:
            if time.monotonic() > deadline:
                raise ApiError(
                    ErrorCode.request_timed_out, "held records have not been moved to the schedule yet"
                )
            await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        self._is_closed = True
        for mover in self.movers.values():
            mover.close()
        for host in self.hosts.values():
            host.close()

    async def ask(self, ask: ScheduleRequest) -> SourcePosition | None:
        """Send a request to the leader of the source's shard. Raises ApiError, ConnectionError, TimeoutError."""
        leader_id = self.leader_of(_shard_key(ask.source))
        if leader_id is None:
            raise ApiError(ErrorCode.leader_not_available, "the shard of the schedule has no leader")
        if leader_id == self._context.node_id:
            return await self.answer(ask)
        return await self._request_remote(leader_id, ask)

    async def answer(self, ask: ScheduleRequest) -> SourcePosition | None:
        """Handle a request on this node, which leads the shard. Raises ApiError."""
        host = self.hosts.get(self.shard_of(_shard_key(ask.source)))
        if host is None:
            raise ApiError(ErrorCode.not_coordinator)
        try:
            async with asyncio.timeout(self._commit_s):
                return await host.ask(ask)
        except TimeoutError:
            raise ApiError(ErrorCode.coordinator_not_available, "not committed yet") from None

    async def _request_remote(self, leader_id: int, ask: ScheduleRequest) -> SourcePosition | None:
        from penstock.broker.network.peers import PeerUnreachable

        frame = _HEADER.pack(API_KEY, 0, 0, _NO_CLIENT_ID) + encode_request(ask)
        try:
            reply = await self._peers().raw(
                leader_id,
                frame,
                timeout_s=self._commit_s + _RESPONSE_MARGIN_S,
                # One connection per shard: responses come in order, so a shard that waits for replicas delays the rest.
                purpose=f"schedule-{self.shard_of(_shard_key(ask.source))}",
            )
            answer = decode_response(reply, _CORRELATION_BYTES)
        except (PeerUnreachable, MalformedFrame) as error:
            raise ConnectionError(str(error)) from None
        if answer.error is not ErrorCode.none:
            raise ApiError(answer.error)
        return answer.position


def _shard_key(source: ScheduleSource) -> str:
    return f"{source.topic_id}-{source.partition}"
