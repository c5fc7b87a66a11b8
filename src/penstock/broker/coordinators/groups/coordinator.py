"""Consumer groups on the coordinator runtime."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from penstock.broker.group_topics import GroupTopics
from penstock.broker.internal_topics import OFFSETS
from penstock.broker.sharded_coordinator import ShardedCoordinator
from penstock.cluster.delta import ImageDelta
from penstock.groups.settings import GroupSettings
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.coordinator_runtime import Token, Work
    from penstock.broker.node import Node
    from penstock.broker.settings import Settings
    from penstock.groups.shard import GroupShard
    from penstock.log.transactions import VerificationGuard
    from penstock.protocol.records import EndMarker

logger = logging.getLogger("penstock.groups")

OFFSETS_TOPIC: Final = OFFSETS.name
_MINUTE_MS: Final = 60_000
_NO_COORDINATOR: Final = frozenset(
    {
        ErrorCode.not_coordinator,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
    }
)


class GroupCoordinator(ShardedCoordinator["GroupShard"]):
    """`node.groups`: what the group handlers talk to."""

    _IMPOSSIBLE_KEY = ErrorCode.invalid_group_id

    def __init__(self, node: Node) -> None:
        super().__init__(node, OFFSETS)
        self._settings = group_settings(node.settings)
        self._groups_max = node.settings.integer("penstock.groups.max")
        self._room_left = 0  # groups that may be made before they have to be counted again
        self.topics = GroupTopics(node)

    def image_changed(self, delta: ImageDelta) -> None:
        """Deleted topics take their offsets with them."""
        self._room_left = 0  # shards may come with their groups
        self.topics.image_changed(delta)
        deleted = tuple(topic.name for topic in delta.topics_deleted if topic.name != OFFSETS_TOPIC)
        if deleted and self.shards():
            self._node.spawn(self._forget_topics(deleted))
        super().image_changed(delta)

    def check_room(self, group_id: str) -> None:
        """Raises ApiError POLICY_VIOLATION for a group that would be one too many on this node."""
        self._room_left -= 1
        if self._room_left >= 0:
            return
        self._room_left = self._groups_max - sum(len(shard.groups) for shard in self.loaded_shards()) - 1
        if self._room_left >= 0:
            return
        shard = self._runtime.loaded_shard(self.shard_of(group_id))
        if shard is not None and group_id not in shard.groups:
            message = f"This node has {self._groups_max} groups, which is penstock.groups.max."
            raise ApiError(ErrorCode.policy_violation, message)

    async def write_verified(
        self, group_id: str, operation: Callable[[GroupShard, Token], Work], guard: VerificationGuard | None
    ) -> Any:
        """As `write`, for a producer's transaction: refused if that may have ended since it was verified."""
        return await self._runtime.write(self.shard_of(group_id), operation, guard)

    async def write_marker(self, index: int, marker: EndMarker, transaction_version: int = 0) -> None:
        """End a transaction in one of the shards. Returns once that is committed.

        Raises ApiError; who asks is a broker and knows partitions, not coordinators.
        """
        try:
            await self._runtime.write_marker(index, marker, transaction_version)
        except ApiError as error:
            if error.code in _NO_COORDINATOR:
                raise ApiError(ErrorCode.not_leader_or_follower) from error
            raise

    @staticmethod
    def new_member_id(prefix: str) -> str:
        return f"{prefix}-{uuid4()}"

    def _new_shard(self) -> GroupShard:
        from penstock.broker.group_settings import effective_group_settings
        from penstock.groups.shard import GroupShard

        return GroupShard(self._settings, self.topics, partial(effective_group_settings, self._node))

    async def _forget_topics(self, topics: tuple[str, ...]) -> None:
        now_ms = self._node.now_ms()
        results = await asyncio.gather(
            *(
                self.write_shard(
                    index, lambda shard, token: shard.forget_topics(topics, token, now_ms=now_ms)
                )
                for index in self.shards()
            ),
            return_exceptions=True,
        )
        for error in {repr(result) for result in results if isinstance(result, Exception)}:
            logger.warning("some offsets of the deleted topics %s remain: %s", topics, error)


def group_settings(settings: Settings) -> GroupSettings:
    return GroupSettings(
        session_timeout_min_ms=settings.integer("group.min.session.timeout.ms"),
        session_timeout_max_ms=settings.integer("group.max.session.timeout.ms"),
        initial_rebalance_delay_ms=settings.integer("group.initial.rebalance.delay.ms"),
        size_max=settings.integer("group.max.size"),
        offset_metadata_max_bytes=settings.integer("offset.metadata.max.bytes"),
        offsets_retention_ms=settings.integer("offsets.retention.minutes") * _MINUTE_MS,
        offsets_retention_check_interval_ms=settings.integer("offsets.retention.check.interval.ms"),
        consumer_session_timeout_ms=settings.integer("group.consumer.session.timeout.ms"),
        consumer_size_max=settings.integer("group.consumer.max.size"),
        consumer_assignors=settings.strings("group.consumer.assignors"),
        consumer_migration_policy=settings.string("group.consumer.migration.policy"),
        share_session_timeout_ms=settings.integer("group.share.session.timeout.ms"),
        share_size_max=settings.integer("group.share.max.size"),
        streams_session_timeout_ms=settings.integer("group.streams.session.timeout.ms"),
        streams_size_max=settings.integer("group.streams.max.size"),
    )
