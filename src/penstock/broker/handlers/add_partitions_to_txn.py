"""AddPartitionsToTxn (key 24), v0-5. Adds partitions to a transaction; the first one begins it.

v0-3: a producer of the older protocol adds partitions to its own transaction. v4 and later: partition leaders send
many transactions at once, either to verify that a partition is in the transaction or to add it for a producer of the
newer protocol. If one partition of a transaction does not exist, no partition of that transaction is added; the
existing ones get OPERATION_NOT_ATTEMPTED.
"""

from __future__ import annotations

import asyncio
from operator import itemgetter
from typing import Any, Final

from kio.schema.add_partitions_to_txn.v3 import response as single
from kio.schema.add_partitions_to_txn.v5 import response as many

from penstock.broker.coordinators.requests import NO_THROTTLE, group_by_topic
from penstock.broker.coordinators.transactions.request_queue import PartitionErrors
from penstock.broker.coordinators.transactions.requests import (
    PRODUCER_FENCED_FROM_VERSION,
    error_for_version,
    protocol_version,
)
from penstock.broker.network.requests import RequestContext
from penstock.cluster.topic_names import is_internal
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import AddPartitionsRequest, TopicPartition

_BATCHED_FROM: Final = 4


async def handle(ctx: RequestContext, request: Any) -> Any:
    if ctx.version < _BATCHED_FROM:
        return await _handle_producer(ctx, request)
    results = await asyncio.gather(
        *(
            ctx.services.transactions.join(_add_request(each), verify_only=each.verify_only)
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
    asked = AddPartitionsRequest(
        request.v3_and_below_transactional_id,
        request.v3_and_below_producer_id,
        request.v3_and_below_producer_epoch,
        _partitions(request.v3_and_below_topics),
    )
    outcomes = await _join(ctx, asked)
    knows_fenced = ctx.version >= PRODUCER_FENCED_FROM_VERSION
    outcomes = {
        partition: error_for_version(error, knows_fenced=knows_fenced)
        for partition, error in outcomes.items()
    }
    return single.AddPartitionsToTxnResponse(
        throttle_time=NO_THROTTLE, results_by_topic_v3_and_below=_topics(single, outcomes)
    )


def _add_request(transaction: Any) -> AddPartitionsRequest:
    return AddPartitionsRequest(
        transaction.transactional_id,
        transaction.producer_id,
        transaction.producer_epoch,
        _partitions(transaction.topics),
        protocol_version(not transaction.verify_only),
    )


def _partitions(topics: Any) -> tuple[TopicPartition, ...]:
    return tuple(TopicPartition(topic.name, index) for topic in topics for index in topic.partitions)


async def _join(ctx: RequestContext, asked: AddPartitionsRequest) -> PartitionErrors:
    transactions = ctx.services.transactions
    try:
        transactions.callers.check_newest_connection(ctx, asked.transactional_id)
    except ApiError as error:
        return dict.fromkeys(asked.partitions, error.code)
    # Producers add offsets by group, not by partition.
    internal = [partition for partition in asked.partitions if is_internal(partition.topic)]
    return await transactions.join(asked, verify_only=False, forbidden=internal)


def _topics(schema: Any, outcomes: PartitionErrors) -> tuple[Any, ...]:
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
        for topic, parts in group_by_topic(placed)
    )
