"""ListOffsets (key 2), v1-11. Earliest, latest, the largest timestamp, or the first record at or after one.

`latest` ends at the high watermark, or at the last stable offset for read_committed, as of when the request arrives:
what is produced after it is not counted, so that a consumer which starts at the end misses nothing that is published
once it has asked. Timestamps are looked up in a thread, because they may read old segments. Only the leader answers; a
new one says OFFSET_NOT_AVAILABLE (LEADER_NOT_AVAILABLE before v5) until it knows what was committed before it.
Nothing is tiered here, so the tiered queries answer "none" and earliest-local is the earliest.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable
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


def handle(ctx: RequestContext, request: Any) -> Any:
    """The response, or an awaitable of it where a partition has to be waited for."""
    asked = Counter(
        (topic.name, part.partition_index) for topic in request.topics for part in topic.partitions
    )
    repeated = {place for place, count in asked.items() if count > 1}
    topics = [
        (topic.name, [_partition(ctx, request, topic.name, part, repeated) for part in topic.partitions])
        for topic in request.topics
    ]
    if any(inspect.isawaitable(part) for _, parts in topics for part in parts):
        return _respond_later(topics)
    return _response(topics)


def _response(topics: list[tuple[str, list[Any]]]) -> Any:
    response = schema_class("list_offsets.v11.response:ListOffsetsResponse")
    topic_response = schema_class("list_offsets.v11.response:ListOffsetsTopicResponse")
    return response(
        throttle_time=timedelta(0),
        topics=tuple(topic_response(name=name, partitions=tuple(parts)) for name, parts in topics),
    )


async def _respond_later(topics: list[tuple[str, list[Any]]]) -> Any:
    waiting = [part for _, parts in topics for part in parts if inspect.isawaitable(part)]
    found = iter(await asyncio.gather(*waiting))
    return _response(
        [
            (name, [next(found) if inspect.isawaitable(part) else part for part in parts])
            for name, parts in topics
        ]
    )


def _partition(
    ctx: RequestContext, request: Any, topic: str, part: Any, repeated: set[tuple[str, int]]
) -> Any:
    index = part.partition_index
    try:
        if (topic, index) in repeated:
            raise ApiError(ErrorCode.invalid_request)
        partition = ctx.node.partitions.find(topic, index, part.current_leader_epoch)
        found = _find(ctx, partition, part.timestamp, request.isolation_level == _READ_COMMITTED)
    except ApiError as error:
        return _error(ctx, index, error)
    if isinstance(found, _Found):
        return _answer(index, found)
    return _answer_later(ctx, index, found)


async def _answer_later(ctx: RequestContext, index: int, found: Awaitable[_Found]) -> Any:
    try:
        return _answer(index, await found)
    except ApiError as error:
        return _error(ctx, index, error)


def _answer(index: int, found: _Found) -> Any:
    response = schema_class("list_offsets.v11.response:ListOffsetsPartitionResponse")
    return response(
        partition_index=index,
        error_code=ErrorCode.none,
        timestamp=found.timestamp,
        offset=found.offset,
        leader_epoch=found.leader_epoch,
    )


def _error(ctx: RequestContext, index: int, error: ApiError) -> Any:
    ctx.node.metrics.count_error("list_offsets", error.code.name)
    response = schema_class("list_offsets.v11.response:ListOffsetsPartitionResponse")
    return response(partition_index=index, error_code=error.code, timestamp=-1, offset=-1, leader_epoch=-1)


def _find(
    ctx: RequestContext, partition: Partition, timestamp: int, read_committed: bool
) -> _Found | Awaitable[_Found]:
    """Raises ApiError."""
    if ctx.version < _SINCE.get(timestamp, 0) or timestamp < _EARLIEST_PENDING_UPLOAD:
        raise ApiError(ErrorCode.unsupported_version)
    if timestamp in (_EARLIEST, _EARLIEST_LOCAL):
        start_offset = partition.log.start_offset
        return _Found(offset=start_offset, leader_epoch=partition.epoch_at(start_offset))
    if timestamp in (_LATEST_TIERED, _EARLIEST_PENDING_UPLOAD):
        return _Found()
    if timestamp == _LATEST and partition.is_settled:
        return _latest(partition, partition.high_watermark, read_committed)
    return _find_later(ctx, partition, timestamp, read_committed, partition.log.end_offset)


async def _find_later(
    ctx: RequestContext, partition: Partition, timestamp: int, read_committed: bool, end_offset: int
) -> _Found:
    """`end_offset` is where the log ended when the request arrived."""
    await _settled(ctx, partition)
    log = partition.log
    match timestamp:
        case -1:
            return _latest(partition, min(end_offset, partition.high_watermark), read_committed)
        case -3:
            found = await ctx.node.looked_up(ctx.connection, log.offset_of_max_timestamp)
        case _:
            found = await ctx.node.looked_up(
                ctx.connection, lambda bytes_max: log.offset_for_timestamp(timestamp, bytes_max)
            )
    upto_offset = partition.last_stable_offset if read_committed else partition.high_watermark
    if found is None or found[1] >= upto_offset:
        return _Found()
    return _Found(*found)


def _latest(partition: Partition, upto_offset: int, read_committed: bool) -> _Found:
    if read_committed:
        upto_offset = min(upto_offset, partition.last_stable_offset)
    return _Found(offset=upto_offset, leader_epoch=partition.epoch_at(upto_offset))


async def _settled(ctx: RequestContext, partition: Partition) -> None:
    try:
        await partition.settled()
    except ApiError as error:
        if error.code is ErrorCode.offset_not_available and ctx.version < _OFFSET_NOT_AVAILABLE_FROM:
            raise ApiError(ErrorCode.leader_not_available, error.message) from None
        raise
