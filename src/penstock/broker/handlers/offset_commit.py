"""OffsetCommit (key 8), v2-10. Topics by name, from v10 on by id; v2-4 may set their own retention.

Unknown topics and partitions get their own error; an error of the group or member applies to all other partitions. A
commit to a group that does not exist is accepted if it has no generation.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final, NamedTuple
from uuid import UUID

from kio.schema.offset_commit.v9 import response as by_name
from kio.schema.offset_commit.v10 import response as by_id

from penstock.broker.coordinators.requests import NO_THROTTLE, milliseconds, resolve_topic_name
from penstock.broker.network.requests import RequestContext, in_slices
from penstock.groups.group import CommitRequest, OffsetToCommit, PartitionsReply
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps

_MEMBER_EPOCHS_FROM: Final = 9
_TOPIC_IDS_FROM: Final = 10
#: Offsets that one operation of the coordinator commits. A request with more is not committed as a whole.
_COMMITTED_AT_ONCE: Final = 200


class _RequestIndex(NamedTuple):
    """The position of a partition in the request, so that the reply has the same order."""

    topic: int
    partition: int


@in_slices
def handle(ctx: RequestContext, request: Any) -> Steps[Any]:
    """Each partition is looked up in the image of its step; the coordinator checks the group when it commits."""
    errors: dict[_RequestIndex, ErrorCode] = {}
    offsets: dict[_RequestIndex, OffsetToCommit] = {}
    for topic_place, topic in enumerate(request.topics):
        name, error = resolve_topic_name(ctx, topic)
        for index, partition in enumerate(topic.partitions):
            if name is None or ctx.services.image.partition(name, partition.partition_index) is None:
                unknown = ErrorCode.unknown_topic_or_partition if error is ErrorCode.none else error
                errors[_RequestIndex(topic_place, index)] = unknown
            else:
                offsets[_RequestIndex(topic_place, index)] = _offset(name, partition)
            yield
    return _commit_and_respond(ctx, request, offsets, errors)


async def _commit_and_respond(
    ctx: RequestContext,
    request: Any,
    offsets: dict[_RequestIndex, OffsetToCommit],
    errors: dict[_RequestIndex, ErrorCode],
) -> Any:
    positions = list(offsets)
    # Offsets that a client sends later must also be committed later, so it is held until the last operation.
    with ctx.held() if len(positions) > _COMMITTED_AT_ONCE else nullcontext():
        for first in range(0, len(positions), _COMMITTED_AT_ONCE):
            piece = positions[first : first + _COMMITTED_AT_ONCE]
            reply = await _commit(ctx, request, tuple(offsets[position] for position in piece))
            for index, position in enumerate(piece):
                errors[position] = reply.partitions[index].error if reply.partitions else reply.error
    return await ctx.finish_in_slices(_response(ctx, request, errors))


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


def _response(ctx: RequestContext, request: Any, errors: dict[_RequestIndex, ErrorCode]) -> Steps[Any]:
    schema = by_id if ctx.version >= _TOPIC_IDS_FROM else by_name
    topics = []
    for topic_place, topic in enumerate(request.topics):
        partitions = []
        for index, partition in enumerate(topic.partitions):
            error = errors[_RequestIndex(topic_place, index)]
            partitions.append(
                schema.OffsetCommitResponsePartition(
                    partition_index=partition.partition_index, error_code=error
                )
            )
            yield
        topics.append(schema.OffsetCommitResponseTopic(partitions=tuple(partitions), **_topic_key(topic)))
        yield
    return schema.OffsetCommitResponse(throttle_time=NO_THROTTLE, topics=tuple(topics))


def _topic_key(topic: Any) -> dict[str, str | UUID | None]:
    return {"name": topic.name} if hasattr(topic, "name") else {"topic_id": topic.topic_id}
