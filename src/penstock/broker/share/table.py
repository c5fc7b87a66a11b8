"""The share partitions that this node leads, and the sessions of their members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.broker.share.led import LedSharePartition
from penstock.broker.share.sessions import Place, ShareSession, ShareSessions
from penstock.broker.topology import absence, topic_of
from penstock.groups.share_partition.messages import Counters
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from penstock.broker.node import Node
    from penstock.broker.partition import Partition
    from penstock.cluster.delta import ImageDelta

#: group, raw topic id, partition
Key = tuple[str, bytes, int]


class SharePartitions:
    """`node.share`."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.counters: dict[str, Counters] = {}
        self.sessions = ShareSessions(
            node.settings.integer("group.share.max.share.sessions"), self._session_lost
        )
        self._led: dict[Key, LedSharePartition] = {}

    def __iter__(self) -> Iterator[LedSharePartition]:
        return iter(list(self._led.values()))

    def __len__(self) -> int:
        return len(self._led)

    def counters_of(self, group: str) -> Counters:
        return self.counters.setdefault(group, Counters())

    # -- finding -------------------------------------------------------------------------------------

    def partition_of(self, place: Place) -> Partition:
        """One that this node leads. Raises ApiError."""
        found = self.node.partitions.by_raw_id.get(place[0])
        partition = None if found is None else found.get(place[1])
        if partition is None:
            topic = topic_of(self.node.image, place[0], by_id=True)
            raise absence(self.node, topic, place[1], by_id=True)
        partition.check_leader()
        return partition

    def get(self, group: str, place: Place) -> LedSharePartition | None:
        """What is there already. Raises ApiError when the partition is not led here."""
        partition = self.partition_of(place)
        led = self._led.get((group, *place))
        if led is not None and (led.partition is not partition or led.leader_epoch != partition.leader_epoch):
            led.close(ApiError(ErrorCode.not_leader_or_follower, "another leader epoch has begun"))
            return None
        return led

    def find(self, group: str, place: Place) -> LedSharePartition:
        """Begins to load what is not there. Raises ApiError."""
        led = self.get(group, place)
        if led is None:
            partition = self.partition_of(place)
            if partition.is_internal:
                raise ApiError(ErrorCode.topic_authorization_failed)
            led = self._led[group, *place] = LedSharePartition(self, group, partition)
            self.node.spawn(led.load())
        return led

    # -- letting go ----------------------------------------------------------------------------------

    def forget(self, led: LedSharePartition) -> None:
        key = (led.group, led.partition.topic_id.bytes, led.partition.index)
        if self._led.get(key) is led:
            del self._led[key]

    def rest(self, led: LedSharePartition) -> None:
        """Without members nobody looks after it: it is read again when there are some, who may have moved its start."""
        if led.rules is None or led.is_closed or self.sessions.has_group(led.group):
            return
        if led.rules.is_idle:
            led.close(ApiError(ErrorCode.not_leader_or_follower, "the group has no members here"))

    def close_session(self, session: ShareSession) -> list[asyncio.Future[None]]:
        """The member has said goodbye: what it holds is free at once. What to wait for before it is answered."""
        self.sessions.close(session)
        return self._release(session, with_delay=False)

    def _session_lost(self, session: ShareSession) -> None:
        self._release(session, with_delay=True)

    def _release(self, session: ShareSession, *, with_delay: bool) -> list[asyncio.Future[None]]:
        stored = []
        for led in list(self._led.values()):
            if led.group == session.group:
                future = led.release(session.member, with_delay=with_delay)
                if future is not None:
                    stored.append(future)
                self.rest(led)
        return stored

    def image_changed(self, delta: ImageDelta) -> None:
        """Leaders change and topics go; whoever waits hears of it."""
        if not (delta.topics_deleted or delta.partitions_changed):
            return
        for led in list(self._led.values()):
            partition = led.partition
            if partition.is_retired or not partition.is_leader or partition.leader_epoch != led.leader_epoch:
                led.close(ApiError(ErrorCode.not_leader_or_follower, "this node does not lead any more"))

    def close(self) -> None:
        for led in list(self._led.values()):
            led.close(ApiError(ErrorCode.not_leader_or_follower, "the node stops"))
