"""Members of a consumer group: they join, divide the partitions, commit, and compare what they are told."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from penstock.groups.group import (
    CommitRequest,
    CoordinatorResult,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    OffsetToCommit,
    PartitionsReply,
    SyncReply,
    SyncRequest,
)
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.protocol.errors import ErrorCode
from simulation.clients import Sleeper
from simulation.coordinator import OFFSETS_TOPIC, Token
from simulation.ledger import Violation

if TYPE_CHECKING:
    from simulation.cluster import Cluster

_GROUP: Final = "g"
_TOPIC: Final = "orders"
_SESSION_MS: Final = 300

Operation = Callable[[GroupCoordinatorShard, Token, int], CoordinatorResult]


class GroupHistory:
    """What members were told, over all of them: owners by generation, and committed offsets, which only grow."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.owners: dict[tuple[int, int], str] = {}
        self.committed: dict[int, int] = dict.fromkeys(range(partitions), -1)

    def owned(self, generation: int, partition: int, member: str) -> None:
        known = self.owners.setdefault((generation, partition), member)
        if known != member:
            raise Violation(
                "one owner per generation",
                f"partition {partition} in generation {generation}: {known}, {member}",
            )

    def told(self, partition: int, offset: int, known_before: int) -> None:
        """A read, or a commit that was confirmed. Nothing that was told before it was asked is taken back."""
        if offset < known_before:
            raise Violation(
                "committed offsets never go back",
                f"partition {partition}: {offset} after {known_before} was told",
            )
        self.committed[partition] = max(self.committed[partition], offset)


