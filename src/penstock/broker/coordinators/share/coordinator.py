"""The share coordinator of a broker, on the coordinator runtime.

The five share group state handlers and the share partitions on this broker call it.

`StateTopicPruner` bounds the log of `__share_group_state`. The topic is not compacted, because its updates build on
each other. When the log of a shard has grown enough since the last time, the pruner writes all state of the shard
to the log once more and deletes what was in the log before. So the log stays a small multiple of the state, and a
load reads no more than that.
"""

from __future__ import annotations

import asyncio
import logging
from base64 import urlsafe_b64encode
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from penstock.broker.config.internal_topics import SHARE_STATE_TOPIC
from penstock.broker.coordinators.runtime.sharded_coordinator import ShardedCoordinator
from penstock.broker.coordinators.share.dead_letters import DeadLetterManager
from penstock.broker.coordinators.share.persister import Persister
from penstock.groups.share.state.share_state import (
    DeleteState,
    InitializeState,
    ReadState,
    SharePartitionKey,
    ShareStateReply,
    ShareStateRequest,
    WriteState,
)
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.coordinators.runtime.runtime import ActiveShard, CoordinatorResult, Token
    from penstock.broker.coordinators.runtime.sharded_coordinator import CoordinatorContext
    from penstock.broker.coordinators.share.state_messages import StateApi
    from penstock.broker.environment import PeerCalls
    from penstock.broker.network.requests import RequestContext
    from penstock.broker.partition.idempotent_append import PlannedAppends
    from penstock.cluster.image import ImageDelta
    from penstock.groups.group_config import GroupConfig
    from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard


logger = logging.getLogger("penstock.share")

#: With fewer records than this, pruning is not worth the effort.
_RECORDS_MIN: Final = 5_000
#: Prune when the log has this many times the records that were left after the last pruning.
_GROWTH_FACTOR: Final = 4
#: Share partitions that one checkpoint write covers, and about how many bytes.
_CHECKPOINT_PARTITIONS_MAX: Final = 100
_CHECKPOINT_BYTES_MAX: Final = 256 << 10


