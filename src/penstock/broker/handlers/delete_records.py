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

from penstock.broker.network.requests import RequestContext, in_slices
from penstock.cluster.topic_names import is_internal
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.partition.partition import Partition
    from penstock.protocol.steps import Steps

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


#: By topic and partition, in the order of the request.
_Results = dict[tuple[str, int], _Result]


@in_slices
def handle(ctx: RequestContext, request: Any) -> Steps[Any]:
    """The records of each partition are deleted in its own step."""
    offsets: dict[tuple[str, int], int] = {}
    for topic in request.topics:
        for part in topic.partitions:
            # For a partition that is listed twice, the last offset.
            offsets[topic.name, part.partition_index] = part.offset
            yield
    results: _Results = {}
    waiting: dict[tuple[str, int], int] = {}
    for tp, offset in offsets.items():
        result = _delete_at_once(ctx, *tp, offset)
        if result is None:
            waiting[tp] = offset
        results[tp] = result or _Result(tp[1], ErrorCode.none)
        yield
    if not waiting and not any(result.error is ErrorCode.none for result in results.values()):
        return (yield from _response(results))
    return _finish_and_respond(ctx, results, waiting, request.timeout.total_seconds())


async def _finish_and_respond(
    ctx: RequestContext, results: _Results, waiting: dict[tuple[str, int], int], timeout_s: float
) -> Any:
    for tp, offset in waiting.items():
        results[tp] = await _delete(ctx, *tp, offset)
    deleted = [tp for tp, result in results.items() if result.error is ErrorCode.none]
    if deleted:
        error = await _make_durable(ctx)
        if error is not ErrorCode.none:
            results |= {tp: _Result(tp[1], error) for tp in deleted}
            deleted = []
        await _free_space_on_full_disk(ctx, deleted)
        await _wait_for_followers(ctx, results, deleted, timeout_s)
    return await ctx.finish_in_slices(_response(results))


def _response(results: _Results) -> Steps[Any]:
    by_topic: dict[str, list[DeleteRecordsPartitionResult]] = {}
    for (topic, _), part in results.items():
        result = DeleteRecordsPartitionResult(
            partition_index=part.partition, low_watermark=part.low_watermark, error_code=part.error
        )
        by_topic.setdefault(topic, []).append(result)
        yield
    topics = []
    for topic, parts in by_topic.items():
        topics.append(DeleteRecordsTopicResult(name=topic, partitions=tuple(parts)))
        yield
    return DeleteRecordsResponse(throttle_time=timedelta(0), topics=tuple(topics))


def _delete_at_once(ctx: RequestContext, topic: str, index: int, offset: int) -> _Result | None:
    """Return None if that has to wait for something."""
    try:
        partition = _find(ctx, topic, index)
        if not partition.is_settled or ctx.services.housekeeping.may_hold_scheduled_records(partition):
            return None
        return _delete_before(partition, _offset_before(partition, offset))
    except ApiError as error:
        return _Result(index, error.code)


async def _delete(ctx: RequestContext, topic: str, index: int, offset: int) -> _Result:
    try:
        partition = _find(ctx, topic, index)
        await _wait_until_settled(partition)
        before = _offset_before(partition, offset)
        if ctx.services.housekeeping.may_hold_scheduled_records(partition):
            await ctx.services.schedule.wait_until_moved(partition, before)
        return _delete_before(partition, before)
    except ApiError as error:
        return _Result(index, error.code)


def _find(ctx: RequestContext, topic: str, index: int) -> Partition:
    """Raises ApiError."""
    partition = ctx.services.partitions.find(topic, index)
    if is_internal(topic):
        raise ApiError(ErrorCode.invalid_topic_exception, f"Cannot delete records of internal topic {topic}")
    if not partition.log.config.cleanup_delete:
        raise ApiError(ErrorCode.policy_violation, "The topic's cleanup.policy does not delete records")
    return partition


def _offset_before(partition: Partition, offset: int) -> int:
    """Raises ApiError."""
    before = partition.high_watermark if offset == _HIGH_WATERMARK else offset
    if not 0 <= before <= partition.high_watermark:
        raise ApiError(ErrorCode.offset_out_of_range)
    return before


def _delete_before(partition: Partition, before: int) -> _Result:
    partition.log.delete_records_before(before)
    partition.start_moved()
    return _Result(partition.index, ErrorCode.none, partition.log.start_offset)


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


async def _free_space_on_full_disk(ctx: RequestContext, deleted: list[tuple[str, int]]) -> None:
    """On a full disk, applies retention now instead of in its next round, which retries what fails here."""
    services = ctx.services
    if not services.store.space.is_full:
        return
    for tp in deleted:
        partition = services.partitions.led(*tp)
        if partition is not None:
            with suppress(ApiError, OSError):
                await services.housekeeping.apply_retention(partition)


async def _wait_for_followers(
    ctx: RequestContext, results: _Results, deleted: list[tuple[str, int]], timeout_s: float
) -> None:
    """Waits until the start offset of every live replica has reached this leader's.

    Replaces the results of partitions whose followers do not move their start offset in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(timeout_s, _WAIT_S_MAX)
    while deleted := await ctx.finish_in_slices(_behind(ctx, results, deleted)):
        if loop.time() >= deadline:
            results |= {tp: _Result(tp[1], ErrorCode.request_timed_out) for tp in deleted}
            return
        await asyncio.sleep(_POLL_INTERVAL_S)


def _behind(
    ctx: RequestContext, results: _Results, deleted: list[tuple[str, int]]
) -> Steps[list[tuple[str, int]]]:
    """Return the partitions with a live follower whose start offset is lower than the leader's."""
    behind = []
    is_alive = partial(_is_alive, ctx)
    for tp in deleted:
        partition = ctx.services.partitions.led(*tp)
        if partition is None:
            results[tp] = _Result(tp[1], ErrorCode.not_leader_or_follower)
        elif (
            partition.leading is not None
            and partition.leading.low_watermark(is_alive) < results[tp].low_watermark
        ):
            behind.append(tp)
        yield
    return behind


def _is_alive(ctx: RequestContext, broker_id: int) -> bool:
    broker = ctx.services.image.brokers.get(broker_id)
    return broker is not None and not broker.fenced
