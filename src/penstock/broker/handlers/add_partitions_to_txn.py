"""AddPartitionsToTxn (key 24), v0-5. Adds partitions to a transaction; the first one begins it.

v0-3: a producer of the older protocol adds partitions to its own transaction. v4 and later: partition leaders send
many transactions at once, either to verify that a partition is in the transaction or to add it for a producer of the
newer protocol. If one partition of a transaction does not exist, no partition of that transaction is added; the
existing ones get OPERATION_NOT_ATTEMPTED.
"""

from __future__ import annotations

import asyncio
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from kio.schema.add_partitions_to_txn.v3 import response as single
from kio.schema.add_partitions_to_txn.v5 import response as many

from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.coordinators.transactions.request_queue import PartitionErrors
from penstock.broker.coordinators.transactions.requests import (
    PRODUCER_FENCED_FROM_VERSION,
    error_for_version,
    protocol_version,
)
from penstock.broker.network.requests import RequestContext
from penstock.cluster.topic_names import is_internal
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps, finish
from penstock.transactions.messages import AddPartitionsRequest, TopicPartition

_BATCHED_FROM: Final = 4


def handle(ctx: RequestContext, request: Any) -> Any:
    if ctx.version < _BATCHED_FROM:
        return ctx.in_slices(_handle_producer(ctx, request))
    return _handle_leader(ctx, request)


async def _handle_leader(ctx: RequestContext, request: Any) -> Any:
    transactions = ctx.services.transactions
    results = await asyncio.gather(
        *(
            transactions.join(_add_request(each), verify_only=each.verify_only)
            for each in request.transactions
        )
    )
    return many.AddPartitionsToTxnResponse(
        throttle_time=NO_THROTTLE,
        error_code=ErrorCode.none,
        results_by_transaction=tuple(
            many.AddPartitionsToTxnResult(
                transactional_id=each.transactional_id, topic_results=finish(_topics(many, outcomes))
            )
            for each, outcomes in zip(request.transactions, results, strict=True)
        ),
    )


def _add_request(transaction: Any) -> AddPartitionsRequest:
    return AddPartitionsRequest(
        transaction.transactional_id,
        transaction.producer_id,
        transaction.producer_epoch,
        tuple(
            TopicPartition(topic.name, index) for topic in transaction.topics for index in topic.partitions
        ),
        protocol_version(not transaction.verify_only),
    )


def _handle_producer(ctx: RequestContext, request: Any) -> Steps[Any]:
    """Each partition is looked up in the image of its step."""
    partitions: list[TopicPartition] = []
    refused: PartitionErrors = {}
    for topic in request.v3_and_below_topics:
        # Producers add offsets by group, not by partition.
        may_write = not is_internal(topic.name) and ctx.demand(
            Operation.WRITE, ResourceType.TOPIC, topic.name
        )
        for index in topic.partitions:
            partition = TopicPartition(topic.name, index)
            partitions.append(partition)
            if not may_write:
                refused[partition] = ErrorCode.topic_authorization_failed
            elif ctx.services.image.partition(*partition) is None:
                refused[partition] = ErrorCode.unknown_topic_or_partition
            yield
        yield
    asked = AddPartitionsRequest(
        request.v3_and_below_transactional_id,
        request.v3_and_below_producer_id,
        request.v3_and_below_producer_epoch,
        tuple(partitions),
    )
    return _join_and_respond(ctx, asked, refused)


async def _join_and_respond(
    ctx: RequestContext, asked: AddPartitionsRequest, refused: PartitionErrors
) -> Any:
    outcomes = await _join(ctx, asked, refused)
    topics = await ctx.finish_in_slices(_topics(single, outcomes, ctx.version))
    return single.AddPartitionsToTxnResponse(throttle_time=NO_THROTTLE, results_by_topic_v3_and_below=topics)


async def _join(
    ctx: RequestContext, asked: AddPartitionsRequest, refused: PartitionErrors
) -> PartitionErrors:
    """If a partition is refused, the others are not added either."""
    transactions = ctx.services.transactions
    try:
        transactions.callers.check_newest_connection(ctx, asked.transactional_id)
    except ApiError as error:
        return dict.fromkeys(asked.partitions, error.code)
    if refused:
        return dict.fromkeys(asked.partitions, ErrorCode.operation_not_attempted) | refused
    return await transactions.join_existing(asked, verify_only=False)


def _topics(schema: Any, outcomes: PartitionErrors, version: int = _BATCHED_FROM) -> Steps[tuple[Any, ...]]:
    knows_fenced = version >= PRODUCER_FENCED_FROM_VERSION
    topics = []
    in_order = sorted(outcomes.items(), key=itemgetter(0))
    for topic, results in groupby(in_order, key=lambda outcome: outcome[0].topic):
        partitions = []
        for partition, error in results:
            code = error_for_version(error, knows_fenced=knows_fenced)
            partitions.append(
                schema.AddPartitionsToTxnPartitionResult(
                    partition_index=partition.partition, partition_error_code=code
                )
            )
            yield
        topics.append(
            schema.AddPartitionsToTxnTopicResult(name=topic, results_by_partition=tuple(partitions))
        )
        yield
    return tuple(topics)