class StateTopicPruner:
    def __init__(self, coordinator: ShareCoordinator, context: CoordinatorContext) -> None:
        self._coordinator = coordinator
        self._settings = context.settings
        self._partitions = context.partitions
        self._environment = context.environment
        self._task: asyncio.Task[None] | None = None
        self._left: dict[int, int] = {}  # records left after the last pruning, by shard

    def start(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._environment.spawn(self._run())

    async def _run(self) -> None:
        interval_s = self._settings.integer("share.coordinator.state.topic.prune.interval.ms") / 1000
        while True:
            await asyncio.sleep(interval_s)
            for index in self._coordinator.shards():
                try:
                    await self.prune(index)
                except ApiError as error:
                    logger.info("share state of shard %d is pruned later: %r", index, error)
                except Exception:
                    # If this task ended, the log of no shard would be pruned any more.
                    logger.exception("share state of shard %d is pruned later", index)

    async def prune(self, index: int, *, records_min: int = _RECORDS_MIN) -> bool:
        """Prune the log of a shard if it has grown enough. Returns whether it did. Raises ApiError."""
        partition = self._partitions.led(self._coordinator.topic.name, index)
        if partition is None:
            return False
        grown = partition.log.end_offset - partition.log.start_offset
        if grown < max(_GROWTH_FACTOR * self._left.get(index, 0), records_min):
            return False
        active = await self._coordinator.active_shard(index)
        # All current state is written again after this offset, or changes after it.
        cut_offset = partition.log.end_offset
        config = partition.log.config
        # No batch may be larger than a segment, and the encoding adds some bytes.
        batch_bytes_max = min(config.segment_bytes, config.max_message_bytes) // 2
        await self._checkpoint_all(active, min(_CHECKPOINT_BYTES_MAX, batch_bytes_max))
        if active.is_closed or partition.high_watermark < cut_offset:
            return False
        partition.log.delete_records_before(cut_offset)
        partition.start_moved()
        self._left[index] = partition.log.end_offset - cut_offset
        return True

    async def _checkpoint_all(self, active: ActiveShard[ShareCoordinatorShard], bytes_max: int) -> None:
        names, written = active.shard.names(), 0

        def checkpoint(shard: ShareCoordinatorShard, token: Token) -> CoordinatorResult:
            some = names[written : written + _CHECKPOINT_PARTITIONS_MAX]
            return shard.checkpoint(some, token, now_ms=self._environment.now_ms(), bytes_max=bytes_max)

        while written < len(names):
            written += await active.submit(checkpoint)


#: Share partitions whose shard is cached; to compute it takes as long as a small write.
_CACHED_SHARDS_MAX: Final = 100_000
#: Strings are stored with a length of 16 bits.
_GROUP_BYTES_MAX: Final = 32_767
#: How many leader elections of a partition this node may not have received yet.
_EPOCHS_AHEAD_MAX: Final = 100


def coordinator_key(key: SharePartitionKey) -> str:
    """The key by which Kafka finds the coordinator of a share partition. The topic id is in Kafka's base 64."""
    topic_id = urlsafe_b64encode(key.topic_id.bytes).rstrip(b"=").decode()
    return f"{key.group}:{topic_id}:{key.partition}"


class ShareCoordinator(ShardedCoordinator["ShareCoordinatorShard"]):
    #: A topic id and a partition number in addition to the group id.
    _KEY_OVERHEAD_BYTES = 64

    def __init__(
        self,
        context: CoordinatorContext,
        *,
        appends: PlannedAppends,
        peers: Callable[[], PeerCalls],
        group_config: Callable[[str], GroupConfig],
    ) -> None:
        super().__init__(context, SHARE_STATE_TOPIC)
        self._group_config = group_config
        self._shards_by_key: dict[SharePartitionKey, int] = {}
        self._shard_count = 0
        self.persister = Persister(self, context, peers)
        self.dead_letters = DeadLetterManager(
            self, context, appends=appends, peers=peers, group_config=group_config
        )
        self._pruning = StateTopicPruner(self, context)

    def _new_shard(self) -> ShareCoordinatorShard:
        from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard

        updates = self._context.settings.integer("share.coordinator.snapshot.update.records.per.snapshot")
        return ShareCoordinatorShard(updates_per_snapshot=updates)

    def _led(self, index: int) -> None:
        self.dead_letters.serve(index)
        self._pruning.start()

    def image_changed(self, delta: ImageDelta) -> None:
        super().image_changed(delta)
        deleted = tuple(topic.id for topic in delta.topics_deleted)
        if deleted and self.shards():
            self._environment.spawn(self._forget_topics(deleted))

    async def forget_deleted(self, active: ActiveShard[ShareCoordinatorShard]) -> None:
        """Delete the state of topics that were deleted while the shard had no coordinator. Raises ApiError.

        The caller makes sure that the image includes the leader epoch of the shard.
        """
        known = self._image.topics_by_id
        gone = [topic_id for topic_id in active.shard.topic_ids() if topic_id not in known]
        if gone:
            await active.submit(lambda shard, token: shard.forget_topics(gone, token))

    async def _forget_topics(self, topic_ids: tuple[UUID, ...]) -> None:
        """A shard that cannot be written keeps the state until it is loaded again."""
        writes = (
            self.write_shard(index, lambda shard, token: shard.forget_topics(topic_ids, token))
            for index in self.shards()
        )
        for result in await asyncio.gather(*writes, return_exceptions=True):
            if isinstance(result, Exception):
                logger.info("some share state of deleted topics remains: %r", result)

    # -- lookup --------------------------------------------------------------------------------------

    def shard_of_key(self, key: SharePartitionKey) -> int:
        """The shard of a share partition. Raises ApiError while there are no shards."""
        topic = self._image.topics.get(self.topic.name)
        count = 0 if topic is None else len(topic.partitions)
        if count != self._shard_count or len(self._shards_by_key) > _CACHED_SHARDS_MAX:
            self._shards_by_key, self._shard_count = {}, count
        index = self._shards_by_key.get(key)
        if index is None:
            index = self._shards_by_key[key] = self.shard_of(coordinator_key(key))
        return index

    def topic_name(self, topic_id: UUID) -> str:
        """The name of a topic, or its id if the topic does not exist."""
        topic = self._image.topics_by_id.get(topic_id)
        return str(topic_id) if topic is None else topic.name

    def leader_of_shard(self, index: int) -> int | None:
        partition = self._image.partition(self.topic.name, index)
        return None if partition is None or not partition.has_leader else partition.leader

    # -- requests ------------------------------------------------------------------------------------

    async def handle(self, requests: Sequence[ShareStateRequest]) -> list[ShareStateReply]:
        """Handle requests; those to the same shard are decided and stored together. Errors are returned as replies."""
        replies: list[ShareStateReply] = [_NO_REPLY] * len(requests)
        by_shard: dict[int, list[int]] = {}
        again: list[int] = []
        seen: set[SharePartitionKey] = set()
        for number, request in enumerate(requests):
            flaw = self._validation_error(request.key) or self._refusal(request)
            if flaw is not None:
                replies[number] = flaw
            elif request.key in seen:
                again.append(number)  # handled after the first request for this key is stored
            else:
                seen.add(request.key)
                by_shard.setdefault(self.shard_of_key(request.key), []).append(number)
        handlers = [
            self._handle_in_shard(index, requests, numbers, replies) for index, numbers in by_shard.items()
        ]
        if len(handlers) == 1:
            await handlers[0]
        else:
            await asyncio.gather(*handlers)
        if again:
            rest = await self.handle([requests[number] for number in again])
            for number, reply in zip(again, rest, strict=True):
                replies[number] = reply
        return replies

    async def _handle_in_shard(
        self,
        index: int,
        requests: Sequence[ShareStateRequest],
        numbers: list[int],
        replies: list[ShareStateReply],
    ) -> None:
        mine, now_ms = [self._restrict(requests[number]) for number in numbers], self.now_ms()
        try:
            shard_replies: Sequence[ShareStateReply] = await self.write_shard(
                index, lambda shard, token: shard.handle(mine, token, now_ms=now_ms)
            )
        except ApiError as error:
            shard_replies = [ShareStateReply(error.code, error.message)] * len(mine)
        for number, reply in zip(numbers, shard_replies, strict=True):
            replies[number] = reply

    def _restrict(self, request: ShareStateRequest) -> ShareStateRequest:
        """Do not let any client move the start offset of an at-most-once group backwards."""
        if type(request) is InitializeState:
            group = self._group_config(request.key.group)
            return request._replace(only_forward=group.is_at_most_once)
        return request

    def _refusal(self, request: ShareStateRequest) -> ShareStateReply | None:
        """Refuse an impossible leader epoch, and the deletion of the state of an at-most-once group by any client."""
        if isinstance(request, ReadState | WriteState) and request.leader_epoch > self._leader_epoch_max(
            request.key
        ):
            return _UNKNOWN_LEADER_EPOCH
        if type(request) is not DeleteState:
            return None
        group = self._group_config(request.key.group)
        return _DELETION_REFUSED if group.is_at_most_once else None

    def _leader_epoch_max(self, key: SharePartitionKey) -> int:
        """The largest leader epoch to accept. A larger one would fence every real leader until its epoch reaches it."""
        partition = self._image.topics_by_id[key.topic_id].partitions[key.partition]
        return partition.leader_epoch + _EPOCHS_AHEAD_MAX

    def _validation_error(self, key: SharePartitionKey) -> ShareStateReply | None:
        """Return an error if the share partition itself is invalid, regardless of its state."""
        if not key.group or len(key.group.encode()) > _GROUP_BYTES_MAX:
            return ShareStateReply(
                ErrorCode.invalid_request, "The group id cannot be empty, nor longer than can be stored."
            )
        if key.topic_id is None:
            return ShareStateReply(ErrorCode.invalid_request, "The topic id cannot be null.")
        if key.partition < 0:
            return ShareStateReply(ErrorCode.invalid_request, "The partition id cannot be a negative number.")
        topic = self._image.topics_by_id.get(key.topic_id)
        if topic is None or key.partition not in topic.partitions:
            return ShareStateReply(ErrorCode.unknown_topic_or_partition)
        try:
            self.shard_of_key(key)
        except ApiError as error:
            return ShareStateReply(error.code, error.message)
        return None


_NO_REPLY: Final = ShareStateReply(ErrorCode.unknown_server_error)
_UNKNOWN_LEADER_EPOCH: Final = ShareStateReply(
    ErrorCode.invalid_request, "a leader epoch that the partition has not had"
)
_DELETION_REFUSED: Final = ShareStateReply(
    ErrorCode.policy_violation,
    "The positions of the group stay, because penstock.share.delivery is at-most-once.",
)


async def handle_state_request(ctx: RequestContext, form: StateApi, request: Any) -> Any:
    """The implementation of all five handlers."""
    from penstock.broker.coordinators.share.state_messages import decode_request, encode_response

    requests = decode_request(form, request)
    replies = await ctx.services.share_state.handle(requests)
    partitions = [(one.key.topic_id, one.key.partition) for one in requests]
    return encode_response(form, partitions, replies)
