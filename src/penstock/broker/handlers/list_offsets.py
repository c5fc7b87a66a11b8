"""ListOffsets (key 2), v1-11. Earliest, latest, the largest timestamp, or the first record at or after one.

`latest` ends at the high watermark, or at the last stable offset for read_committed. Timestamps are looked up
in a thread, because they may read old segments. Only the leader answers; a new one says OFFSET_NOT_AVAILABLE
(LEADER_NOT_AVAILABLE before v5) until it knows what was committed before it. Nothing is tiered here, so the tiered
queries answer "none" and earliest-local is the earliest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.broker.context import RequestContext
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.schemas import schema_class

if TYPE_CHECKING:
    from penstock.broker.partition import Partition

_LATEST: Final = -1
_EARLIEST: Final = -2
_MAX_TIMESTAMP: Final = -3
_EARLIEST_LOCAL: Final = -4
_LATEST_TIERED: Final = -5
_EARLIEST_PENDING_UPLOAD: Final = -6
#: The first version that knows each special timestamp.
_SINCE: Final = {_MAX_TIMESTAMP: 7, _EARLIEST_LOCAL: 8, _LATEST_TIERED: 9, _EARLIEST_PENDING_UPLOAD: 11}
_READ_COMMITTED: Final = 1
_OFFSET_NOT_AVAILABLE_FROM: Final = 5


class _Found(NamedTuple):
    timestamp: int = -1
    offset: int = -1
    leader_epoch: int = -1


async def handle(ctx: RequestContext, request: Any) -> Any:
    asked = Counter(
        (topic.name, part.partition_index) for topic in request.topics for part in topic.partitions
    )
    repeated = {place for place, count in asked.items() if count > 1}
    topic_response = schema_class("list_offsets.v11.response:ListOffsetsTopicResponse")
    topics = []
    for topic in request.topics:
        parts = [_partition(ctx, request, topic.name, part, repeated) for part in topic.partitions]
        topics.append(topic_response(name=topic.name, partitions=tuple(await asyncio.gather(*parts))))
    response = schema_class("list_offsets.v11.response:ListOffsetsResponse")
    return response(throttle_time=timedelta(0), topics=tuple(topics))


async def _partition(
    ctx: RequestContext, request: Any, topic: str, part: Any, repeated: set[tuple[str, int]]
) -> Any:
    response = schema_class("list_offsets.v11.response:ListOffsetsPartitionResponse")
    index = part.partition_index
    try:
        if (topic, index) in repeated:
            raise ApiError(ErrorCode.invalid_request)
        partition = ctx.node.partitions.find(topic, index, part.current_leader_epoch)
        found = await _find(ctx, partition, part.timestamp, request.isolation_level == _READ_COMMITTED)
    except ApiError as error:
        ctx.node.metrics.count_error("list_offsets", error.code.name)
        return response(
            partition_index=index, error_code=error.code, timestamp=-1, offset=-1, leader_epoch=-1
        )
    return response(
        partition_index=index,
        error_code=ErrorCode.none,
        timestamp=found.timestamp,
        offset=found.offset,
        leader_epoch=found.leader_epoch,
    )


async def _find(ctx: RequestContext, partition: Partition, timestamp: int, read_committed: bool) -> _Found:
    if ctx.version < _SINCE.get(timestamp, 0) or timestamp < _EARLIEST_PENDING_UPLOAD:
        raise ApiError(ErrorCode.unsupported_version)
    log = partition.log
    if timestamp not in (_EARLIEST, _EARLIEST_LOCAL):
        await _settled(ctx, partition)
    upto_offset = partition.last_stable_offset if read_committed else partition.high_watermark
    match timestamp:
        case -1:
            return _Found(offset=upto_offset, leader_epoch=partition.epoch_at(upto_offset))
        case -2 | -4:
            return _Found(offset=log.start_offset, leader_epoch=partition.epoch_at(log.start_offset))
        case -5 | -6:
            return _Found()
        case -3:
            found = await ctx.node.in_thread(log.offset_of_max_timestamp)
        case _:
            found = await ctx.node.in_thread(log.offset_for_timestamp, timestamp)
    if found is None or found[1] >= upto_offset:
        return _Found()
    return _Found(*found)


async def _settled(ctx: RequestContext, partition: Partition) -> None:
    try:
        await partition.settled()
    except ApiError as error:
        if error.code is ErrorCode.offset_not_available and ctx.version < _OFFSET_NOT_AVAILABLE_FROM:
            raise ApiError(ErrorCode.leader_not_available, error.message) from None
        raise
