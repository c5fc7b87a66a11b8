"""DescribeShareGroupOffsets (key 90), v0-1. Start offsets of share partitions, and from v1 on their lag.

Null topics select all topics for which the group has state. A start offset of -1 is not decided yet:
share.auto.offset.reset decides it at the first fetch. The lag excludes records after the start offset whose delivery
is complete.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kio.schema.describe_share_group_offsets.v1.response import (
    DescribeShareGroupOffsetsResponse,
    DescribeShareGroupOffsetsResponseGroup,
    DescribeShareGroupOffsetsResponsePartition,
    DescribeShareGroupOffsetsResponseTopic,
)

from penstock.broker.coordinators.groups.end_offsets import PartitionKey, end_offsets
from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.network.requests import RequestContext
from penstock.groups.modern_group import require_group
from penstock.groups.share.share_group import ShareGroup
from penstock.groups.share.share_group_offsets import share_partitions_of
from penstock.groups.share.state.share_state import UNSET
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.groups.share.state.share_state import ShareStateSummary

_UNKNOWN: Final = ApiError(ErrorCode.unknown_topic_or_partition)

#: The partitions of a topic, by its name.
_RequestedTopics = list[tuple[str, list[int]]]


class _PartitionOffsets(NamedTuple):
    start_offset: int = UNSET
    leader_epoch: int = 0
    lag: int = -1


async def handle(ctx: RequestContext, request: Any) -> Any:
    groups = await asyncio.gather(*(_describe(ctx, group) for group in request.groups))
    return DescribeShareGroupOffsetsResponse(throttle_time=NO_THROTTLE, groups=tuple(groups))


async def _describe(ctx: RequestContext, group: Any) -> Any:
    try:
        asked = await _requested_topics(ctx, group)
    except ApiError as error:
        return _group(group.group_id, (), error)
    places = [(name, index) for name, indexes in asked for index in indexes]
    positions = await _read_offsets(ctx, group.group_id, places)
    topics = tuple(
        _topic(ctx, name, [_partition(index, positions[name, index]) for index in indexes])
        for name, indexes in asked
    )
    return _group(group.group_id, topics, None)


async def _requested_topics(ctx: RequestContext, group: Any) -> _RequestedTopics:
    groups, group_id = ctx.services.groups, group.group_id
    if group.topics is not None:
        await groups.read(group_id, lambda shard: require_group(shard, group_id, ShareGroup))
        return [(topic.topic_name, list(dict.fromkeys(topic.partitions))) for topic in group.topics]
    places = await groups.read(group_id, lambda shard: share_partitions_of(shard, group_id))
    named = ((groups.topics.by_id(topic_id), indexes) for topic_id, indexes in places.items())
    return [(topic.name, sorted(indexes)) for topic, indexes in named if topic is not None]


async def _read_offsets(
    ctx: RequestContext, group_id: str, places: list[PartitionKey]
) -> dict[PartitionKey, _PartitionOffsets | ApiError]:
    answers = await asyncio.gather(*(_summary(ctx, group_id, place) for place in places))
    summaries = dict(zip(places, answers, strict=True))
    counted = [place for place, summary in summaries.items() if _has_lag(summary)]
    ends = await end_offsets(ctx.services, ctx.services.brokers, counted)
    return {place: _partition_offsets(summary, ends.get(place)) for place, summary in summaries.items()}


async def _summary(ctx: RequestContext, group_id: str, place: PartitionKey) -> ShareStateSummary | ApiError:
    topic = ctx.services.groups.topics.get(place[0])
    if topic is None or place[1] not in topic.every_partition:
        return _UNKNOWN
    try:
        return await ctx.services.share_state.persister.summary(group_id, topic.id, place[1])
    except ApiError as error:
        return error


def _has_lag(summary: ShareStateSummary | ApiError) -> bool:
    if isinstance(summary, ApiError):
        return False
    return summary.start_offset != UNSET and summary.delivery_complete_count != UNSET


def _partition_offsets(
    summary: ShareStateSummary | ApiError, end: int | ApiError | None
) -> _PartitionOffsets | ApiError:
    if isinstance(summary, ApiError):
        return summary
    if isinstance(end, ApiError):
        return end
    lag = -1
    if end is not None:
        # The leader may return an end offset that is older than the start offset.
        lag = max(0, end - summary.start_offset - summary.delivery_complete_count)
    return _PartitionOffsets(summary.start_offset, max(summary.leader_epoch, 0), lag)


# -- responses -----------------------------------------------------------------------------------------


def _group(group_id: str, topics: tuple[Any, ...], error: ApiError | None) -> Any:
    return DescribeShareGroupOffsetsResponseGroup(
        group_id=group_id,
        topics=topics,
        error_code=ErrorCode.none if error is None else error.code,
        error_message=None if error is None else error.message,
    )


def _topic(ctx: RequestContext, name: str, partitions: list[Any]) -> Any:
    topic = ctx.services.groups.topics.get(name)
    return DescribeShareGroupOffsetsResponseTopic(
        topic_name=name, topic_id=None if topic is None else topic.id, partitions=tuple(partitions)
    )


def _partition(index: int, position: _PartitionOffsets | ApiError) -> Any:
    found = _PartitionOffsets() if isinstance(position, ApiError) else position
    return DescribeShareGroupOffsetsResponsePartition(
        partition_index=index,
        start_offset=found.start_offset,
        leader_epoch=found.leader_epoch,
        lag=found.lag,
        error_code=position.code if isinstance(position, ApiError) else ErrorCode.none,
        error_message=position.message if isinstance(position, ApiError) else None,
    )
