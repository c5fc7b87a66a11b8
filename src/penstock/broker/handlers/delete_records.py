"""DeleteRecords (key 21), v0-2. Moves the start of a partition forward, and answers once that is durable.

Live followers must have followed, so that what is deleted stays so whoever leads next. A request that runs out of
time before they have is told so; for its own readers the records are gone nevertheless. A follower saves its start
with its checkpoints: one that is killed before, and leads before it has fetched again, shows deleted records again.
Records that are held back until they are due are taken over by the schedule first, and are not deleted. Offset -1
stands for the high watermark. Topics that are only compacted refuse it, and so do internal ones. The files go with
the next round of retention, on a full disk at once.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kio.schema.delete_records.v2.response import (
    DeleteRecordsPartitionResult,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)

from penstock.broker.context import RequestContext
from penstock.cluster.names import is_internal
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.partition import Partition

_HIGH_WATERMARK: Final = -1
_NO_LOW_WATERMARK: Final = -1
#: How often there is a look at whether followers have followed.
_LOOK_S: Final = 0.01
#: Nobody is kept waiting for longer, whatever the request says.
_WAIT_S_MAX: Final = 60.0


class _Result(NamedTuple):
    partition: int
    error: ErrorCode
    low_watermark: int = _NO_LOW_WATERMARK


async def handle(ctx: RequestContext, request: Any) -> Any:
    results: dict[str, list[_Result]] = {}
    for (topic, index), offset in _asked(request).items():
        results.setdefault(topic, []).append(await _delete(ctx, topic, index, offset))
    if any(result.error is ErrorCode.none for parts in results.values() for result in parts):
        error = await _make_durable(ctx)
        if error is not ErrorCode.none:
            results = {topic: [_failed(part, error) for part in parts] for topic, parts in results.items()}
        await _free_space_at_once(ctx, results)
        await _wait_for_followers(ctx, results, request.timeout.total_seconds())
    return DeleteRecordsResponse(
        throttle_time=timedelta(0),
        topics=tuple(
            DeleteRecordsTopicResult(
                name=topic,
                partitions=tuple(
                    DeleteRecordsPartitionResult(
                        partition_index=part.partition,
                        low_watermark=part.low_watermark,
                        error_code=part.error,
                    )
                    for part in parts
                ),
            )
            for topic, parts in results.items()
        ),
    )


def _asked(request: Any) -> dict[tuple[str, int], int]:
    """Offsets by topic and partition: of a partition that is named twice, the last."""
    return {
        (topic.name, part.partition_index): part.offset
        for topic in request.topics
        for part in topic.partitions
    }


async def _delete(ctx: RequestContext, topic: str, index: int, offset: int) -> _Result:
    try:
        partition = ctx.node.partitions.find(topic, index)
        if is_internal(topic):
            raise ApiError(
                ErrorCode.invalid_topic_exception, f"Cannot delete records of internal topic {topic}"
            )
        if not partition.log.config.cleanup_delete:
            raise ApiError(ErrorCode.policy_violation, "The topic's cleanup.policy does not delete records")
        await _settled(partition)
        before = partition.high_watermark if offset == _HIGH_WATERMARK else offset
        if not 0 <= before <= partition.high_watermark:
            raise ApiError(ErrorCode.offset_out_of_range)
        if ctx.node.may_hold_records(partition):
            await ctx.node.schedule.wait_until_taken_over(partition, before)
        partition.log.delete_records_before(before)
        partition.start_moved()
    except ApiError as error:
        return _Result(index, error.code)
    return _Result(index, ErrorCode.none, partition.log.start_offset)


async def _settled(partition: Partition) -> None:
    """Raises ApiError: one that clients retry, while a new leader finds out what was committed."""
    try:
        await partition.settled()
    except ApiError as error:
        if error.code is ErrorCode.offset_not_available:
            raise ApiError(ErrorCode.leader_not_available, error.message) from None
        raise


async def _make_durable(ctx: RequestContext) -> ErrorCode:
    try:
        await ctx.node.in_thread(ctx.node.store.checkpoint)
    except OSError:
        return ErrorCode.kafka_storage_error
    return ErrorCode.none


async def _free_space_at_once(ctx: RequestContext, results: dict[str, list[_Result]]) -> None:
    """On a full disk nobody waits for the next round of retention. What fails here is tried again by it."""
    node = ctx.node
    if not node.store.space.is_full:
        return
    for topic, parts in results.items():
        for part in parts:
            partition = node.partitions.led(topic, part.partition)
            if part.error is ErrorCode.none and partition is not None:
                with suppress(ApiError, OSError):
                    await node.housekeeping.apply_retention(partition)


async def _wait_for_followers(
    ctx: RequestContext, results: dict[str, list[_Result]], timeout_s: float
) -> None:
    """Results of partitions whose followers do not follow in time are replaced."""
    deadline = asyncio.get_running_loop().time() + min(timeout_s, _WAIT_S_MAX)
    for topic, parts in results.items():
        for place, part in enumerate(parts):
            if part.error is ErrorCode.none:
                error = await _followed(ctx, topic, part, deadline)
                parts[place] = part if error is ErrorCode.none else _failed(part, error)


async def _followed(ctx: RequestContext, topic: str, part: _Result, deadline: float) -> ErrorCode:
    """Waits until every live replica starts where this one does."""
    loop = asyncio.get_running_loop()
    while (partition := ctx.node.partitions.led(topic, part.partition)) is not None:
        leading = partition.leading
        if leading is None or leading.low_watermark(partial(_is_alive, ctx)) >= part.low_watermark:
            return ErrorCode.none
        if loop.time() >= deadline:
            return ErrorCode.request_timed_out
        await asyncio.sleep(_LOOK_S)
    return ErrorCode.not_leader_or_follower


def _is_alive(ctx: RequestContext, broker_id: int) -> bool:
    broker = ctx.node.image.brokers.get(broker_id)
    return broker is not None and not broker.fenced


def _failed(part: _Result, error: ErrorCode) -> _Result:
    return part if part.error is not ErrorCode.none else _Result(part.partition, error)
