"""Initializes and deletes the state of a group's share partitions at the share coordinator, as the records of the
group say.

Members can read a share partition only when it has a state. The group's records list the share partitions whose state
must be initialized or deleted, and heartbeats request the work until it is done. Doing it twice is harmless, so
nothing is lost when a group coordinator stops halfway. The offsets of a share group are deleted here too: some of
them, or all of them before the group itself is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID
from weakref import WeakValueDictionary

from penstock.broker.coordinators.requests import gather_in_pieces
from penstock.groups.modern_group import Assignment, to_assignment
from penstock.groups.share.share_group_offsets import (
    begin_delete_offsets,
    current_state_changes,
    state_deleted,
    state_initialized,
)
from penstock.groups.share.state.share_state import UNSET
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.config.node_settings import NodeSettings
    from penstock.broker.coordinators.groups.coordinator import GroupCoordinator
    from penstock.broker.coordinators.share.persister import Persister
    from penstock.broker.environment import Tasks
    from penstock.groups.share.share_group import DeleteShareOffsetsReply


logger = logging.getLogger("penstock.share")

#: How long a joining member waits; after that it gets its partitions with a later heartbeat.
RECONCILE_WAIT_S: Final = 5.0
#: Requests that travel together. With more at a time, other requests would wait for all of them.
_REQUESTED_AT_ONCE: Final = 100

TopicIdPartition = tuple[UUID, int]
StateErrors = dict[TopicIdPartition, ApiError]


class ShareStateReconciler:
    """Works on one task per group at a time, so that requests arrive in order."""

    def __init__(
        self, *, settings: NodeSettings, groups: GroupCoordinator, persister: Persister, tasks: Tasks
    ) -> None:
        self._groups = groups
        self._persister = persister
        self._tasks = tasks
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._not_before_s: dict[str, float] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._rest_s = settings.integer("group.share.initialize.retry.interval.ms") / 1000

    def lock(self, group_id: str) -> asyncio.Lock:
        """Return the lock of a group. Hold it from before a change is decided until it is recorded as done."""
        return self._locks.setdefault(group_id, asyncio.Lock())

    async def settle(self, group_id: str) -> None:
        """Wait for the work, for a bounded time. The caller must check what is left to do."""
        task = self.begin(group_id)
        if task is not None:
            await asyncio.wait((task,), timeout=RECONCILE_WAIT_S)

    def begin(self, group_id: str) -> asyncio.Task[None] | None:
        """Start the work, unless it is already running or has failed recently."""
        task = self._under_way.get(group_id)
        if task is not None:
            return task
        if asyncio.get_running_loop().time() < self._not_before_s.get(group_id, 0):
            return None
        self._not_before_s.pop(group_id, None)
        task = self._under_way[group_id] = self._tasks.spawn(self._run(group_id))
        return task

    async def _run(self, group_id: str) -> None:
        try:
            async with self.lock(group_id):
                errors = await self._catch_up(group_id)
        except ApiError as error:
            # Another broker coordinates the group, or will do so.
            logger.info("share group %s cannot be reconciled now: %r", group_id, error)
            return
        finally:
            del self._under_way[group_id]
        for (topic_id, partition), reason in errors.items():
            logger.warning(
                "share group %s waits for partition %d of topic %s: %r", group_id, partition, topic_id, reason
            )
        if errors:
            self._not_before_s[group_id] = asyncio.get_running_loop().time() + self._rest_s

    async def _catch_up(self, group_id: str) -> StateErrors:
        upkeep = await self._groups.read(group_id, lambda shard: current_state_changes(shard, group_id))
        if upkeep is None:
            return {}
        errors = await self.delete(group_id, upkeep.epoch, upkeep.delete)
        starts = dict.fromkeys(_topic_id_partitions(upkeep.initialize), UNSET)
        return errors | await self.initialize(group_id, upkeep.epoch, starts)

    async def initialize(self, group_id: str, epoch: int, starts: dict[TopicIdPartition, int]) -> StateErrors:
        """Must be called under `lock`. Returns the errors by partition. Raises ApiError if it cannot be recorded."""
        initialize = self._persister.initialize

        def request(topic_id: UUID, partition: int) -> Awaitable[None]:
            start = starts[topic_id, partition]
            return initialize(group_id, topic_id, partition, state_epoch=epoch, start_offset=start)

        errors = await _request_all(list(starts), request)
        done = to_assignment(partition for partition in starts if partition not in errors)
        if done:
            now_ms = self._groups.now_ms()
            await self._groups.write(
                group_id, lambda shard, token: state_initialized(shard, group_id, done, token, now_ms=now_ms)
            )
        return errors

    async def delete(self, group_id: str, epoch: int, partitions: Assignment) -> StateErrors:
        """Must be called under `lock`. Returns the errors by partition. Raises ApiError if it cannot be recorded.

        A request may arrive after a new group coordinator has initialized the state again; the epoch protects that.
        """
        delete = self._persister.delete
        errors = await _request_all(
            _topic_id_partitions(partitions),
            lambda topic_id, partition: delete(group_id, topic_id, partition, state_epoch=epoch),
        )
        # Partitions that no longer exist have no state.
        gone = ErrorCode.unknown_topic_or_partition
        errors = {partition: error for partition, error in errors.items() if error.code is not gone}
        remain = {topic_id for topic_id, _ in errors}
        done = [topic_id for topic_id in partitions if topic_id not in remain]
        if done:
            now_ms = self._groups.now_ms()
            await self._groups.write(
                group_id, lambda shard, token: state_deleted(shard, group_id, done, token, now_ms=now_ms)
            )
        return errors

    def check_offsets_may_be_deleted(self, group_id: str) -> None:
        """Raises ApiError for an at-most-once group, because it must not deliver records again."""
        if self._groups.config(group_id).is_at_most_once:
            message = (
                f"The positions of group {group_id} stay, because penstock.share.delivery is at-most-once."
            )
            raise ApiError(ErrorCode.policy_violation, message)

    async def delete_offsets(self, group_id: str, topics: Sequence[str] | None) -> ShareOffsetsDeletion:
        """`topics` None means all topics. Raises ApiError; GROUP_ID_NOT_FOUND also for a group of another type."""
        groups = self._groups
        async with self.lock(group_id):
            reply: DeleteShareOffsetsReply = await groups.write(
                group_id,
                lambda shard, token: begin_delete_offsets(
                    shard, group_id, topics, token, now_ms=groups.now_ms()
                ),
            )
            if reply.error is not ErrorCode.none:
                raise ApiError(reply.error, reply.message)
            errors = await self.delete(group_id, reply.epoch, reply.partitions)
        return ShareOffsetsDeletion(reply.names, {topic_id: error for (topic_id, _), error in errors.items()})


def _topic_id_partitions(assigned: Assignment) -> list[TopicIdPartition]:
    return [(topic_id, index) for topic_id, indexes in assigned.items() for index in sorted(indexes)]


async def _request_all(
    partitions: list[TopicIdPartition], request: Callable[[UUID, int], Awaitable[None]]
) -> StateErrors:
    async def one(partition: TopicIdPartition) -> ApiError | None:
        try:
            await request(*partition)
        except ApiError as error:
            return error
        return None

    errors = await gather_in_pieces(one, partitions, at_once=_REQUESTED_AT_ONCE)
    return {
        partition: error for partition, error in zip(partitions, errors, strict=True) if error is not None
    }


class ShareOffsetsDeletion(NamedTuple):
    #: Names of the topics that had offsets.
    names: Mapping[UUID, str]
    #: Errors of the topics that still have offsets.
    errors: Mapping[UUID, ApiError]
