"""DescribeShareGroupOffsets (key 90), v0-1. Start offsets of share partitions, and from v1 on their lag.

Null topics select all topics for which the group has state. A start offset of -1 is not decided yet:
share.auto.offset.reset decides it at the first fetch. The lag excludes records after the start offset whose delivery
is complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kio.schema.describe_share_group_offsets.v1.response import (
    DescribeShareGroupOffsetsResponse,
    DescribeShareGroupOffsetsResponseGroup,
    DescribeShareGroupOffsetsResponsePartition,
    DescribeShareGroupOffsetsResponseTopic,
)

from penstock.broker.coordinators.groups.end_offsets import PartitionKey, end_offsets
from penstock.broker.coordinators.requests import NO_THROTTLE, gather_in_pieces
from penstock.broker.network.requests import RequestContext
from penstock.groups.modern_group import require_group
from penstock.groups.share.share_group import ShareGroup
from penstock.groups.share.share_group_offsets import share_partitions_of
from penstock.groups.share.state.share_state import UNSET
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from uuid import UUID

    from penstock.groups.share.state.share_state import ShareStateSummary
    from penstock.protocol.steps import Steps

#: Share partitions that are requested together from their coordinators, and from the leaders of the partitions.
_READ_AT_ONCE: Final = 100
_UNKNOWN: Final = ApiError(ErrorCode.unknown_topic_or_partition)
_REFUSED: Final = ApiError(ErrorCode.topic_authorization_failed)

#: The partitions of a topic, by its name.
_RequestedTopics = list[tuple[str, list[int]]]


class _SharePartition(NamedTuple):
    group_id: str
    topic: str
    partition: int


class _PartitionOffsets(NamedTuple):
    start_offset: int = UNSET
    leader_epoch: int = 0
    lag: int = -1


#: What is known of each share partition of the request.
_Offsets = dict[_SharePartition, _PartitionOffsets | ApiError]
#: The topics of a group, or its error.
_Asked = tuple[str, _RequestedTopics | ApiError]


async def handle(ctx: RequestContext, request: Any) -> Any:
    asked = await gather_in_pieces(lambda group: _asked(ctx, group), request.groups)
    offsets: _Offsets = {}
    known = await ctx.finish_in_slices(_known_partitions(ctx, asked, offsets))
    partitions = list(known)
    for first in range(0, len(partitions), _READ_AT_ONCE):
        piece = partitions[first : first + _READ_AT_ONCE]
        offsets |= await _read_offsets(ctx, [(partition, known[partition]) for partition in piece])
    return await ctx.finish_in_slices(_response(ctx, asked, offsets))


async def _asked(ctx: RequestContext, group: Any) -> _Asked:
    try:
        return group.group_id, await _requested_topics(ctx, group)
    except ApiError as error:
        # A copy without its traceback, because it takes long to free very many of them.
        return group.group_id, ApiError(error.code, error.message)


async def _requested_topics(ctx: RequestContext, group: Any) -> _RequestedTopics:
    groups, group_id = ctx.services.groups, group.group_id
    if not ctx.demand(Operation.DESCRIBE, ResourceType.GROUP, group_id):
        raise ApiError(ErrorCode.group_authorization_failed)
    if group.topics is not None:
        await groups.read(group_id, lambda shard: require_group(shard, group_id, ShareGroup))
        return [(topic.topic_name, list(dict.fromkeys(topic.partitions))) for topic in group.topics]
    partitions = await groups.read(group_id, lambda shard: share_partitions_of(shard, group_id))
    named = ((groups.topics.by_id(topic_id), indexes) for topic_id, indexes in partitions.items())
    return [
        (topic.name, sorted(indexes))
        for topic, indexes in named
        if topic is not None and ctx.may(Operation.DESCRIBE, ResourceType.TOPIC, topic.name)
    ]


def _known_partitions(
    ctx: RequestContext, asked: list[_Asked], offsets: _Offsets
) -> Steps[dict[_SharePartition, UUID]]:
    """Return the partitions that exist, with the ids of their topics; `offsets` gets the errors of the others.

    Each partition is looked up in the image of its step.
    """
    known: dict[_SharePartition, UUID] = {}
    for group_id, topics in asked:
        if isinstance(topics, ApiError):
            continue
        for name, indexes in topics:
            may_describe = ctx.demand(Operation.DESCRIBE, ResourceType.TOPIC, name)
            for index in indexes:
                partition = _SharePartition(group_id, name, index)
                topic = ctx.services.groups.topics.get(name)
                if not may_describe:
                    offsets[partition] = _REFUSED
                elif topic is None or index not in topic.every_partition:
                    offsets[partition] = _UNKNOWN
                else:
                    known[partition] = topic.id
                yield
            yield
    return known


async def _read_offsets(ctx: RequestContext, partitions: list[tuple[_SharePartition, UUID]]) -> _Offsets:
    async def summary(found: tuple[_SharePartition, UUID]) -> ShareStateSummary | ApiError:
        (group_id, _, index), topic_id = found
        try:
            return await ctx.services.share_state.persister.summary(group_id, topic_id, index)
        except ApiError as error:
            return error

    answers = await gather_in_pieces(summary, partitions, at_once=_READ_AT_ONCE)
    summaries = {partition: answer for (partition, _), answer in zip(partitions, answers, strict=True)}
    counted: dict[PartitionKey, None] = {
        (partition.topic, partition.partition): None
        for partition, answer in summaries.items()
        if _has_lag(answer)
    }
    ends = await end_offsets(ctx.services, ctx.services.brokers, counted)
    return {
        partition: _partition_offsets(answer, ends.get((partition.topic, partition.partition)))
        for partition, answer in summaries.items()
    }


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


def _response(ctx: RequestContext, asked: list[_Asked], offsets: _Offsets) -> Steps[Any]:
    groups = []
    for group_id, asked_topics in asked:
        if isinstance(asked_topics, ApiError):
            groups.append(_group(group_id, (), asked_topics))
            yield
            continue
        topics = []
        for name, indexes in asked_topics:
            partitions = []
            for index in indexes:
                partitions.append(_partition(index, offsets[_SharePartition(group_id, name, index)]))
                yield
            topics.append(_topic(ctx, name, partitions))
            yield
        groups.append(_group(group_id, tuple(topics), None))
    return DescribeShareGroupOffsetsResponse(throttle_time=NO_THROTTLE, groups=tuple(groups))


def _group(group_id: str, topics: tuple[Any, ...], error: ApiError | None) -> Any:
    return DescribeShareGroupOffsetsResponseGroup(
        group_id=group_id,
        topics=topics,
        error_code=ErrorCode.none if error is None else error.code,
        error_message=None if error is None else error.message,
    )


def _topic(ctx: RequestContext, name: str, partitions: list[Any]) -> Any:
    may_describe = ctx.may(Operation.DESCRIBE, ResourceType.TOPIC, name)
    topic = ctx.services.groups.topics.get(name) if may_describe else None
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
