"""The schedule of a node: movers for the partitions that it leads, and the shards of the schedule that it leads."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from penstock.broker.apis import SCHEDULE as API_KEY
from penstock.broker.internal_topics import SCHEDULED
from penstock.broker.schedule.counts import Counts
from penstock.broker.schedule.hold import Hold
from penstock.broker.schedule.mover import Mover
from penstock.broker.schedule.shard_host import ShardHost
from penstock.broker.schedule.wire import Ask, What, pack_ask, read_answer
from penstock.broker.sharded_topic import ShardedTopic
from penstock.cluster.delta import ImageDelta
from penstock.protocol.errors import ApiError, ErrorCode, MalformedFrame
from penstock.scheduling.intake import Limits
from penstock.scheduling.records import Position, Source

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.partition import Partition

logger = logging.getLogger("penstock.schedule")

_HEADER: Final = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
_NO_CLIENT_ID: Final = -1
_ANSWER_AT: Final = 4
#: More than a shard takes to say that it is not committed yet.
_GRACE_S: Final = 1.0
_LOAD_AGAIN_S: Final = 1.0
#: How long a follower goes by what it was told.
_KNOWN_S: Final = 10.0
#: How often there is a look at whether a mover has got on.
_LOOK_S: Final = 0.01

#: Sources whose records are released at the same time, and such whose partitions have been slow.
_LANES: Final = 32
_SLOW_LANES: Final = 8
#: Sources of which much is read at a time: what they hold in memory is some 16 MB each.
_READERS_AHEAD: Final = 4
_THREADS: Final = 2

_Key = tuple[str, int]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Permits:
    """So many, for who can do without."""

    def __init__(self, count: int) -> None:
        self._left = count

    def take(self) -> bool:
        is_left = self._left > 0
        self._left -= is_left
        return is_left

    def give_back(self) -> None:
        self._left += 1


class Schedule(ShardedTopic):
    """`node.schedule`. Its shards run on hosts of their own, for what they hold does not fit into memory."""

    def __init__(self, node: Node) -> None:
        super().__init__(node, SCHEDULED)
        self.node = node
        self.counts = Counts()
        self._is_closed = False
        self._delay_ms_max = node.settings.integer("penstock.schedule.delay.max.ms")
        self._commit_s = node.settings.integer(SCHEDULED.commit_timeout_ms) / 1000
        self.lanes, self.slow_lanes = asyncio.Semaphore(_LANES), asyncio.Semaphore(_SLOW_LANES)
        self.readers_ahead = Permits(_READERS_AHEAD)
        self._threads = asyncio.Semaphore(_THREADS)
        self._hold = Hold(node.settings.integer("penstock.schedule.retention.hold.max.ms") / 1000)
        self._known: dict[_Key, tuple[int, float]] = {}  # of partitions that others lead: offset, until when
        self._silent_until: dict[int, float] = {}  # by shard
        self.hosts: dict[int, ShardHost] = {}
        self.movers: dict[_Key, Mover] = {}

    def limits(self, partition: Partition) -> Limits:
        """In any thread."""
        return Limits(self.node.now_ms(), self._delay_ms_max, partition.log.config.max_message_bytes)

    def image_changed(self, delta: ImageDelta) -> None:
        """Shards and movers begin where partitions are led, and end elsewhere."""
        self._follow_shards()
        self._follow_sources()
        if delta.topics_deleted:
            for host in self.hosts.values():
                host.releaser.wake()

    def _follow_shards(self) -> None:
        if self._is_closed:
            return
        led = {index: self.node.partitions.led(SCHEDULED.name, index) for index in self.shards()}
        for index, host in list(self.hosts.items()):
            if led.get(index) is not host.partition or not host.is_current:
                self.hosts.pop(index).close()
        for index, partition in led.items():
            if partition is not None and index not in self.hosts:
                self.hosts[index] = ShardHost(self, partition)

    def begin_anew(self, host: ShardHost) -> None:
        """Something failed that should not: load the shard again from its log, after a while."""
        index = host.partition.index
        if self.hosts.get(index) is host:
            self.hosts.pop(index).close()
            asyncio.get_running_loop().call_later(_LOAD_AGAIN_S, self._follow_shards)

    def _follow_sources(self) -> None:
        for key, mover in list(self.movers.items()):
            if self.node.partitions.get(*key) is not mover.partition or not mover.is_current:
                self.movers.pop(key).close()
        has_topic = SCHEDULED.name in self.node.image.topics
        for partition in self.node.partitions:
            # What was held while a topic had a schedule is handed over when it has none any more, too.
            may_hold = (partition.is_scheduled or has_topic) and not partition.is_internal
            if may_hold and partition.is_leader:
                if partition.key in self.movers:
                    self.movers[partition.key].configured()
                else:
                    self.movers[partition.key] = Mover(self, partition)

    async def in_thread(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """What may take long leaves threads to those who read what is not cached."""
        async with self._threads:
            return await self.node.in_thread(call, *args, **kwargs)

    def looks_after(self, partition: Partition) -> bool:
        """Whether records were held back in a partition that this node leads."""
        mover = self.movers.get(partition.key)
        return mover is not None and mover.is_at_work

    async def retained_from(self, partition: Partition) -> int:
        """What retention must not take, for a bounded time."""
        offset = await self.taken_over(partition)
        return self._hold.bounded(partition.key, offset, partition.high_watermark, time.monotonic())

    async def taken_over(self, partition: Partition) -> int:
        """Below this offset nothing is held that has not been taken over; 0 while that is not known."""
        try:
            return await self._taken_offset(partition)
        except (ApiError, ConnectionError, TimeoutError):
            return 0

    async def _taken_offset(self, partition: Partition) -> int:
        if partition.is_leader:
            mover = self.movers.get(partition.key)
            return 0 if mover is None else mover.taken_offset
        known = self._known.get(partition.key)
        if known is None or time.monotonic() > known[1]:
            position = await self._position_of(Source(partition.topic_id, partition.index))
            offset = partition.log.end_offset if position is None else position.offset
            known = self._known[partition.key] = offset, time.monotonic() + _KNOWN_S
        return known[0]

    async def _position_of(self, source: Source) -> Position | None:
        """A shard that does not answer is not waited for again by every partition: retention goes by all of them."""
        shard = self.shard_of(_shard_key(source))
        if time.monotonic() < self._silent_until.get(shard, 0.0):
            raise ApiError(ErrorCode.coordinator_not_available, "it has not answered a moment ago")
        try:
            return await self.ask(Ask(What.POSITION, source))
        except (ApiError, ConnectionError, TimeoutError):
            self._silent_until[shard] = time.monotonic() + _KNOWN_S
            raise

    async def wait_until_taken_over(self, partition: Partition, offset: int) -> None:
        """Raises ApiError when it takes too long."""
        deadline = time.monotonic() + self._commit_s
        while await self._taken_offset(partition) < offset:
            if time.monotonic() > deadline:
                raise ApiError(ErrorCode.request_timed_out, "held records have not been taken over yet")
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        self._is_closed = True
        for mover in self.movers.values():
            mover.close()
        for host in self.hosts.values():
            host.close()

    async def ask(self, ask: Ask) -> Position | None:
        """Of the shard that keeps a source, wherever it is. Raises ApiError, ConnectionError, TimeoutError."""
        leader_id = self.leader_of(_shard_key(ask.source))
        if leader_id is None:
            raise ApiError(ErrorCode.leader_not_available, "nobody leads this part of the schedule")
        if leader_id == self.node.node_id:
            return await self.answer(ask)
        return await self._ask_there(leader_id, ask)

    async def answer(self, ask: Ask) -> Position | None:
        """Here. Raises ApiError."""
        host = self.hosts.get(self.shard_of(_shard_key(ask.source)))
        if host is None:
            raise ApiError(ErrorCode.not_coordinator)
        try:
            async with asyncio.timeout(self._commit_s):
                return await host.ask(ask)
        except TimeoutError:
            raise ApiError(ErrorCode.coordinator_not_available, "not committed yet") from None

    async def _ask_there(self, leader_id: int, ask: Ask) -> Position | None:
        from penstock.broker.peers import PeerUnreachable

        frame = _HEADER.pack(API_KEY, 0, 0, _NO_CLIENT_ID) + pack_ask(ask)
        try:
            reply = await self.node.peers.raw(
                leader_id,
                frame,
                timeout_s=self._commit_s + _GRACE_S,
                # One that waits for its replicas must not hold up the others: answers come in order.
                purpose=f"schedule-{self.shard_of(_shard_key(ask.source))}",
            )
            answer = read_answer(reply, _ANSWER_AT)
        except (PeerUnreachable, MalformedFrame) as error:
            raise ConnectionError(str(error)) from None
        if answer.error is not ErrorCode.none:
            raise ApiError(answer.error)
        return answer.position


def _shard_key(source: Source) -> str:
    return f"{source.topic_id}-{source.partition}"
