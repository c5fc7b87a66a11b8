"""AddPartitionsToTxn (key 24), v0-5. Partitions join a transaction, which begins with the first.

v0-3 is what producers of the older protocol ask for one transaction. From v4 on leaders ask, for many: to verify that
a partition is in the transaction, or to add it for a producer of the newer protocol. A partition that does not exist
keeps the others of its transaction from being added too: OPERATION_NOT_ATTEMPTED.
"""

from __future__ import annotations

import asyncio
from operator import itemgetter
from typing import Any, Final

from kio.schema.add_partitions_to_txn.v3 import response as single
from kio.schema.add_partitions_to_txn.v5 import response as many

from penstock.broker.context import RequestContext
from penstock.broker.group_requests import NO_THROTTLE, by_topic
from penstock.broker.transactions.requests import FENCED_FROM, protocol_version, refuse_nameless, told
from penstock.cluster.names import is_internal
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import AddRequest, TopicPartition

_MANY_FROM: Final = 4

Outcomes = list[tuple[TopicPartition, ErrorCode]]


async def handle(ctx: RequestContext, request: Any) -> Any:
    if ctx.version < _MANY_FROM:
        return await _handle_producer(ctx, request)
    results = await asyncio.gather(
        *(_add(ctx, _asked(each), each.verify_only) for each in request.transactions)
    )
    return many.AddPartitionsToTxnResponse(
        throttle_time=NO_THROTTLE,
        error_code=ErrorCode.none,
        results_by_transaction=tuple(
            many.AddPartitionsToTxnResult(
                transactional_id=each.transactional_id, topic_results=_topics(many, outcomes)
            )
            for each, outcomes in zip(request.transactions, results, strict=True)
        ),
    )


async def _handle_producer(ctx: RequestContext, request: Any) -> Any:
    asked = AddRequest(
        request.v3_and_below_transactional_id,
        request.v3_and_below_producer_id,
        request.v3_and_below_producer_epoch,
        _partitions(request.v3_and_below_topics),
    )
    outcomes = await _add(ctx, asked, verify_only=False)
    knows_fenced = ctx.version >= FENCED_FROM
    outcomes = [(partition, told(error, knows_fenced=knows_fenced)) for partition, error in outcomes]
    return single.AddPartitionsToTxnResponse(
        throttle_time=NO_THROTTLE, results_by_topic_v3_and_below=_topics(single, outcomes)
    )


def _asked(transaction: Any) -> AddRequest:
    return AddRequest(
        transaction.transactional_id,
        transaction.producer_id,
        transaction.producer_epoch,
        _partitions(transaction.topics),
        protocol_version(not transaction.verify_only),
    )


def _partitions(topics: Any) -> tuple[TopicPartition, ...]:
    return tuple(TopicPartition(topic.name, index) for topic in topics for index in topic.partitions)


async def _add(ctx: RequestContext, asked: AddRequest, verify_only: bool) -> Outcomes:
    flaws = [_flaw(ctx, partition) for partition in asked.partitions]
    if any(flaws):
        not_tried = ErrorCode.operation_not_attempted
        return [(each, flaw or not_tried) for each, flaw in zip(asked.partitions, flaws, strict=True)]
    transactions = ctx.node.transactions
    try:
        refuse_nameless(asked.transactional_id)
        if ctx.version < _MANY_FROM:
            transactions.callers.refuse_late(ctx, asked.transactional_id)
        reply = await (
            transactions.verify_partitions(asked) if verify_only else transactions.add_partitions(asked)
        )
    except ApiError as error:
        return [(each, error.code) for each in asked.partitions]
    return list(reply.partitions)


def _flaw(ctx: RequestContext, partition: TopicPartition) -> ErrorCode | None:
    """Why a partition cannot be in a transaction. Offsets are added by group, not by partition."""
    if ctx.version < _MANY_FROM and is_internal(partition.topic):
        return ErrorCode.topic_authorization_failed
    if ctx.node.image.partition(*partition) is None:
        return ErrorCode.unknown_topic_or_partition
    return None


def _topics(schema: Any, outcomes: Outcomes) -> tuple[Any, ...]:
    in_order = sorted(outcomes, key=itemgetter(0))
    placed = [(partition.topic, (partition.partition, error)) for partition, error in in_order]
    return tuple(
        schema.AddPartitionsToTxnTopicResult(
            name=topic,
            results_by_partition=tuple(
                schema.AddPartitionsToTxnPartitionResult(partition_index=index, partition_error_code=error)
                for index, error in parts
            ),
        )
        for topic, parts in by_topic(placed)
    )
