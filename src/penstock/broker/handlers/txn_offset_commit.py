"""TxnOffsetCommit (key 28), v0-5. Offsets that take effect when the producer's transaction commits.

Unknown topics and partitions get their own error; an error of the group, the member or the transaction applies to all
other partitions. From v3 on a producer sends the member and generation that it commits for, and is refused if they
are fenced (KIP-447). The group's partition of `__consumer_offsets` must be in the transaction: up to v4 the producer
has added it, and the leader verifies that; from v5 on this handler adds it (KIP-890).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from kio.schema.txn_offset_commit.v5.response import (
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)

from penstock.broker.coordinators.groups.coordinator import OFFSETS_TOPIC
from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.coordinators.transactions.requests import check_transactional_id
from penstock.broker.coordinators.transactions.verification import TransactionalWriter
from penstock.broker.network.requests import RequestContext, in_slices
from penstock.groups.group import CommitRequest, OffsetToCommit, PartitionsReply, TransactionProducer
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.partition.partition import Partition
    from penstock.log.producer_state import VerificationGuard
    from penstock.protocol.steps import Steps

#: The Produce version that supports the same transaction protocol; for versions not listed, see the next line.
_PRODUCE_VERSION: Final = {4: 11, 5: 12}
_PRODUCE_VERSION_BEFORE: Final = 10
#: Producers before this version fail on COORDINATOR_LOAD_IN_PROGRESS instead of retrying.
_LOADING_KNOWN_FROM: Final = 2
_EPOCH_PER_TRANSACTION_FROM: Final = 5
#: Offsets that one operation of the coordinator adds. All of them take effect when the transaction commits.
_COMMITTED_AT_ONCE: Final = 200

_TopicPartition = tuple[str, int]


@in_slices
def handle(ctx: RequestContext, request: Any) -> Steps[Any]:
    """Each partition is looked up in the image of its step; the coordinator checks the producer when it commits."""
    errors: dict[_TopicPartition, ErrorCode] = {}
    offsets: dict[_TopicPartition, OffsetToCommit] = {}
    for topic in request.topics:
        for partition in topic.partitions:
            tp = (topic.name, partition.partition_index)
            if ctx.services.image.partition(*tp) is None:
                errors[tp] = ErrorCode.unknown_topic_or_partition
            else:
                offsets[tp] = _offset(topic.name, partition)
            yield
    return _commit_and_respond(ctx, request, offsets, errors)


async def _commit_and_respond(
    ctx: RequestContext,
    request: Any,
    offsets: dict[_TopicPartition, OffsetToCommit],
    errors: dict[_TopicPartition, ErrorCode],
) -> Any:
    partitions = list(offsets)
    # The transaction must not end before the last operation.
    with ctx.held() if len(partitions) > _COMMITTED_AT_ONCE else nullcontext():
        for first in range(0, len(partitions), _COMMITTED_AT_ONCE):
            piece = partitions[first : first + _COMMITTED_AT_ONCE]
            reply = await _commit(ctx, request, tuple(offsets[tp] for tp in piece))
            for index, tp in enumerate(piece):
                errors[tp] = reply.partitions[index].error if reply.partitions else reply.error
    return await ctx.finish_in_slices(_response(request, errors))


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
        return await _commit_in_transaction(ctx, request, offsets)
    except ApiError as error:
        return PartitionsReply(error=_error_for_client(ctx, error.code))


async def _commit_in_transaction(
    ctx: RequestContext, request: Any, offsets: tuple[OffsetToCommit, ...]
) -> PartitionsReply:
    """Raises ApiError."""
    check_transactional_id(request.transactional_id)
    if not request.group_id:
        raise ApiError(ErrorCode.invalid_group_id)
    if ctx.version < _EPOCH_PER_TRANSACTION_FROM:
        ctx.services.transactions.offset_callers.check_newest_connection(ctx, request.transactional_id)
    groups = ctx.services.groups
    groups.check_group_limit(request.group_id)
    partition = ctx.services.partitions.led(OFFSETS_TOPIC, groups.shard_of(request.group_id))
    if partition is None:
        raise ApiError(ErrorCode.not_coordinator)
    producer = TransactionProducer(request.producer_id, request.producer_epoch)
    commit = CommitRequest(
        group_id=request.group_id,
        member_id=request.member_id,
        generation=request.generation_id,
        instance_id=request.group_instance_id,
        offsets=offsets,
    )
    version = _PRODUCE_VERSION.get(ctx.version, _PRODUCE_VERSION_BEFORE)
    writer = TransactionalWriter(request.transactional_id, producer.id, producer.epoch, version)
    reply: PartitionsReply = await groups.write_verified(
        request.group_id,
        lambda shard, token: shard.commit_in_transaction(commit, producer, token, now_ms=groups.now_ms()),
        await _guard(ctx, partition, writer),
    )
    return reply


async def _guard(ctx: RequestContext, partition: Partition, writer: TransactionalWriter) -> VerificationGuard:
    """Returns a guard even if the transaction is already open here, because loading the shard may take time."""
    guard = await ctx.services.transactions.admission.guard(partition, writer)
    if guard is not None:
        return guard
    return partition.log.producers.begin_verification(writer.producer_id, writer.epoch)


def _error_for_client(ctx: RequestContext, error: ErrorCode) -> ErrorCode:
    """Maps partition errors to coordinator errors, because the client knows only the coordinator."""
    match error:
        case ErrorCode.not_enough_replicas:
            return ErrorCode.coordinator_not_available
        case ErrorCode.not_leader_or_follower:
            return ErrorCode.not_coordinator
        case ErrorCode.coordinator_load_in_progress if ctx.version < _LOADING_KNOWN_FROM:
            return ErrorCode.coordinator_not_available
        case _:
            return error


def _response(request: Any, errors: dict[_TopicPartition, ErrorCode]) -> Steps[Any]:
    topics = []
    for topic in request.topics:
        partitions = []
        for partition in topic.partitions:
            index = partition.partition_index
            partitions.append(
                TxnOffsetCommitResponsePartition(partition_index=index, error_code=errors[topic.name, index])
            )
            yield
        topics.append(TxnOffsetCommitResponseTopic(name=topic.name, partitions=tuple(partitions)))
        yield
    return TxnOffsetCommitResponse(throttle_time=NO_THROTTLE, topics=tuple(topics))
