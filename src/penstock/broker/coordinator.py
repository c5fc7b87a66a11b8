"""Consumer groups on the coordinator runtime: which shard a group lives in, and the topic that keeps them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import uuid4

from penstock.broker.coordinator_runtime import CoordinatorRuntime, Token
from penstock.broker.topic_creation import create_topics_in_cluster
from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.delta import ImageDelta
from penstock.groups.hashing import partition_of
from penstock.groups.settings import GroupSettings
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.node import Node
    from penstock.broker.settings import Settings
    from penstock.groups.shard import GroupShard
    from penstock.groups.work import Work

logger = logging.getLogger("penstock.groups")

OFFSETS_TOPIC: Final = "__consumer_offsets"
_MINUTE_MS: Final = 60_000
#: Made by us, by another broker a moment ago, or made but without room on a disk for now.
_TOPIC_IS_THERE: Final = frozenset(
    {ErrorCode.none, ErrorCode.topic_already_exists, ErrorCode.kafka_storage_error}
)
#: No longer id can be stored, and hashing one would hold up everyone else.
_GROUP_ID_CHARACTERS_MAX: Final = 32_767

Result = TypeVar("Result")


class GroupCoordinator:
    """`node.groups`: what the group handlers talk to."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._settings = group_settings(node.settings)
        self._creating: asyncio.Task[None] | None = None
        self._runtime: CoordinatorRuntime[GroupShard] = CoordinatorRuntime(
            new_shard=self._new_shard,
            find_partition=lambda index: node.partitions.led(OFFSETS_TOPIC, index),
            now_ms=node.now_ms,
            in_thread=node.in_thread,
            commit_timeout_s=node.settings.integer("offsets.commit.timeout.ms") / 1000,
        )

    async def start(self) -> None:
        """Load what was stored, one shard after the other: time runs out for absent members unasked."""
        for index in self._shards():
            await asyncio.wait((self._runtime.load(index),))

    def image_changed(self, delta: ImageDelta) -> None:
        """Deleted topics take their offsets with them; shards begin to serve where they are led, and end elsewhere."""
        deleted = tuple(topic.name for topic in delta.topics_deleted if topic.name != OFFSETS_TOPIC)
        if deleted and self._shards():
            self._node.spawn(self._forget_topics(deleted))
        for topic, index in delta.partitions_changed:
            if topic != OFFSETS_TOPIC:
                continue
            if self._node.partitions.led(topic, index) is not None:
                self._runtime.load(index)
            else:
                self._runtime.unload(index)

    def close(self) -> None:
        self._runtime.close()

    @property
    def has_topic(self) -> bool:
        """Whether the topic is there, with all its partitions."""
        return OFFSETS_TOPIC in self._node.image.topics and self._creating is None

    async def ensure_topic(self) -> None:
        """The topic is made when the first group needs it. Raises ApiError when it cannot be."""
        if self.has_topic:
            return
        if self._creating is None:
            self._creating = self._node.spawn(self._create_topic())
        await asyncio.shield(self._creating)

    def shard_of(self, group_id: str) -> int:
        """Raises ApiError while there are no shards."""
        if len(group_id) > _GROUP_ID_CHARACTERS_MAX:
            raise ApiError(ErrorCode.invalid_group_id)
        topic = self._node.image.topics.get(OFFSETS_TOPIC)
        if topic is None:
            raise ApiError(ErrorCode.not_coordinator)
        return partition_of(group_id, len(topic.partitions))

    async def write(self, group_id: str, operation: Callable[[GroupShard, Token], Work]) -> Any:
        return await self._runtime.write(self.shard_of(group_id), operation)

    async def read(self, group_id: str, question: Callable[[GroupShard], Result]) -> Result:
        return await self._runtime.read(self.shard_of(group_id), question)

    async def read_all(self, question: Callable[[GroupShard], Result]) -> Sequence[Result]:
        return await asyncio.gather(*(self._runtime.read(index, question) for index in self._shards()))

    def now_ms(self) -> int:
        return self._node.now_ms()

    @staticmethod
    def new_member_id(prefix: str) -> str:
        return f"{prefix}-{uuid4()}"

    def _new_shard(self) -> GroupShard:
        # The rules and their schemas are loaded with the first shard, not with the node.
        from penstock.groups.shard import GroupShard

        return GroupShard(self._settings)

    async def _forget_topics(self, topics: tuple[str, ...]) -> None:
        now_ms = self._node.now_ms()
        results = await asyncio.gather(
            *(
                self._runtime.write(
                    index, lambda shard, token: shard.forget_topics(topics, token, now_ms=now_ms)
                )
                for index in self._shards()
            ),
            return_exceptions=True,
        )
        for error in {repr(result) for result in results if isinstance(result, Exception)}:
            logger.warning("some offsets of the deleted topics %s remain: %s", topics, error)

    def _shards(self) -> list[int]:
        topic = self._node.image.topics.get(OFFSETS_TOPIC)
        if topic is None:
            return []
        led = self._node.partitions.led
        return [index for index in topic.partitions if led(OFFSETS_TOPIC, index) is not None]

    async def _create_topic(self) -> None:
        try:
            (result,) = await create_topics_in_cluster(self._node, [self._new_topic()])
        finally:
            self._creating = None
        if result.error not in _TOPIC_IS_THERE:
            logger.error("cannot create %s: %s", OFFSETS_TOPIC, result.message)
            raise ApiError(ErrorCode.coordinator_not_available, result.message)

    def _new_topic(self) -> NewTopic:
        settings = self._node.settings
        return NewTopic(
            name=OFFSETS_TOPIC,
            partitions=settings.integer("offsets.topic.num.partitions"),
            replication_factor=self._replication_factor(),
            configs=(
                ("cleanup.policy", "compact"),
                ("compression.type", "producer"),
                ("segment.bytes", str(settings.integer("offsets.topic.segment.bytes"))),
                # A large group's record may exceed what clients may send in one batch.
                ("max.message.bytes", str(settings.integer("socket.request.max.bytes"))),
            ),
        )

    def _replication_factor(self) -> int:
        """Fewer while there are fewer brokers; the controller raises it when there are more."""
        brokers = len(self._node.image.active_brokers())
        return max(1, min(self._node.settings.integer("offsets.topic.replication.factor"), brokers))


def group_settings(settings: Settings) -> GroupSettings:
    return GroupSettings(
        session_timeout_min_ms=settings.integer("group.min.session.timeout.ms"),
        session_timeout_max_ms=settings.integer("group.max.session.timeout.ms"),
        initial_rebalance_delay_ms=settings.integer("group.initial.rebalance.delay.ms"),
        size_max=settings.integer("group.max.size"),
        offset_metadata_max_bytes=settings.integer("offset.metadata.max.bytes"),
        offsets_retention_ms=settings.integer("offsets.retention.minutes") * _MINUTE_MS,
        offsets_retention_check_interval_ms=settings.integer("offsets.retention.check.interval.ms"),
    )
