"""OffsetCommit (key 8), v2-10. Topics by name, from v10 on by id; v2-4 may set their own retention.

Unknown topics and partitions get their own error; an error of the group or member applies to all other partitions. A
commit to a group that does not exist is accepted if it has no generation.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from uuid import UUID

from kio.schema.offset_commit.v9 import response as by_name
from kio.schema.offset_commit.v10 import response as by_id

from penstock.broker.coordinators.requests import NO_THROTTLE, milliseconds, resolve_topic_name
from penstock.broker.network.requests import RequestContext
from penstock.groups.group import CommitRequest, OffsetToCommit, PartitionsReply
from penstock.protocol.errors import ApiError, ErrorCode

_MEMBER_EPOCHS_FROM: Final = 9
_TOPIC_IDS_FROM: Final = 10


class _RequestIndex(NamedTuple):
    """The position of a partition in the request, so that the reply has the same order."""

    topic: int
    partition: int


async def handle(ctx: RequestContext, request: Any) -> Any:
    errors: dict[_RequestIndex, ErrorCode] = {}
    offsets: dict[_RequestIndex, OffsetToCommit] = {}
    for topic_place, topic in enumerate(request.topics):
        name, error = resolve_topic_name(ctx, topic)
        for place, partition in enumerate(topic.partitions):
            if name is None or ctx.services.image.partition(name, partition.partition_index) is None:
                unknown = ErrorCode.unknown_topic_or_partition if error is ErrorCode.none else error
                errors[_RequestIndex(topic_place, place)] = unknown
            else:
                offsets[_RequestIndex(topic_place, place)] = _offset(name, partition)
    if offsets:
        reply = await _commit(ctx, request, tuple(offsets.values()))
        for index, spot in enumerate(offsets):
            errors[spot] = reply.partitions[index].error if reply.partitions else reply.error
    return _response(ctx, request, errors)


def _offset(topic: str, partition: Any) -> OffsetToCommit:
    return OffsetToCommit(
        topic=topic,
        partition=partition.partition_index,
        offset=partition.committed_offset,
        leader_epoch=getattr(partition, "committed_leader_epoch", -1),
        metadata=partition.committed_metadata or "",
    )


async def _commit(ctx: RequestContext, request: Any, offsets: tuple[OffsetToCommit, ...]) -> PartitionsReply:
    groups = ctx.services.groups
    commit = CommitRequest(
        group_id=request.group_id,
        member_id=request.member_id,
        generation=request.generation_id_or_member_epoch,
        instance_id=getattr(request, "group_instance_id", None),
        offsets=offsets,
        retention_ms=_retention_ms(request),
        error_if_no_group=(
            ErrorCode.group_id_not_found
            if ctx.version >= _MEMBER_EPOCHS_FROM
            else ErrorCode.illegal_generation
        ),
        knows_member_epochs=ctx.version >= _MEMBER_EPOCHS_FROM,
    )
    try:
        groups.check_group_limit(commit.group_id)
        reply: PartitionsReply = await groups.write(
            commit.group_id, lambda shard, token: shard.commit(commit, token, now_ms=groups.now_ms())
        )
    except ApiError as error:
        return PartitionsReply(error=error.code)
    return reply


def _retention_ms(request: Any) -> int | None:
    retention = getattr(request, "retention_time", None)
    if retention is None or milliseconds(retention) < 0:
        return None
    return milliseconds(retention)


def _response(ctx: RequestContext, request: Any, errors: dict[_RequestIndex, ErrorCode]) -> Any:
    schema = by_id if ctx.version >= _TOPIC_IDS_FROM else by_name
    topics = []
    for topic_place, topic in enumerate(request.topics):
        partitions = tuple(
            schema.OffsetCommitResponsePartition(
                partition_index=partition.partition_index,
                error_code=errors[_RequestIndex(topic_place, place)],
            )
            for place, partition in enumerate(topic.partitions)
        )
        topics.append(schema.OffsetCommitResponseTopic(partitions=partitions, **_topic_key(topic)))
    return schema.OffsetCommitResponse(throttle_time=NO_THROTTLE, topics=tuple(topics))


def _topic_key(topic: Any) -> dict[str, str | UUID | None]:
    return {"name": topic.name} if hasattr(topic, "name") else {"topic_id": topic.topic_id}
