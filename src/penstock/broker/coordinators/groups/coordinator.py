"""The group coordinator of a broker, on the coordinator runtime, and the topics of the cluster image as the group
rules see them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid4

from penstock.broker.config.internal_topics import CONSUMER_OFFSETS_TOPIC
from penstock.broker.coordinators.runtime.sharded_coordinator import ShardedCoordinator
from penstock.broker.environment import Lazy
from penstock.cluster.image import ImageDelta
from penstock.groups.group_config import GroupCoordinatorConfig
from penstock.groups.topics import Topic
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.coordinators.groups.group_config import GroupConfigManager
    from penstock.broker.coordinators.runtime.runtime import CoordinatorResult, Token
    from penstock.broker.coordinators.runtime.sharded_coordinator import CoordinatorContext
    from penstock.broker.environment import ImageView
    from penstock.cluster.image import TopicState
    from penstock.groups.group_config import GroupConfig
    from penstock.groups.group_shard import GroupCoordinatorShard
    from penstock.log.producer_state import VerificationGuard
    from penstock.protocol.record_batch import EndMarker


class GroupTopics:
    """The topics that groups subscribe to. `version` changes only when something changes that groups depend on.

    Leaders and in-sync replicas change often and do not affect groups, so they do not change `version`.
    """

    def __init__(self, metadata: ImageView) -> None:
        self._metadata = metadata
        self._known: dict[str, Topic] = {}
        self._racks: dict[int, str | None] = {}
        self.version = 0

    def get(self, name: str) -> Topic | None:
        known = self._known.get(name)
        if known is None:
            state = self._metadata.image.topics.get(name)
            if state is not None:
                known = self._known[name] = self._topic(state)
        return known

    def by_id(self, id: UUID) -> Topic | None:
        state = self._metadata.image.topics_by_id.get(id)
        return None if state is None else self.get(state.name)

    def names(self) -> Collection[str]:
        return self._metadata.image.topics.keys()

    def image_changed(self, delta: ImageDelta) -> None:
        """Called as soon as the new image is visible, before any group operation reads it."""
        is_news = bool(delta.topics_deleted or delta.topics_created)
        for topic in (*delta.topics_deleted, *delta.topics_created):
            self._known.pop(topic.name, None)
        if delta.brokers_changed:
            racks = {broker.id: broker.rack for broker in self._metadata.image.brokers.values()}
            if racks != self._racks:
                self._racks = racks
                self._known.clear()
                is_news = True
        for name in dict.fromkeys(topic for topic, _ in delta.partitions_changed):
            known = self._known.pop(name, None)
            is_news |= known is not None and known != self.get(name)
        self.version += is_news

    def _topic(self, state: TopicState) -> Topic:
        """Partition numbers run from 0 without gaps; `state.partitions` may hold them in any order."""
        partitions = state.partitions
        racks = (self._racks_of(partitions[number].replicas) for number in range(len(partitions)))
        return Topic(state.name, state.id, tuple(racks))

    def _racks_of(self, replicas: tuple[int, ...]) -> frozenset[str]:
        racks = (self._racks.get(broker_id) for broker_id in replicas)
        return frozenset(rack for rack in racks if rack is not None)


logger = logging.getLogger("penstock.groups")

OFFSETS_TOPIC: Final = CONSUMER_OFFSETS_TOPIC.name
_MINUTE_MS: Final = 60_000
_COORDINATOR_MOVED_CODES: Final = frozenset(
    {
        ErrorCode.not_coordinator,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
    }
)


class GroupCoordinator(ShardedCoordinator["GroupCoordinatorShard"]):
    _INVALID_KEY_CODE = ErrorCode.invalid_group_id

    def __init__(self, context: CoordinatorContext) -> None:
        super().__init__(context, CONSUMER_OFFSETS_TOPIC)
        self._settings = group_settings(context.settings)
        self._configs = Lazy(self._new_configs)
        self._groups_max = context.settings.integer("penstock.groups.max")
        self._groups_left = 0  # groups that may still be created before the existing groups are counted again
        #: Raises ApiError if the tenant of a new group may not have it; None in a cluster without tenants.
        self.check_tenant: Callable[[str], None] | None = None
        self.topics = GroupTopics(context.metadata)
        #: Held by a request that reads all groups, so that such requests run one after the other.
        self.scan_lock = asyncio.Lock()

    def image_changed(self, delta: ImageDelta) -> None:
        """Remove the committed offsets of deleted topics."""
        self._groups_left = 0  # newly led shards may bring groups
        self.topics.image_changed(delta)
        deleted = tuple(topic.name for topic in delta.topics_deleted if topic.name != OFFSETS_TOPIC)
        if deleted and self.shards():
            self._environment.spawn(self._forget_topics(deleted))
        super().image_changed(delta)

    def config(self, group_id: str) -> GroupConfig:
        """Return the effective configuration of a group. It is cached, so every request may call this."""
        return self._configs().of(group_id)

    def check_group_limit(self, group_id: str) -> None:
        """Raise ApiError POLICY_VIOLATION if the group is new and this node, or its tenant, may have no more groups."""
        if self.check_tenant is not None:
            shard = self._runtime.loaded_shard(self.shard_of(group_id))
            if shard is not None and group_id not in shard.groups:
                self.check_tenant(group_id)
        self._groups_left -= 1
        if self._groups_left >= 0:
            return
        self._groups_left = self._groups_max - sum(len(shard.groups) for shard in self.loaded_shards()) - 1
        if self._groups_left >= 0:
            return
        shard = self._runtime.loaded_shard(self.shard_of(group_id))
        if shard is not None and group_id not in shard.groups:
            message = f"This node has {self._groups_max} groups, which is penstock.groups.max."
            raise ApiError(ErrorCode.policy_violation, message)

    async def write_verified(
        self,
        group_id: str,
        operation: Callable[[GroupCoordinatorShard, Token], CoordinatorResult],
        guard: VerificationGuard | None,
    ) -> Any:
        """Like `write`, for records in a transaction; fails if it may have ended since it was verified."""
        return await self._runtime.write(self.shard_of(group_id), operation, guard)

    async def write_marker(self, index: int, marker: EndMarker, transaction_version: int = 0) -> None:
        """Write a transaction marker to one of the shards. Returns once the marker is committed.

        Raises ApiError. A "coordinator moved" error becomes NOT_LEADER_OR_FOLLOWER, because the caller is a broker that
        looks up the leaders of partitions, not coordinators.
        """
        try:
            await self._runtime.write_marker(index, marker, transaction_version)
        except ApiError as error:
            if error.code in _COORDINATOR_MOVED_CODES:
                raise ApiError(ErrorCode.not_leader_or_follower) from error
            raise

    @staticmethod
    def new_member_id(prefix: str) -> str:
        return f"{prefix}-{uuid4()}"

    def _new_shard(self) -> GroupCoordinatorShard:
        from penstock.groups.group_shard import GroupCoordinatorShard

        return GroupCoordinatorShard(self._settings, self.topics, self.config)

    def _new_configs(self) -> GroupConfigManager:
        # Imported here, so that a node without groups starts faster.
        from penstock.broker.coordinators.groups.group_config import GroupConfigManager

        return GroupConfigManager(self._context.settings, self._context.metadata)

    async def _forget_topics(self, topics: tuple[str, ...]) -> None:
        now_ms = self._environment.now_ms()
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


def group_settings(settings: NodeSettings) -> GroupCoordinatorConfig:
    return GroupCoordinatorConfig(
        hides_topics=bool(settings.string("authorizer.class.name")),
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
