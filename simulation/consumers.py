"""Members of a group by the server-side protocol (KIP-848): one heartbeat says and hears everything."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from penstock.cluster.topic_names import CONSUMER_OFFSETS
from penstock.groups.consumer.consumer_heartbeat import consumer_group_heartbeat
from penstock.groups.consumer.membership import ConsumerHeartbeatReply, ConsumerHeartbeatRequest
from penstock.groups.group import CommitRequest, OffsetToCommit, PartitionsReply
from penstock.groups.modern_group import (
    JOIN_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_STATIC_MEMBER_EPOCH,
)
from penstock.protocol.errors import ErrorCode
from simulation.clients import Sleeper
from simulation.ownership import GROUP, Ownership, signature
from simulation.script import Ask, Steps, play

if TYPE_CHECKING:
    from simulation.cluster import Cluster

TOPIC: Final = "orders"
SESSION_MS: Final = 300
_BEAT_MS: Final = SESSION_MS // 4
_LEAVE_ATTEMPTS: Final = 3


class ConsumerMember(Sleeper):
    def __init__(
        self, cluster: Cluster, id: int, counts: Counter[str], ownership: Ownership, instance: str | None
    ) -> None:
        super().__init__(cluster, id, counts)
        self.ownership = ownership
        self.instance = instance
        self.member_id = f"m{self.world.serial()}"
        self.epoch = JOIN_GROUP_MEMBER_EPOCH
        self.owned: set[int] = set()
        #: Whether it goes on: one that has left, was fenced for good or crashed does not.
        self.is_over = False
        self.is_leaving = False
        #: Whether the last request was answered: if not, it says everything once more.
        self._is_sure = False
        self._positions: dict[int, int] = {}
        ownership.members.append(self)

    def __repr__(self) -> str:
        return f"<ConsumerMember {self.member_id} {self.instance or ''} e{self.epoch} {sorted(self.owned)}>"

    @property
    def is_busy(self) -> bool:
        return bool(self.owned) and not self.is_over

    def begin(self) -> None:
        play(self, self._live())

    def crash(self) -> None:
        self.life.is_over = self.is_over = True
        self.owned.clear()

    def _live(self) -> Steps:
        while not self.is_leaving and not self.is_over:
            reply = yield self._asked(self._beat())
            yield from self._heard(reply)
            if self.epoch > 0 and self.owned and self.world.chance(0.6):
                yield from self._commit()
        if not self.is_over:
            yield from self._leave()

    # --- membership ---

    def _asked(self, request: ConsumerHeartbeatRequest) -> Ask:
        key = self.cluster.partitions(CONSUMER_OFFSETS)[0]

        def beat(shard: Any, token: Any, now_ms: int) -> Any:
            return consumer_group_heartbeat(shard, request, token, now_ms=now_ms)

        return Ask(key, "group", (key, beat))

    def _beat(self, epoch: int | None = None) -> ConsumerHeartbeatRequest:
        topic_id = self.cluster.partitions(TOPIC)[0].topic_id
        says_all = self.epoch == JOIN_GROUP_MEMBER_EPOCH or not self._is_sure
        return ConsumerHeartbeatRequest(
            group_id=GROUP,
            member_id=self.member_id,
            member_epoch=self.epoch if epoch is None else epoch,
            instance_id=self.instance,
            rebalance_timeout_ms=SESSION_MS if says_all else -1,
            topic_names=(TOPIC,) if says_all else None,
            owned={topic_id: frozenset(self.owned)} if self.owned else {},
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=_BEAT_MS,
        )

    def _heard(self, reply: Any) -> Steps:
        self._is_sure = isinstance(reply, ConsumerHeartbeatReply)
        if not isinstance(reply, ConsumerHeartbeatReply):
            yield self.world.between(self.backoff_ms // 2, 2 * self.backoff_ms)
        elif reply.error is ErrorCode.none:
            if self.world.chance(0.2):
                yield self.world.between(1, 40)  # it is slow to act on what it hears
            if reply.member_epoch != self.epoch:
                self.epoch = reply.member_epoch
                self.counts["epochs reached"] += 1
            is_moved = reply.assigned is not None and self._take(reply.assigned)
            yield 1 if is_moved else self.world.between(_BEAT_MS // 2, _BEAT_MS)
        else:
            yield from self._refused(reply.error)

    def _refused(self, error: ErrorCode) -> Steps:
        self.world.note("member refused", self, error)
        if error is ErrorCode.fenced_instance_id:
            self.owned.clear()
            self.is_over = True
        elif error in (ErrorCode.unknown_member_id, ErrorCode.fenced_member_epoch):
            # Somebody else may have what it had.
            self.counts["members fenced"] += 1
            self.owned.clear()
            self._positions.clear()
            self.epoch = JOIN_GROUP_MEMBER_EPOCH
        yield self.world.between(self.backoff_ms, 3 * self.backoff_ms)

    def _take(self, assigned: Any) -> bool:
        """Let go first, then take. Whether anything moved."""
        wanted = {partition for partitions in assigned.values() for partition in partitions}
        if wanted == self.owned:
            return False
        self.owned &= wanted
        key = self.cluster.partitions(CONSUMER_OFFSETS)[0]
        for partition in sorted(wanted - self.owned):
            self.ownership.takes(self, partition, key)
            self.owned.add(partition)
            self._positions.pop(partition, None)
            self.counts["partitions taken"] += 1
        return True

    def _leave(self) -> Steps:
        """For good, or for a while if it is static; what it has it lets go of first."""
        epoch = (
            LEAVE_GROUP_STATIC_MEMBER_EPOCH
            if self.instance is not None and self.world.chance(0.7)
            else LEAVE_GROUP_MEMBER_EPOCH
        )
        self.owned.clear()
        self.counts["members left"] += 1
        for _ in range(_LEAVE_ATTEMPTS):
            reply = yield self._asked(self._beat(epoch))
            if isinstance(reply, ConsumerHeartbeatReply):
                break
            yield self.backoff_ms
        self.is_over = True

    # --- offsets ---

    def _commit(self) -> Steps:
        owned = sorted(self.owned)
        partition = owned[self.world.draw(len(owned))]
        if partition not in self._positions:
            yield from self._read(partition)
            return
        offset, known = self._positions[partition] + 1, self.ownership.committed.get(partition, -1)
        epoch = self.epoch
        position = OffsetToCommit(
            topic=TOPIC, partition=partition, offset=offset, metadata=signature(self.member_id, epoch)
        )
        request = CommitRequest(
            group_id=GROUP, member_id=self.member_id, generation=epoch, offsets=(position,)
        )
        key = self.cluster.partitions(CONSUMER_OFFSETS)[0]
        reply = yield Ask(
            key,
            "group",
            (key, lambda shard, token, now_ms: shard.commit(request, token, now_ms=now_ms)),
        )
        if isinstance(reply, PartitionsReply) and reply.error is ErrorCode.none:
            self.counts["offsets committed"] += 1
            self.ownership.told(partition, offset, known)
            self._positions[partition] = offset
        else:
            # Nobody knows, so it asks before it goes on.
            self._positions.pop(partition, None)
        self.ownership.look(key)

    def _read(self, partition: int) -> Steps:
        key = self.cluster.partitions(CONSUMER_OFFSETS)[0]
        known = self.ownership.committed.get(partition, -1)
        question = (key, lambda shard: shard.fetch(GROUP, [(TOPIC, partition)]))
        reply = yield Ask(key, "group_read", question)
        is_newest, found = reply if isinstance(reply, tuple) else (False, ())
        if is_newest and len(found) == 1:
            stored = found[0].committed
            offset = -1 if stored is None else stored.offset
            self.ownership.told(partition, offset, known)
            self.counts["offsets read"] += 1
            self._positions[partition] = offset
