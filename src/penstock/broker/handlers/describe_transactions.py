"""DescribeTransactions (key 65), v0. The state of transactional ids, from their coordinator."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

from kio.schema.describe_transactions.v0.response import (
    DescribeTransactionsResponse,
    TopicData,
    TransactionState,
)

from penstock.broker.coordinators.requests import NO_THROTTLE, gather_in_pieces, group_by_topic
from penstock.broker.coordinators.transactions.requests import check_transactional_id
from penstock.broker.network.requests import RequestContext
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import DescribedTransaction

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


async def handle(ctx: RequestContext, request: Any) -> Any:
    found = await gather_in_pieces(lambda name: _describe(ctx, name), request.transactional_ids)
    states = await ctx.mapped(partial(_state, ctx), found)
    return DescribeTransactionsResponse(throttle_time=NO_THROTTLE, transaction_states=states)


async def _describe(ctx: RequestContext, transactional_id: str) -> DescribedTransaction:
    try:
        check_transactional_id(transactional_id)
        return await ctx.services.transactions.describe(transactional_id)
    except ApiError as error:
        return DescribedTransaction(transactional_id, error.code)


def _start_time(found: DescribedTransaction) -> datetime:
    """-1 ms if there is no transaction, and 0 with an error, as in Apache Kafka."""
    start_ms = found.start_timestamp_ms if found.error is ErrorCode.none else 0
    return _EPOCH + timedelta(milliseconds=start_ms)


def _state(ctx: RequestContext, found: DescribedTransaction) -> Any:
    return TransactionState(
        error_code=found.error,
        transactional_id=found.transactional_id,
        transaction_state=found.state,
        transaction_timeout=timedelta(milliseconds=found.timeout_ms),
        transaction_start_time=_start_time(found),
        producer_id=found.producer_id,
        producer_epoch=found.epoch,
        topics=tuple(
            TopicData(topic=topic, partitions=tuple(indexes))
            for topic, indexes in group_by_topic(sorted(found.partitions))
            if ctx.may(Operation.DESCRIBE, ResourceType.TOPIC, topic)
        ),
    )