class Member(Sleeper):
    def __init__(self, cluster: Cluster, id: int, counts: Counter[str], history: GroupHistory) -> None:
        super().__init__(cluster, id, counts)
        self.history = history
        self.member_id = ""
        self.generation = -1
        self.owned: list[int] = []
        self.is_working = False
        self._positions: dict[int, int] = {}
        self._ids = 0
        self._attempt = 0

    @property
    def is_busy(self) -> bool:
        return self.is_working and bool(self.owned)

    def awoken(self) -> None:
        self.commit()

    def join(self) -> None:
        self.is_working = False
        self._attempt += 1
        self._ids += 1
        request = JoinRequest(
            group_id=_GROUP,
            member_id=self.member_id,
            client_id=f"c{self.id}",
            client_host="/host",
            session_timeout_ms=_SESSION_MS,
            rebalance_timeout_ms=_SESSION_MS,
            protocol_type="consumer",
            protocols=(("range", b""),),
        )
        fresh = f"m{-self.id}-{self._ids}"
        self._ask(
            lambda shard, token, now_ms: shard.join(request, token, now_ms=now_ms, new_member_id=fresh),
            self._joined,
        )

    def commit(self) -> None:
        """A little further in one of the partitions that it owns."""
        if not self.is_working or not self.owned or self.is_asleep:
            return
        partition = self.owned[self.world.draw(len(self.owned))]
        if partition not in self._positions:
            self.read(partition)
            return
        self.is_working = False  # until it is answered: one at a time
        offset = self._positions[partition] + 1
        request = CommitRequest(
            group_id=_GROUP,
            member_id=self.member_id,
            generation=self.generation,
            offsets=(OffsetToCommit(topic=_TOPIC, partition=partition, offset=offset),),
        )
        known = self.history.committed[partition]
        self._ask(
            lambda shard, token, now_ms: shard.commit(request, token, now_ms=now_ms),
            lambda reply: self._committed(partition, offset, known, reply),
        )

    def read(self, partition: int) -> None:
        """Anybody may ask what is committed."""
        key, leader = self._coordinator()
        if leader < 0 or self.is_asleep:
            return
        known, generation = self.history.committed[partition], self.generation

        def answered(reply: Any, _: bool) -> None:
            is_newest, found = reply if isinstance(reply, tuple) else (False, ())
            if is_newest and len(found) == 1:
                stored = found[0].committed
                offset = -1 if stored is None else stored.offset
                self.history.told(partition, offset, known)
                self.counts["offsets read"] += 1
                if generation == self.generation:
                    self._positions[partition] = offset

        self.call(
            leader, "group_read", (key, lambda shard: shard.fetch(_GROUP, [(_TOPIC, partition)])), answered
        )

    def _committed(self, partition: int, offset: int, known: int, reply: Any) -> None:
        if isinstance(reply, PartitionsReply) and reply.error is ErrorCode.none:
            self.is_working = True
            self._positions[partition] = offset
            self.counts["offsets committed"] += 1
            self.history.told(partition, offset, known)
        else:
            self._start_over(reply)

    def _joined(self, reply: Any) -> None:
        if not isinstance(reply, JoinReply):
            self._start_over(reply)
        elif reply.error is ErrorCode.member_id_required:
            self.member_id = reply.member_id
            self.join()
        elif reply.error is not ErrorCode.none:
            self._start_over(reply)
        else:
            self.member_id, self.generation = reply.member_id, reply.generation
            self._sync(reply)

    def _sync(self, joined: JoinReply) -> None:
        members = [member.member_id for member in joined.members]
        shares: dict[str, list[int]] = {member: [] for member in members}
        if members:
            for partition in range(self.history.partitions):
                shares[members[partition % len(members)]].append(partition)
        request = SyncRequest(
            group_id=_GROUP,
            generation=self.generation,
            member_id=self.member_id,
            assignments=tuple((member, json.dumps(share).encode()) for member, share in shares.items()),
        )
        self._ask(lambda shard, token, now_ms: shard.sync(request, token, now_ms=now_ms), self._synced)

    def _synced(self, reply: Any) -> None:
        if not isinstance(reply, SyncReply) or reply.error is not ErrorCode.none:
            self._start_over(reply)
            return
        self.owned = json.loads(reply.assignment or b"[]")
        for partition in self.owned:
            self.history.owned(self.generation, partition, self.member_id)
        self._positions.clear()
        self.is_working = True
        self.counts["generations joined"] += 1
        self.after(_SESSION_MS // 4, self._beat, self.generation)

    def _beat(self, generation: int) -> None:
        if generation != self.generation or (not self.owned and not self.is_working):
            return
        request = HeartbeatRequest(group_id=_GROUP, generation=generation, member_id=self.member_id)
        self._ask(
            lambda shard, token, now_ms: shard.heartbeat(request, token, now_ms=now_ms),
            lambda reply: self._beaten(generation, reply),
        )

    def _beaten(self, generation: int, reply: Any) -> None:
        if generation != self.generation:
            return
        error = getattr(reply, "error", None)
        if error in (ErrorCode.none, None):
            self.after(_SESSION_MS // 4, self._beat, generation)
        else:
            self._start_over(reply)

    def _start_over(self, reply: Any) -> None:
        """Look for the coordinator again, and join anew."""
        self.is_working = False
        self.generation = -1
        if getattr(reply, "error", reply) in (ErrorCode.unknown_member_id, ErrorCode.fenced_instance_id):
            self.member_id = ""
        self._attempt += 1
        self.after(self.world.between(self.backoff_ms, 3 * self.backoff_ms), self._rejoin, self._attempt)

    def _rejoin(self, attempt: int) -> None:
        if attempt == self._attempt:
            self.join()

    def _coordinator(self) -> tuple[Any, int]:
        keys = self.cluster.partitions(OFFSETS_TOPIC)
        return (keys[0], self.cluster.leader_hint(keys[0])) if keys else (None, -1)

    def _ask(self, operation: Operation, on_reply: Callable[[Any], None]) -> None:
        key, leader = self._coordinator()
        attempt = self._attempt

        def answered(reply: Any, _: bool) -> None:
            if attempt == self._attempt:
                on_reply(reply)

        if leader < 0:
            self.after(self.backoff_ms, answered, None, False)
        else:
            self.call(leader, "group", (key, operation), answered)
