"""Fetches for every partition that this node follows: one task per leader, and bounds on what may be fetched.

`penstock.reassignment.bytes.per.second` bounds what is moved here, whatever its topic says. Apache Kafka's
`follower.replication.throttled.rate` bounds what the topics' follower.replication.throttled.replicas name. Neither
holds back a replica that is in sync, because its leader's producers would wait for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.broker.bandwidth import Bandwidth, throttled_rate
from penstock.broker.following import Following
from penstock.broker.leader_fetcher import LeaderFetcher
from penstock.broker.replica_session import Key
from penstock.broker.topic_settings import node_integer, node_layers

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.partition import Partition
    from penstock.cluster.image import ClusterImage

logger = logging.getLogger("penstock.replication")

_LIMIT: Final = "penstock.reassignment.bytes.per.second"
_THROTTLED_RATE: Final = "follower.replication.throttled.rate"


class ReplicaLag(NamedTuple):
    """How far a replica here is behind its leader's high watermark; -1 before the leader has answered."""

    topic: str
    partition: int
    leader: int
    records: int


class Fetchers:
    def __init__(self, node: Node) -> None:
        self._node = node
        #: Counters for metrics: record bytes fetched, those for replicas that are being moved here, truncations,
        #: and records given up although they had been called committed.
        self.bytes_fetched = 0
        self.bytes_moved = 0
        self.truncations = 0
        self.records_lost = 0
        clock = asyncio.get_running_loop().time
        self.bandwidth = Bandwidth(self._limit, clock)
        self.throttle = Bandwidth(throttled_rate(node.dynamic, _THROTTLED_RATE), clock)
        self._leaders: dict[int, LeaderFetcher] = {}
        self._followings: dict[Key, Following] = {}
        self._limit_read: tuple[ClusterImage, int] | None = None

    def __repr__(self) -> str:
        return f"<Fetchers {len(self._followings)} partitions of {sorted(self._leaders)}>"

    def follow(self, partition: Partition) -> None:
        """Fetch from the partition's leader in its leader epoch, and no longer from an earlier one."""
        key = (partition.topic_id.bytes, partition.index)
        leader_id, leader_epoch = partition.leader_id, partition.leader_epoch
        known = self._followings.get(key)
        if (
            known is not None
            and known.partition is partition
            and (known.rules.leader_id, known.rules.leader_epoch) == (leader_id, leader_epoch)
        ):
            return
        after = self.unfollow(partition)
        following = self._followings[key] = Following(self._node, partition, leader_id, leader_epoch)
        fetcher = self._leaders.get(leader_id)
        if fetcher is None:
            fetcher = self._leaders[leader_id] = LeaderFetcher(self, self._node, leader_id)
        fetcher.add(following, after)

    def unfollow(self, partition: Partition) -> asyncio.Future[None]:
        """Nothing more is appended from now on; await the result before the log is written or closed."""
        following = self._followings.pop((partition.topic_id.bytes, partition.index), None)
        if following is None:
            return _done()
        idle = following.stop()
        fetcher = self._leaders[following.rules.leader_id]
        if fetcher.followings.get(following.key) is following:
            fetcher.remove(following.key)
        if not fetcher.followings:
            del self._leaders[fetcher.leader_id]
            fetcher.close()
        return idle

    def brokers_changed(self, broker_ids: Iterable[int]) -> None:
        """Their addresses or lives have changed: who rests because of them tries again at once."""
        for broker_id in broker_ids:
            fetcher = self._leaders.get(broker_id)
            if fetcher is not None:
                fetcher.try_now()

    def is_rearranging(self, partition: Partition) -> bool:
        """The log is being truncated in a thread: retention and compaction leave it alone."""
        following = self._followings.get((partition.topic_id.bytes, partition.index))
        return following is not None and following.is_rearranging

    def lags(self) -> Iterator[ReplicaLag]:
        for following in self._followings.values():
            partition, rules = following.partition, following.rules
            yield ReplicaLag(partition.topic, partition.index, rules.leader_id, following.lag_records)

    async def close(self) -> None:
        """Returns when nothing of this touches a log any more."""
        idle = [following.stop() for following in self._followings.values()]
        for fetcher in self._leaders.values():
            fetcher.close()
        self._followings.clear()
        self._leaders.clear()
        if idle:
            await asyncio.wait(idle)

    # -- news from the rounds ------------------------------------------------------------------------

    def count(self, following: Following, size: int) -> None:
        self.bytes_fetched += size
        if not size:
            return
        if following.partition.is_being_moved_here:
            self.bytes_moved += size
            if following.is_catching_up:
                self.bandwidth.take(size)
        if following.is_throttled:
            self.throttle.take(size)

    @property
    def is_limited(self) -> bool:
        return self.bandwidth.is_limited or self.throttle.is_limited

    def limits(self, followings: Sequence[Following]) -> list[tuple[Bandwidth, list[Following]]]:
        """The bounds that are set, each with those that it holds back."""
        limits = []
        if self.bandwidth.is_limited and (moving := [f for f in followings if f.is_catching_up]):
            limits.append((self.bandwidth, moving))
        if self.throttle.is_limited and (throttled := [f for f in followings if f.is_throttled]):
            limits.append((self.throttle, throttled))
        return limits

    def rearranged(self, following: Following) -> None:
        self.truncations += 1
        self.records_lost += following.records_lost
        following.records_lost = 0

    def _limit(self) -> int:
        """Read again when the image is another, as an operator may have changed it."""
        image = self._node.image
        if self._limit_read is None or self._limit_read[0] is not image:
            self._limit_read = image, node_integer(node_layers(self._node.settings, image), _LIMIT)
        return self._limit_read[1]


def _done() -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future
