"""DescribeShareGroupOffsets (key 90), v0-1: start offsets of share partitions, and from v1 on their lag.

Null for the topics is all that the group has a state for. A start offset of -1 is not decided on yet: it will be by
share.auto.offset.reset, with the first fetch. The lag leaves out what is final behind the start offset.
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

from penstock.broker.context import RequestContext
from penstock.broker.group_requests import NO_THROTTLE
from penstock.broker.share.end_offsets import Place, end_offsets
from penstock.groups.share.group import existing
from penstock.groups.share.positions import places_of
from penstock.groups.share_state.values import UNSET
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.groups.share_state.values import ShareSummary

_UNKNOWN: Final = ApiError(ErrorCode.unknown_topic_or_partition)

#: The partitions of a topic, by its name.
Asked = list[tuple[str, list[int]]]


class _Position(NamedTuple):
    start_offset: int = UNSET
    leader_epoch: int = 0
    lag: int = -1


async def handle(ctx: RequestContext, request: Any) -> Any:
    groups = await asyncio.gather(*(_describe(ctx, group) for group in request.groups))
    return DescribeShareGroupOffsetsResponse(throttle_time=NO_THROTTLE, groups=tuple(groups))


async def _describe(ctx: RequestContext, group: Any) -> Any:
    try:
        asked = await _asked(ctx, group)
    except ApiError as error:
        return _group(group.group_id, (), error)
    places = [(name, index) for name, indexes in asked for index in indexes]
    positions = await _positions(ctx, group.group_id, places)
    topics = tuple(
        _topic(ctx, name, [_partition(index, positions[name, index]) for index in indexes])
        for name, indexes in asked
    )
    return _group(group.group_id, topics, None)


async def _asked(ctx: RequestContext, group: Any) -> Asked:
    groups, group_id = ctx.node.groups, group.group_id
    if group.topics is not None:
        await groups.read(group_id, lambda shard: existing(shard, group_id))
        return [(topic.topic_name, list(dict.fromkeys(topic.partitions))) for topic in group.topics]
    places = await groups.read(group_id, lambda shard: places_of(shard, group_id))
    named = ((groups.topics.by_id(topic_id), indexes) for topic_id, indexes in places.items())
    return [(topic.name, sorted(indexes)) for topic, indexes in named if topic is not None]


async def _positions(
    ctx: RequestContext, group_id: str, places: list[Place]
) -> dict[Place, _Position | ApiError]:
    answers = await asyncio.gather(*(_summary(ctx, group_id, place) for place in places))
    summaries = dict(zip(places, answers, strict=True))
    counted = [place for place, summary in summaries.items() if _has_lag(summary)]
    ends = await end_offsets(ctx.node, counted)
    return {place: _position(summary, ends.get(place)) for place, summary in summaries.items()}


async def _summary(ctx: RequestContext, group_id: str, place: Place) -> ShareSummary | ApiError:
    topic = ctx.node.groups.topics.get(place[0])
    if topic is None or place[1] not in topic.every_partition:
        return _UNKNOWN
    try:
        return await ctx.node.share_state.persister.summary(group_id, topic.id, place[1])
    except ApiError as error:
        return error


def _has_lag(summary: ShareSummary | ApiError) -> bool:
    if isinstance(summary, ApiError):
        return False
    return summary.start_offset != UNSET and summary.delivery_complete_count != UNSET


def _position(summary: ShareSummary | ApiError, end: int | ApiError | None) -> _Position | ApiError:
    if isinstance(summary, ApiError):
        return summary
    if isinstance(end, ApiError):
        return end
    lag = -1
    if end is not None:
        # The end may be of before the start was moved.
        lag = max(0, end - summary.start_offset - summary.delivery_complete_count)
    return _Position(summary.start_offset, max(summary.leader_epoch, 0), lag)


# -- answers -------------------------------------------------------------------------------------------


def _group(group_id: str, topics: tuple[Any, ...], error: ApiError | None) -> Any:
    return DescribeShareGroupOffsetsResponseGroup(
        group_id=group_id,
        topics=topics,
        error_code=ErrorCode.none if error is None else error.code,
        error_message=None if error is None else error.message,
    )


def _topic(ctx: RequestContext, name: str, partitions: list[Any]) -> Any:
    topic = ctx.node.groups.topics.get(name)
    return DescribeShareGroupOffsetsResponseTopic(
        topic_name=name, topic_id=None if topic is None else topic.id, partitions=tuple(partitions)
    )


def _partition(index: int, position: _Position | ApiError) -> Any:
    found = _Position() if isinstance(position, ApiError) else position
    return DescribeShareGroupOffsetsResponsePartition(
        partition_index=index,
        start_offset=found.start_offset,
        leader_epoch=found.leader_epoch,
        lag=found.lag,
        error_code=position.code if isinstance(position, ApiError) else ErrorCode.none,
        error_message=position.message if isinstance(position, ApiError) else None,
    )
