"""ListOffsets (key 2), v1-11. The earliest, the latest, the largest timestamp, or the first record at or after a time.

`latest` is the high watermark, or the last stable offset for read_committed, at the time when the request arrives:
later records do not count, so a consumer that starts at the end misses nothing that is published after its request.
Timestamp searches run in a thread, because they may read old segments. Only the leader serves the request; a new
leader returns OFFSET_NOT_AVAILABLE (LEADER_NOT_AVAILABLE before v5) until it knows what was committed before. There
is no tiered storage: the tiered queries return no offset, and earliest-local is the earliest.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Awaitable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.broker.coordinators.requests import gather_in_pieces
from penstock.broker.network.requests import RequestContext, in_slices
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.schemas import schema_class
from penstock.protocol.steps import Steps

if TYPE_CHECKING:
    from penstock.broker.partition.partition import Partition

_LATEST: Final = -1
_EARLIEST: Final = -2
_MAX_TIMESTAMP: Final = -3
_EARLIEST_LOCAL: Final = -4
_LATEST_TIERED: Final = -5
_EARLIEST_PENDING_UPLOAD: Final = -6
#: The first version that knows each special timestamp.
_FIRST_VERSION: Final = {
    _MAX_TIMESTAMP: 7,
    _EARLIEST_LOCAL: 8,
    _LATEST_TIERED: 9,
    _EARLIEST_PENDING_UPLOAD: 11,
}
_READ_COMMITTED: Final = 1
_OFFSET_NOT_AVAILABLE_FROM: Final = 5


class _FoundOffset(NamedTuple):
    timestamp: int = -1
    offset: int = -1
    leader_epoch: int = -1


@in_slices
def handle(ctx: RequestContext, request: Any) -> Steps[Any]:
    """Each partition is looked up as it is in its own step; the response promises nothing about them together."""
    asked: Counter[tuple[str, int]] = Counter()
    for topic in request.topics:
        asked.update((topic.name, part.partition_index) for part in topic.partitions)
        yield
    repeated = {partition for partition, count in asked.items() if count > 1}
    topics: list[tuple[str, list[Any]]] = []
    waiting: list[tuple[list[Any], int]] = []
    for topic in request.topics:
        found: list[Any] = []
        topics.append((topic.name, found))
        for part in topic.partitions:
            result = _partition(ctx, request, topic.name, part, repeated)
            if inspect.isawaitable(result):
                waiting.append((found, len(found)))
            found.append(result)
            yield
        yield
    if waiting:
        return _respond_later(ctx, topics, waiting)
    return (yield from _response(topics))


def _response(topics: list[tuple[str, list[Any]]]) -> Steps[Any]:
    response = schema_class("list_offsets.v11.response:ListOffsetsResponse")
    topic_response = schema_class("list_offsets.v11.response:ListOffsetsTopicResponse")
    responses = []
    for name, parts in topics:
        responses.append(topic_response(name=name, partitions=tuple(parts)))
        yield
    return response(throttle_time=timedelta(0), topics=tuple(responses))


async def _respond_later(
    ctx: RequestContext, topics: list[tuple[str, list[Any]]], waiting: list[tuple[list[Any], int]]
) -> Any:
    found = await gather_in_pieces(lambda place: place[0][place[1]], waiting)
    for (parts, index), part in zip(waiting, found, strict=True):
        parts[index] = part
    return await ctx.finish_in_slices(_response(topics))


def _partition(
    ctx: RequestContext, request: Any, topic: str, part: Any, repeated: set[tuple[str, int]]
) -> Any:
    index = part.partition_index
    try:
        if (topic, index) in repeated:
            raise ApiError(ErrorCode.invalid_request)
        partition = ctx.services.partitions.find(topic, index, part.current_leader_epoch)
        found = _find(ctx, partition, part.timestamp, request.isolation_level == _READ_COMMITTED)
    except ApiError as error:
        return _error_response(ctx, index, error)
    if isinstance(found, _FoundOffset):
        return _partition_response(index, found)
    return _partition_response_later(ctx, index, found)


async def _partition_response_later(ctx: RequestContext, index: int, found: Awaitable[_FoundOffset]) -> Any:
    try:
        return _partition_response(index, await found)
    except ApiError as error:
        return _error_response(ctx, index, error)


def _partition_response(index: int, found: _FoundOffset) -> Any:
    response = schema_class("list_offsets.v11.response:ListOffsetsPartitionResponse")
    return response(
        partition_index=index,
        error_code=ErrorCode.none,
        timestamp=found.timestamp,
        offset=found.offset,
        leader_epoch=found.leader_epoch,
    )


def _error_response(ctx: RequestContext, index: int, error: ApiError) -> Any:
    ctx.services.metrics.count_error("list_offsets", error.code.name)
    response = schema_class("list_offsets.v11.response:ListOffsetsPartitionResponse")
    return response(partition_index=index, error_code=error.code, timestamp=-1, offset=-1, leader_epoch=-1)


def _find(
    ctx: RequestContext, partition: Partition, timestamp: int, read_committed: bool
) -> _FoundOffset | Awaitable[_FoundOffset]:
    """Raises ApiError."""
    if ctx.version < _FIRST_VERSION.get(timestamp, 0) or timestamp < _EARLIEST_PENDING_UPLOAD:
        raise ApiError(ErrorCode.unsupported_version)
    if timestamp in (_EARLIEST, _EARLIEST_LOCAL):
        start_offset = partition.log.start_offset
        return _FoundOffset(offset=start_offset, leader_epoch=partition.epoch_at(start_offset))
    if timestamp in (_LATEST_TIERED, _EARLIEST_PENDING_UPLOAD):
        return _FoundOffset()
    if timestamp == _LATEST and partition.is_settled:
        return _latest(partition, partition.high_watermark, read_committed)
    return _find_later(ctx, partition, timestamp, read_committed, partition.log.end_offset)


async def _find_later(
    ctx: RequestContext, partition: Partition, timestamp: int, read_committed: bool, end_offset: int
) -> _FoundOffset:
    """`end_offset` is the log end offset when the request arrived."""
    await _wait_until_settled(ctx, partition)
    log = partition.log
    match timestamp:
        case -1:
            return _latest(partition, min(end_offset, partition.high_watermark), read_committed)
        case -3:
            found = await ctx.services.preparer.search_log(ctx.connection, log.offset_of_max_timestamp)
        case _:
            found = await ctx.services.preparer.search_log(
                ctx.connection, lambda bytes_max: log.offset_for_timestamp(timestamp, bytes_max)
            )
    upto_offset = partition.last_stable_offset if read_committed else partition.high_watermark
    if found is None or found[1] >= upto_offset:
        return _FoundOffset()
    return _FoundOffset(*found)


def _latest(partition: Partition, upto_offset: int, read_committed: bool) -> _FoundOffset:
    if read_committed:
        upto_offset = min(upto_offset, partition.last_stable_offset)
    return _FoundOffset(offset=upto_offset, leader_epoch=partition.epoch_at(upto_offset))


async def _wait_until_settled(ctx: RequestContext, partition: Partition) -> None:
    try:
        await partition.settled()
    except ApiError as error:
        if error.code is ErrorCode.offset_not_available and ctx.version < _OFFSET_NOT_AVAILABLE_FROM:
            raise ApiError(ErrorCode.leader_not_available, error.message) from None
        raise
