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
from penstock.broker.transactions.outbox import Outcomes
from penstock.broker.transactions.requests import FENCED_FROM, protocol_version, told
from penstock.cluster.names import is_internal
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import AddRequest, TopicPartition

_MANY_FROM: Final = 4


async def handle(ctx: RequestContext, request: Any) -> Any:
    if ctx.version < _MANY_FROM:
        return await _handle_producer(ctx, request)
    results = await asyncio.gather(
        *(
            ctx.node.transactions.join(_asked(each), verify_only=each.verify_only)
            for each in request.transactions
        )
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
    outcomes = await _join(ctx, asked)
    knows_fenced = ctx.version >= FENCED_FROM
    outcomes = {partition: told(error, knows_fenced=knows_fenced) for partition, error in outcomes.items()}
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


async def _join(ctx: RequestContext, asked: AddRequest) -> Outcomes:
    transactions = ctx.node.transactions
    try:
        transactions.callers.refuse_late(ctx, asked.transactional_id)
    except ApiError as error:
        return dict.fromkeys(asked.partitions, error.code)
    # Producers add offsets by group, not by partition.
    internal = [partition for partition in asked.partitions if is_internal(partition.topic)]
    return await transactions.join(asked, verify_only=False, forbidden=internal)


def _topics(schema: Any, outcomes: Outcomes) -> tuple[Any, ...]:
    in_order = sorted(outcomes.items(), key=itemgetter(0))
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
