"""Appends a batch exactly once, according to a stored plan.

Before the append, the caller has stored which records go to which partition under which producer id, epoch and
sequence. After a crash its successor repeats the same plan. The partition recognises the sequence, so that the log
holds the records once, for every isolation level. A producer has one open plan per partition: the next one starts
only when the last one is known to be committed.
"""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from penstock.broker.network.apis import PRODUCE
from penstock.broker.partition.produced_batch import duplicate_or_raise
from penstock.log.producer_state import PLANNED_PRODUCER_IDS_FROM
from penstock.protocol.backoff import ExponentialBackoff
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.broker.environment import Environment, ImageView, Partitions, PeerCalls
    from penstock.broker.partition.partition import Partition
    from penstock.broker.partition.produced_batch import BatchPreparer
    from penstock.log.log import LogAppendInfo

_TIMEOUT_S: Final = 10.0
_BACKOFF: Final = ExponentialBackoff(base_ms=20, cap_ms=1_000)
_ACKS_ALL: Final = -1
#: This version names topics by id, so that a plan never reaches another topic of the same name.
_PRODUCE_VERSION: Final = 13
#: Nothing was appended, and a retry does not help: the caller has to make another plan.
_NON_RETRIABLE: Final = frozenset(
    {
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.unknown_topic_id,
        ErrorCode.message_too_large,
        ErrorCode.record_list_too_large,
        ErrorCode.invalid_record,
        ErrorCode.invalid_topic_exception,
        ErrorCode.invalid_timestamp,
        ErrorCode.invalid_producer_epoch,
        ErrorCode.out_of_order_sequence_number,
        ErrorCode.policy_violation,
    }
)


class PlannedAppends:
    """Appends batches to partitions of any broker, and repeats them until they are committed."""

    def __init__(
        self,
        *,
        node_id: int,
        metadata: ImageView,
        partitions: Partitions,
        environment: Environment,
        preparer: BatchPreparer,
        peers: Callable[[], PeerCalls],
        new_producer_id: Callable[[], Awaitable[int]],
    ) -> None:
        self._node_id = node_id
        self._metadata = metadata
        self._partitions = partitions
        self._environment = environment
        self._preparer = preparer
        self._peers = peers
        self._new_producer_id = new_producer_id

    async def new_producer_id(self) -> int:
        """Allocate a producer id. Partitions remember it longer than others, because a plan may have to wait.

        Raises ApiError.
        """
        return PLANNED_PRODUCER_IDS_FROM | await self._new_producer_id()

    async def append(
        self,
        topic: str,
        partition: int,
        batch: bytearray,
        *,
        topic_id: UUID,
        purpose: str = "planned-append",
    ) -> int:
        """Append the batch, retry until it is committed, and return its base offset.

        Calls with the same `purpose` share a connection, so their replies wait for each other. Raises ApiError if the
        batch is not in the log and a retry cannot put it there: the topic or partition does not exist, the partition
        refuses the batch, or its sequence does not fit because an unclean election has lost earlier plans.
        """
        attempt = 0
        while True:
            try:
                return await self._append(topic, topic_id, partition, batch, purpose)
            except ApiError as error:
                if error.code in _NON_RETRIABLE and self._is_definite(topic_id, partition, error):
                    raise
            except (ConnectionError, TimeoutError):
                pass
            await asyncio.sleep(_BACKOFF.spread_ms(attempt, random) / 1000)
            attempt += 1

    def _is_definite(self, topic_id: UUID, partition: int, error: ApiError) -> bool:
        """Whether the error is final: a broker may report an unknown topic only because its image is behind."""
        if error.code in (ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id):
            topic = self._metadata.image.topics_by_id.get(topic_id)
            return topic is None or partition not in topic.partitions
        return True

    async def _append(self, topic: str, topic_id: UUID, index: int, batch: bytearray, purpose: str) -> int:
        image = self._metadata.image
        state = image.partition(topic, index)
        if state is None or image.topics[topic].id != topic_id:
            raise ApiError(ErrorCode.unknown_topic_or_partition, f"{topic}-{index} is gone")
        if not state.has_leader:
            raise ApiError(ErrorCode.leader_not_available)
        partition = self._partitions.led(topic, index)
        if partition is not None:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._append_local(partition, batch)
        if state.leader == self._node_id:
            raise ApiError(ErrorCode.not_leader_or_follower)
        return await self._append_remote(state.leader, topic_id, index, batch, purpose)

    async def _append_local(self, partition: Partition, batch: bytearray) -> int:
        if not partition.has_enough_replicas:
            raise ApiError(ErrorCode.not_enough_replicas)
        if partition.takes_turns:
            appended = await self._append_in_order(partition, batch)
        else:
            # Append a copy: the append changes the batch, and a retry needs the original.
            copied = memoryview(bytearray(batch))
            try:
                appended = partition.append(copied, self._environment.now_ms())
            except ApiError as error:
                appended = duplicate_or_raise(partition, copied, error)
        await partition.committed(appended.last_offset)
        return appended.base_offset

    async def _append_in_order(self, partition: Partition, batch: bytearray) -> LogAppendInfo:
        """Append to a topic that inspects its batches: prepare in a thread, then append after all earlier batches."""
        outcome: list[LogAppendInfo | ApiError] = []
        previous = partition.last_turn

        async def turn() -> None:
            prepared = self._environment.spawn(
                self._preparer.prepare_in_thread(partition, bytearray(batch), None)
            )
            if previous is not None:
                await asyncio.wait([previous])
            try:
                ready = memoryview(await prepared)
                partition.check_leader()
                outcome.append(partition.append(ready, self._environment.now_ms()))
            except ApiError as error:
                outcome.append(_duplicate_or_error(partition, batch, error))

        task = self._environment.spawn(turn())
        partition.begin_turn(task)
        await asyncio.shield(task)
        (appended,) = outcome
        if isinstance(appended, ApiError):
            raise appended
        return appended

    async def _append_remote(
        self, leader_id: int, topic_id: UUID, index: int, batch: bytearray, purpose: str
    ) -> int:
        # Imported here, because a standalone node never needs it.
        from penstock.broker.network.peers import PeerUnreachable

        try:
            response = await self._peers().call(
                leader_id,
                PRODUCE,
                _produce_request(topic_id, index, batch),
                version=_PRODUCE_VERSION,
                timeout_s=_TIMEOUT_S + 1,
                purpose=purpose,
            )
        except PeerUnreachable as error:
            raise ConnectionError(str(error)) from None
        (result,) = (part for topic in response.responses for part in topic.partition_responses)
        if result.error_code is not ErrorCode.none:
            raise ApiError(result.error_code, result.error_message)
        return int(result.base_offset)


def _duplicate_or_error(partition: Partition, batch: bytearray, error: ApiError) -> LogAppendInfo | ApiError:
    """Does not raise: a caller that was cancelled retrieves no error."""
    try:
        return duplicate_or_raise(partition, memoryview(batch), error)
    except ApiError as refused:
        return refused


def _produce_request(topic_id: Any, index: int, batch: bytearray) -> Any:
    from kio.schema.produce.v13 import request as schema

    data = schema.PartitionProduceData(index=index, records=bytes(batch))
    return schema.ProduceRequest(
        acks=_ACKS_ALL,
        timeout=timedelta(seconds=_TIMEOUT_S),
        topic_data=(schema.TopicProduceData(topic_id=topic_id, partition_data=(data,)),),
    )
