"""The high watermarks of partitions, requested from their leaders with one ListOffsets request per leader.

The lag of a group is computed from them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.schemas import schema_class

if TYPE_CHECKING:
    from penstock.broker.environment import ImageView
    from penstock.broker.network.requests import BrokerCalls

_LIST_OFFSETS: Final = 2
_LATEST: Final = -1
_NOT_A_REPLICA: Final = -1
_TIMEOUT_S: Final = 5.0

#: topic, partition
PartitionKey = tuple[str, int]


async def end_offsets(
    metadata: ImageView, brokers: BrokerCalls, partitions: Iterable[PartitionKey]
) -> dict[PartitionKey, int | ApiError]:
    """Return each high watermark, or the error why it is unknown. Sends one request per leader."""
    by_leader: dict[int, list[PartitionKey]] = {}
    found: dict[PartitionKey, int | ApiError] = {}
    for topic, index in partitions:
        state = metadata.image.partition(topic, index)
        if state is None:
            found[topic, index] = ApiError(ErrorCode.unknown_topic_or_partition)
        elif not state.has_leader:
            found[topic, index] = ApiError(ErrorCode.leader_not_available)
        else:
            by_leader.setdefault(state.leader, []).append((topic, index))
    answers = await asyncio.gather(
        *(_list_offsets(brokers, leader, asked) for leader, asked in by_leader.items())
    )
    for answer in answers:
        found.update(answer)
    return found


async def _list_offsets(
    brokers: BrokerCalls, leader: int, partitions: list[PartitionKey]
) -> dict[PartitionKey, int | ApiError]:
    try:
        response = await brokers.call(
            leader, _LIST_OFFSETS, _list_offsets_request(partitions), timeout_s=_TIMEOUT_S, purpose="lag"
        )
    except ApiError as error:
        return dict.fromkeys(partitions, error)
    return {
        (topic.name, part.partition_index): (
            part.offset if part.error_code is ErrorCode.none else ApiError(part.error_code)
        )
        for topic in response.topics
        for part in topic.partitions
    }


def _list_offsets_request(partitions: list[PartitionKey]) -> Any:
    request = schema_class("list_offsets.v11.request:ListOffsetsRequest")
    topic_class = schema_class("list_offsets.v11.request:ListOffsetsTopic")
    part_class = schema_class("list_offsets.v11.request:ListOffsetsPartition")
    by_topic: dict[str, list[int]] = {}
    for topic, index in partitions:
        by_topic.setdefault(topic, []).append(index)
    topics = tuple(
        topic_class(
            name=topic,
            partitions=tuple(
                part_class(partition_index=index, current_leader_epoch=-1, timestamp=_LATEST)
                for index in indexes
            ),
        )
        for topic, indexes in by_topic.items()
    )
    return request(
        replica_id=_NOT_A_REPLICA, isolation_level=0, topics=topics, timeout=timedelta(seconds=_TIMEOUT_S)
    )
