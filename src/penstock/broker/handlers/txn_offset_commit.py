"""TxnOffsetCommit (key 28), v0-5. Offsets that count once the producer's transaction is committed.

Topics and partitions that do not exist are refused one by one; what is wrong with the group, the member or the
transaction is said of every other partition. From v3 on a producer names the member and generation whose work it
commits, and is refused where they are fenced (KIP-447). The group's partition of `__consumer_offsets` has to be in the
transaction: up to v4 the producer has seen to that, and it is verified; from v5 on it is added here (KIP-890).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kio.schema.txn_offset_commit.v5.response import (
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)

from penstock.broker.context import RequestContext
from penstock.broker.coordinator import OFFSETS_TOPIC
from penstock.broker.group_requests import NO_THROTTLE
from penstock.broker.transactions.admission import Writer
from penstock.broker.transactions.requests import refuse_nameless
from penstock.groups.messages import CommitRequest, OffsetToCommit, PartitionsReply
from penstock.groups.work import Producer
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.partition import Partition
    from penstock.log.transactions import VerificationGuard

#: The version of Produce that came with the same knowledge of transactions; older ones have less than all of these.
_PRODUCE_VERSION: Final = {4: 11, 5: 12}
_PRODUCE_VERSION_BEFORE: Final = 10
#: Producers before this version give up when they are told that the coordinator is loading.
_LOADING_KNOWN_FROM: Final = 2
_EPOCH_PER_TRANSACTION_FROM: Final = 5

_Place = tuple[str, int]


async def handle(ctx: RequestContext, request: Any) -> Any:
    errors: dict[_Place, ErrorCode] = {}
    offsets: dict[_Place, OffsetToCommit] = {}
    for topic in request.topics:
        for partition in topic.partitions:
            place = (topic.name, partition.partition_index)
            if ctx.node.image.partition(*place) is None:
                errors[place] = ErrorCode.unknown_topic_or_partition
            else:
                offsets[place] = _offset(topic.name, partition)
    if offsets:
        reply = await _commit(ctx, request, tuple(offsets.values()))
        for index, place in enumerate(offsets):
            errors[place] = reply.partitions[index].error if reply.partitions else reply.error
    return _response(request, errors)


def _offset(topic: str, partition: Any) -> OffsetToCommit:
    return OffsetToCommit(
        topic=topic,
        partition=partition.partition_index,
        offset=partition.committed_offset,
        leader_epoch=partition.committed_leader_epoch,
        metadata=partition.committed_metadata or "",
    )


async def _commit(ctx: RequestContext, request: Any, offsets: tuple[OffsetToCommit, ...]) -> PartitionsReply:
    try:
        return await _stage(ctx, request, offsets)
    except ApiError as error:
        return PartitionsReply(error=_told(ctx, error.code))


async def _stage(ctx: RequestContext, request: Any, offsets: tuple[OffsetToCommit, ...]) -> PartitionsReply:
    """Raises ApiError."""
    refuse_nameless(request.transactional_id)
    if not request.group_id:
        raise ApiError(ErrorCode.invalid_group_id)
    if ctx.version < _EPOCH_PER_TRANSACTION_FROM:
        ctx.node.transactions.offset_callers.refuse_late(ctx, request.transactional_id)
    groups = ctx.node.groups
    groups.check_room(request.group_id)
    partition = ctx.node.partitions.led(OFFSETS_TOPIC, groups.shard_of(request.group_id))
    if partition is None:
        raise ApiError(ErrorCode.not_coordinator)
    producer = Producer(request.producer_id, request.producer_epoch)
    commit = CommitRequest(
        group_id=request.group_id,
        member_id=request.member_id,
        generation=request.generation_id,
        instance_id=request.group_instance_id,
        offsets=offsets,
    )
    version = _PRODUCE_VERSION.get(ctx.version, _PRODUCE_VERSION_BEFORE)
    writer = Writer(request.transactional_id, producer.id, producer.epoch, version)
    reply: PartitionsReply = await groups.write_verified(
        request.group_id,
        lambda shard, token: shard.commit_in_transaction(commit, producer, token, now_ms=groups.now_ms()),
        await _guard(ctx, partition, writer),
    )
    return reply


async def _guard(ctx: RequestContext, partition: Partition, writer: Writer) -> VerificationGuard:
    """The shard may have to be loaded first: so one is held also where the transaction is open here by now."""
    guard = await ctx.node.transactions.admission.guard(partition, writer)
    if guard is not None:
        return guard
    return partition.log.producers.begin_verification(writer.producer_id, writer.epoch)


def _told(ctx: RequestContext, error: ErrorCode) -> ErrorCode:
    """Who commits offsets knows a coordinator, not the replicas of a partition."""
    match error:
        case ErrorCode.not_enough_replicas:
            return ErrorCode.coordinator_not_available
        case ErrorCode.not_leader_or_follower:
            return ErrorCode.not_coordinator
        case ErrorCode.coordinator_load_in_progress if ctx.version < _LOADING_KNOWN_FROM:
            return ErrorCode.coordinator_not_available
        case _:
            return error


def _response(request: Any, errors: dict[_Place, ErrorCode]) -> Any:
    return TxnOffsetCommitResponse(
        throttle_time=NO_THROTTLE,
        topics=tuple(
            TxnOffsetCommitResponseTopic(
                name=topic.name,
                partitions=tuple(
                    TxnOffsetCommitResponsePartition(
                        partition_index=partition.partition_index,
                        error_code=errors[topic.name, partition.partition_index],
                    )
                    for partition in topic.partitions
                ),
            )
            for topic in request.topics
        ),
    )
