"""OffsetFetch (key 9), v1-10. One group before v8, many from v8 on; topics by name, from v10 on by id.

Null topics select all committed offsets of the group. A partition without a committed offset has offset -1. The reply
waits until everything it shows is committed; with `require_stable` (from v7 on) a partition whose offset an open
transaction may change gets UNSTABLE_OFFSET_COMMIT.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kio.schema.offset_fetch.v7 import response as single
from kio.schema.offset_fetch.v9 import response as by_name
from kio.schema.offset_fetch.v10 import response as by_id

from penstock.broker.coordinators.requests import NO_THROTTLE, group_by_topic, resolve_topic_name
from penstock.broker.network.requests import RequestContext
from penstock.groups.group import FetchedOffset
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.protocol.errors import ApiError, ErrorCode

_TOP_LEVEL_ERROR_FROM: Final = 2
_MANY_GROUPS_FROM: Final = 8
_TOPIC_IDS_FROM: Final = 10


class _Partition(NamedTuple):
    number: int
    fetched: FetchedOffset | None = None
    error: ErrorCode = ErrorCode.none


class _Topic(NamedTuple):
    key: Any  # its name, or its id
    partitions: list[_Partition]


class _Group(NamedTuple):
    group_id: str
    topics: list[_Topic]
    error: ErrorCode = ErrorCode.none


async def handle(ctx: RequestContext, request: Any) -> Any:
    if ctx.version < _MANY_GROUPS_FROM:
        require_stable = getattr(request, "require_stable", False)
        return _single_response(ctx, await _fetch(ctx, request, require_stable))
    groups = await asyncio.gather(*(_fetch(ctx, group, request.require_stable) for group in request.groups))
    schema = by_id if ctx.version >= _TOPIC_IDS_FROM else by_name
    return schema.OffsetFetchResponse(
        throttle_time=NO_THROTTLE, groups=tuple(_group_response(ctx, schema, group) for group in groups)
    )


async def _fetch(ctx: RequestContext, wanted: Any, require_stable: bool) -> _Group:
    """`wanted` has a group id and topics: a group of the request, or an older request itself."""
    try:
        if wanted.topics is None:
            offsets = await _offsets(ctx, wanted, None, require_stable)
            return _Group(wanted.group_id, list(_known_topics(ctx, offsets)))
        return await _fetch_some(ctx, wanted, require_stable)
    except ApiError as error:
        # Consumers before 3.9 cannot handle COORDINATOR_NOT_AVAILABLE here, but look up the coordinator on
        # NOT_COORDINATOR.
        unavailable = error.code is ErrorCode.coordinator_not_available
        code = ErrorCode.not_coordinator if unavailable else error.code
        return _Group(wanted.group_id, _failed_topics(ctx, wanted, code), code)


async def _offsets(
    ctx: RequestContext, wanted: Any, places: list[tuple[str, int]] | None, require_stable: bool
) -> tuple[FetchedOffset, ...]:
    """Raises ApiError, also if the member id or epoch that the request carries (v9 and newer) does not match."""
    member_id, epoch = getattr(wanted, "member_id", None), getattr(wanted, "member_epoch", -1)

    def read(shard: GroupCoordinatorShard) -> tuple[FetchedOffset, ...] | ErrorCode:
        error = shard.check_fetch(wanted.group_id, member_id, epoch)
        if error is not ErrorCode.none:
            return error
        return shard.fetch(wanted.group_id, places, require_stable=require_stable)

    offsets = await ctx.services.groups.read(wanted.group_id, read)
    if isinstance(offsets, ErrorCode):
        raise ApiError(offsets)
    return offsets


def _known_topics(ctx: RequestContext, offsets: tuple[FetchedOffset, ...]) -> Iterator[_Topic]:
    for name, fetched in group_by_topic((each.topic, each) for each in offsets):
        partitions = [_Partition(each.partition, each, _stability_error(each)) for each in fetched]
        topic = ctx.services.image.topics.get(name)
        if ctx.version < _TOPIC_IDS_FROM:
            yield _Topic(name, partitions)
        elif topic is not None:
            yield _Topic(topic.id, partitions)


async def _fetch_some(ctx: RequestContext, wanted: Any, require_stable: bool) -> _Group:
    names = [resolve_topic_name(ctx, topic) for topic in wanted.topics]
    places = [
        (name, index)
        for topic, (name, _) in zip(wanted.topics, names, strict=True)
        for index in topic.partition_indexes
        if name is not None
    ]
    offsets = await _offsets(ctx, wanted, places, require_stable)
    found = {(each.topic, each.partition): each for each in offsets}
    topics = []
    for topic, (name, error) in zip(wanted.topics, names, strict=True):
        partitions = [
            _Partition(index, error=error)
            if name is None
            else _Partition(index, found[name, index], _stability_error(found[name, index]))
            for index in topic.partition_indexes
        ]
        topics.append(_Topic(_key(topic), partitions))
    return _Group(wanted.group_id, topics)


def _stability_error(fetched: FetchedOffset) -> ErrorCode:
    return ErrorCode.unstable_offset_commit if fetched.is_unstable else ErrorCode.none


def _failed_topics(ctx: RequestContext, wanted: Any, error: ErrorCode) -> list[_Topic]:
    """Only the oldest version has no top-level error, so every partition carries it."""
    if ctx.version >= _TOP_LEVEL_ERROR_FROM or wanted.topics is None:
        return []
    return [
        _Topic(_key(topic), [_Partition(index, error=error) for index in topic.partition_indexes])
        for topic in wanted.topics
    ]


def _key(topic: Any) -> Any:
    return topic.name if hasattr(topic, "name") else topic.topic_id


def _partition_fields(partition: _Partition) -> dict[str, Any]:
    committed = None if partition.fetched is None else partition.fetched.committed
    return {
        "partition_index": partition.number,
        "committed_offset": -1 if committed is None else committed.offset,
        "committed_leader_epoch": -1 if committed is None else committed.leader_epoch,
        "metadata": "" if committed is None else committed.metadata,
        "error_code": partition.error,
    }


def _single_response(ctx: RequestContext, group: _Group) -> Any:
    return single.OffsetFetchResponse(
        throttle_time=NO_THROTTLE,
        error_code=group.error,
        topics=tuple(
            single.OffsetFetchResponseTopic(
                name=topic.key,
                partitions=tuple(
                    single.OffsetFetchResponsePartition(**_partition_fields(each))
                    for each in topic.partitions
                ),
            )
            for topic in group.topics
        ),
    )


def _group_response(ctx: RequestContext, schema: Any, group: _Group) -> Any:
    key = "topic_id" if ctx.version >= _TOPIC_IDS_FROM else "name"
    topics = tuple(
        schema.OffsetFetchResponseTopics(
            **{key: topic.key},
            partitions=tuple(
                schema.OffsetFetchResponsePartitions(**_partition_fields(each)) for each in topic.partitions
            ),
        )
        for topic in group.topics
    )
    return schema.OffsetFetchResponseGroup(group_id=group.group_id, topics=topics, error_code=group.error)
