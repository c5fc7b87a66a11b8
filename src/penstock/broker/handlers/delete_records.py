"""DeleteRecords (key 21), v0-2. Moves the log start offset forward; the reply waits until that is durable.

The live followers must move their start offset too, so that deleted records stay deleted whichever replica leads next.
If they do not in time, the partition gets REQUEST_TIMED_OUT, although consumers of this leader no longer see the
records. A follower saves its start offset with its checkpoints. If it is killed before the checkpoint and becomes
leader before it fetches again, it returns deleted records again.

Records that are held until they are due are not deleted: the schedule takes them over first. Offset -1 is the high
watermark. Topics that are only compacted, and internal topics, refuse the request. Retention deletes the files in its
next round, or at once if the disk is full.
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

from penstock.broker.network.requests import RequestContext
from penstock.cluster.topic_names import is_internal
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.partition.partition import Partition

_HIGH_WATERMARK: Final = -1
_NO_LOW_WATERMARK: Final = -1
#: How often to check whether the followers have moved their start offset.
_POLL_INTERVAL_S: Final = 0.01
#: Limits the timeout of the request.
_WAIT_S_MAX: Final = 60.0


class _Result(NamedTuple):
    partition: int
    error: ErrorCode
    low_watermark: int = _NO_LOW_WATERMARK


async def handle(ctx: RequestContext, request: Any) -> Any:
    results: dict[str, list[_Result]] = {}
    for (topic, index), offset in _requested_offsets(request).items():
        results.setdefault(topic, []).append(await _delete(ctx, topic, index, offset))
    if any(result.error is ErrorCode.none for parts in results.values() for result in parts):
        error = await _make_durable(ctx)
        if error is not ErrorCode.none:
            results = {
                topic: [_with_error(part, error) for part in parts] for topic, parts in results.items()
            }
        await _free_space_on_full_disk(ctx, results)
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


def _requested_offsets(request: Any) -> dict[tuple[str, int], int]:
    """Offsets by topic and partition; for a partition that is listed twice, the last one."""
    return {
        (topic.name, part.partition_index): part.offset
        for topic in request.topics
        for part in topic.partitions
    }


async def _delete(ctx: RequestContext, topic: str, index: int, offset: int) -> _Result:
    try:
        partition = ctx.services.partitions.find(topic, index)
        if is_internal(topic):
            raise ApiError(
                ErrorCode.invalid_topic_exception, f"Cannot delete records of internal topic {topic}"
            )
        if not partition.log.config.cleanup_delete:
            raise ApiError(ErrorCode.policy_violation, "The topic's cleanup.policy does not delete records")
        await _wait_until_settled(partition)
        before = partition.high_watermark if offset == _HIGH_WATERMARK else offset
        if not 0 <= before <= partition.high_watermark:
            raise ApiError(ErrorCode.offset_out_of_range)
        if ctx.services.housekeeping.may_hold_scheduled_records(partition):
            await ctx.services.schedule.wait_until_moved(partition, before)
        partition.log.delete_records_before(before)
        partition.start_moved()
    except ApiError as error:
        return _Result(index, error.code)
    return _Result(index, ErrorCode.none, partition.log.start_offset)


async def _wait_until_settled(partition: Partition) -> None:
    """Raises ApiError; while a new leader does not know what was committed, with a code that clients retry."""
    try:
        await partition.settled()
    except ApiError as error:
        if error.code is ErrorCode.offset_not_available:
            raise ApiError(ErrorCode.leader_not_available, error.message) from None
        raise


async def _make_durable(ctx: RequestContext) -> ErrorCode:
    try:
        await ctx.services.in_thread(ctx.services.store.checkpoint)
    except OSError:
        return ErrorCode.kafka_storage_error
    return ErrorCode.none


async def _free_space_on_full_disk(ctx: RequestContext, results: dict[str, list[_Result]]) -> None:
    """On a full disk, applies retention now instead of in its next round, which retries what fails here."""
    services = ctx.services
    if not services.store.space.is_full:
        return
    for topic, parts in results.items():
        for part in parts:
            partition = services.partitions.led(topic, part.partition)
            if part.error is ErrorCode.none and partition is not None:
                with suppress(ApiError, OSError):
                    await services.housekeeping.apply_retention(partition)


async def _wait_for_followers(
    ctx: RequestContext, results: dict[str, list[_Result]], timeout_s: float
) -> None:
    """Replaces the results of partitions whose followers do not move their start offset in time."""
    deadline = asyncio.get_running_loop().time() + min(timeout_s, _WAIT_S_MAX)
    for topic, parts in results.items():
        for place, part in enumerate(parts):
            if part.error is ErrorCode.none:
                error = await _wait_for_low_watermark(ctx, topic, part, deadline)
                parts[place] = part if error is ErrorCode.none else _with_error(part, error)


async def _wait_for_low_watermark(
    ctx: RequestContext, topic: str, part: _Result, deadline: float
) -> ErrorCode:
    """Waits until the start offset of every live replica has reached this leader's."""
    loop = asyncio.get_running_loop()
    while (partition := ctx.services.partitions.led(topic, part.partition)) is not None:
        leading = partition.leading
        if leading is None or leading.low_watermark(partial(_is_alive, ctx)) >= part.low_watermark:
            return ErrorCode.none
        if loop.time() >= deadline:
            return ErrorCode.request_timed_out
        await asyncio.sleep(_POLL_INTERVAL_S)
    return ErrorCode.not_leader_or_follower


def _is_alive(ctx: RequestContext, broker_id: int) -> bool:
    broker = ctx.services.image.brokers.get(broker_id)
    return broker is not None and not broker.fenced


def _with_error(part: _Result, error: ErrorCode) -> _Result:
    return part if part.error is not ErrorCode.none else _Result(part.partition, error)
