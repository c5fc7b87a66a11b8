"""A shard with share groups, its log, topics that change, and members that may miss replies."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from penstock.groups.group import GroupResult
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.modern_group import (
    JOIN_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_MEMBER_EPOCH,
    NO_PARTITIONS,
    Assignment,
)
from penstock.groups.share.share_group import (
    ShareGroup,
    ShareHeartbeatReply,
    ShareHeartbeatRequest,
    StartOffsets,
)
from penstock.groups.share.share_group_offsets import (
    begin_alter_offsets,
    begin_delete_offsets,
    state_deleted,
    state_initialized,
)
from penstock.groups.share.share_heartbeat import share_group_heartbeat
from penstock.groups.topics import Topic
from penstock.protocol.errors import ErrorCode

GROUP = "g"
SESSION_MS = 1_000


class World:
    """`topics` for the shard: a topic that is made again has another id."""

    def __init__(self) -> None:
        self.version = 0
        self.now_ms = 0
        self._topics: dict[str, Topic] = {}
        self._ids = 0
        self.settings = GroupCoordinatorConfig(share_session_timeout_ms=SESSION_MS)
        self.log: list[tuple[bytes, bytes | None]] = []
        self.load()

    # Topics

    def get(self, name: str) -> Topic | None:
        return self._topics.get(name)

    def by_id(self, id: UUID) -> Topic | None:
        return next((topic for topic in self._topics.values() if topic.id == id), None)

    def names(self) -> list[str]:
        return list(self._topics)

    def name_of(self, id: UUID) -> str:
        topic = self.by_id(id)
        return f"#{id.int}" if topic is None else topic.name

    def put_topic(self, name: str, partitions: int) -> None:
        """0 partitions delete it; a topic that exists grows at most."""
        self.version += 1
        known = self._topics.get(name)
        if not partitions:
            self._topics.pop(name, None)
        elif known is None:
            self._ids += 1
            self._topics[name] = Topic(name, UUID(int=self._ids), (frozenset(),) * partitions)
        elif partitions > known.partition_count:
            self._topics[name] = known._replace(racks=(frozenset(),) * partitions)

    # The shard

    def load(self) -> None:
        self.shard = GroupCoordinatorShard(self.settings, self)
        for key, value in self.log:
            self.shard.replay(key, value)
        self.apply(self.shard.loaded(self.now_ms))

    def apply(self, work: GroupResult) -> Any:
        for record in work.records:
            self.log.append(record)
            self.shard.replay(*record)
        return work.replies[0][1] if work.replies else None

    def pass_time(self, ms: int) -> None:
        end_ms = self.now_ms + ms
        while (due_ms := self.shard.next_deadline_ms()) is not None and due_ms <= end_ms:
            self.now_ms = max(due_ms, self.now_ms)
            self.apply(self.shard.tick(self.now_ms))
        self.now_ms = end_ms

    @property
    def group(self) -> ShareGroup | None:
        group = self.shard.groups.get(GROUP)
        assert group is None or isinstance(group, ShareGroup)
        return group

    # What is asked

    def beat(self, member_id: str, epoch: int, topics: tuple[str, ...] | None) -> ShareHeartbeatReply:
        request = ShareHeartbeatRequest(
            group_id=GROUP,
            member_id=member_id,
            member_epoch=epoch,
            client_id=f"client of {member_id}",
            client_host="/host",
            topic_names=topics,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=100,
        )
        reply = self.apply(share_group_heartbeat(self.shard, request, "token", now_ms=self.now_ms))
        assert isinstance(reply, ShareHeartbeatReply)
        return reply

    def initialized(self, places: Assignment) -> None:
        self.apply(state_initialized(self.shard, GROUP, places, "token", now_ms=self.now_ms))

    def deleted(self, *topic_ids: UUID) -> None:
        self.apply(state_deleted(self.shard, GROUP, topic_ids, "token", now_ms=self.now_ms))

    def alter(self, offsets: StartOffsets) -> Any:
        return self.apply(begin_alter_offsets(self.shard, GROUP, offsets, "token", now_ms=self.now_ms))

    def delete(self, names: tuple[str, ...] | None) -> Any:
        return self.apply(begin_delete_offsets(self.shard, GROUP, names, "token", now_ms=self.now_ms))

    def delete_group(self) -> ErrorCode:
        reply = self.apply(self.shard.delete_groups((GROUP,), "token", now_ms=self.now_ms))
        assert isinstance(reply[GROUP], ErrorCode)
        return reply[GROUP]


class Member:
    """What a client keeps of what it was told."""

    def __init__(self, world: World, member_id: str) -> None:
        self.world = world
        self.member_id = member_id
        self.epoch = JOIN_GROUP_MEMBER_EPOCH
        self.assigned: Assignment = NO_PARTITIONS

    def join(self, *topics: str) -> ShareHeartbeatReply:
        self.epoch, self.assigned = JOIN_GROUP_MEMBER_EPOCH, NO_PARTITIONS
        return self.beat(topics)

    def beat(self, topics: tuple[str, ...] | None = None, *, is_heard: bool = True) -> ShareHeartbeatReply:
        """The reply may not arrive."""
        reply = self.world.beat(self.member_id, self.epoch, topics)
        if is_heard and reply.error is ErrorCode.none:
            self.epoch = reply.member_epoch
            self.assigned = self.assigned if reply.assigned is None else reply.assigned
        return reply

    def leave(self) -> ShareHeartbeatReply:
        reply = self.world.beat(self.member_id, LEAVE_GROUP_MEMBER_EPOCH, None)
        self.epoch, self.assigned = JOIN_GROUP_MEMBER_EPOCH, NO_PARTITIONS
        return reply
