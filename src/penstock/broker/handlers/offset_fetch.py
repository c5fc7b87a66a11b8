"""OffsetFetch (key 9), v1-10. One group before v8, many from v8 on; topics by name, from v10 on by id.

Null topics select all committed offsets of the group. A partition without a committed offset has offset -1. The reply
waits until everything it shows is committed; with `require_stable` (from v7 on) a partition whose offset an open
transaction may change gets UNSTABLE_OFFSET_COMMIT.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from kio.schema.offset_fetch.v7 import response as single
from kio.schema.offset_fetch.v9 import response as by_name
from kio.schema.offset_fetch.v10 import response as by_id

from penstock.broker.coordinators.requests import (
    NO_THROTTLE,
    gather_in_pieces,
    group_by_topic,
    resolve_topic_name,
)
from penstock.broker.network.requests import RequestContext
from penstock.groups.group import FetchedOffset
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps

_TOP_LEVEL_ERROR_FROM: Final = 2
_MANY_GROUPS_FROM: Final = 8
_TOPIC_IDS_FROM: Final = 10
#: Partitions whose offsets are read in one operation of the coordinator.
_READ_AT_ONCE: Final = 500


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
        return await ctx.finish_in_slices(_single_response(await _fetch(ctx, request, require_stable)))
    groups = await gather_in_pieces(lambda group: _fetch(ctx, group, request.require_stable), request.groups)
    return await ctx.finish_in_slices(_response(ctx, groups))


async def _fetch(ctx: RequestContext, wanted: Any, require_stable: bool) -> _Group:
    """`wanted` has a group id and topics: a group of the request, or an older request itself."""
    try:
        if not ctx.demand(Operation.DESCRIBE, ResourceType.GROUP, wanted.group_id):
            raise ApiError(ErrorCode.group_authorization_failed)
        if wanted.topics is None:
            offsets = await _offsets(ctx, wanted, None, require_stable)
            return _Group(wanted.group_id, await ctx.finish_in_slices(_known_topics(ctx, offsets)))
        return await _fetch_some(ctx, wanted, require_stable)
    except ApiError as error:
        # Consumers before 3.9 cannot handle COORDINATOR_NOT_AVAILABLE here, but look up the coordinator on
        # NOT_COORDINATOR.
        unavailable = error.code is ErrorCode.coordinator_not_available
        code = ErrorCode.not_coordinator if unavailable else error.code
        return _Group(wanted.group_id, _failed_topics(ctx, wanted, code), code)


async def _offsets(
    ctx: RequestContext, wanted: Any, partitions: list[tuple[str, int]] | None, require_stable: bool
) -> tuple[FetchedOffset, ...]:
    """Raises ApiError, also if the member id or epoch that the request carries (v9 and newer) does not match."""
    member_id, epoch = getattr(wanted, "member_id", None), getattr(wanted, "member_epoch", -1)

    def read(shard: GroupCoordinatorShard) -> tuple[FetchedOffset, ...] | ErrorCode:
        error = shard.check_fetch(wanted.group_id, member_id, epoch)
        if error is not ErrorCode.none:
            return error
        return shard.fetch(wanted.group_id, partitions, require_stable=require_stable)

    offsets = await ctx.services.groups.read(wanted.group_id, read)
    if isinstance(offsets, ErrorCode):
        raise ApiError(offsets)
    return offsets


def _known_topics(ctx: RequestContext, offsets: tuple[FetchedOffset, ...]) -> Steps[list[_Topic]]:
    topics = []
    for name, fetched in group_by_topic((each.topic, each) for each in offsets):
        yield
        if not ctx.may(Operation.DESCRIBE, ResourceType.TOPIC, name):
            continue
        partitions = [_Partition(each.partition, each, _stability_error(each)) for each in fetched]
        topic = ctx.services.image.topics.get(name)
        if ctx.version < _TOPIC_IDS_FROM:
            topics.append(_Topic(name, partitions))
        elif topic is not None:
            topics.append(_Topic(topic.id, partitions))
    return topics


async def _fetch_some(ctx: RequestContext, wanted: Any, require_stable: bool) -> _Group:
    names, partitions = await ctx.finish_in_slices(_authorized_places(ctx, wanted))
    found: dict[tuple[str, int], FetchedOffset] = {}
    # The offsets of two partitions may be committed separately, so they need not be read together.
    for first in range(0, max(len(partitions), 1), _READ_AT_ONCE):
        offsets = await _offsets(ctx, wanted, partitions[first : first + _READ_AT_ONCE], require_stable)
        found.update(((each.topic, each.partition), each) for each in offsets)
    return _Group(wanted.group_id, await ctx.finish_in_slices(_found_topics(wanted, names, found)))


def _authorized_places(
    ctx: RequestContext, wanted: Any
) -> Steps[tuple[list[tuple[str | None, ErrorCode]], list[tuple[str, int]]]]:
    """Return the name of each topic, or its error, and the partitions that are read."""
    names, partitions = [], []
    for topic in wanted.topics:
        name, error = _authorized_name(ctx, topic)
        names.append((name, error))
        if name is not None:
            partitions += [(name, index) for index in topic.partition_indexes]
        yield
    return names, partitions


def _found_topics(
    wanted: Any,
    names: list[tuple[str | None, ErrorCode]],
    found: dict[tuple[str, int], FetchedOffset],
) -> Steps[list[_Topic]]:
    topics = []
    for topic, (name, error) in zip(wanted.topics, names, strict=True):
        partitions = []
        for index in topic.partition_indexes:
            if name is None:
                partitions.append(_Partition(index, error=error))
            else:
                fetched = found[name, index]
                partitions.append(_Partition(index, fetched, _stability_error(fetched)))
            yield
        topics.append(_Topic(_key(topic), partitions))
    return topics


def _authorized_name(ctx: RequestContext, topic: Any) -> tuple[str | None, ErrorCode]:
    """Return the topic's name, or the error code for all its partitions."""
    name, error = resolve_topic_name(ctx, topic)
    if name is not None and not ctx.demand(Operation.DESCRIBE, ResourceType.TOPIC, name):
        return None, ErrorCode.topic_authorization_failed
    return name, error


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


def _single_response(group: _Group) -> Steps[Any]:
    topics = []
    for topic in group.topics:
        partitions = []
        for each in topic.partitions:
            partitions.append(single.OffsetFetchResponsePartition(**_partition_fields(each)))
            yield
        topics.append(single.OffsetFetchResponseTopic(name=topic.key, partitions=tuple(partitions)))
    return single.OffsetFetchResponse(throttle_time=NO_THROTTLE, error_code=group.error, topics=tuple(topics))


def _response(ctx: RequestContext, found: list[_Group]) -> Steps[Any]:
    is_by_id = ctx.version >= _TOPIC_IDS_FROM
    schema, key = (by_id, "topic_id") if is_by_id else (by_name, "name")
    groups = []
    for group in found:
        topics = []
        for topic in group.topics:
            partitions = []
            for each in topic.partitions:
                partitions.append(schema.OffsetFetchResponsePartitions(**_partition_fields(each)))
                yield
            topics.append(schema.OffsetFetchResponseTopics(**{key: topic.key}, partitions=tuple(partitions)))
            yield
        groups.append(
            schema.OffsetFetchResponseGroup(
                group_id=group.group_id, topics=tuple(topics), error_code=group.error
            )
        )
        yield
    return schema.OffsetFetchResponse(throttle_time=NO_THROTTLE, groups=tuple(groups))
