"""ListTransactions (key 66), v0-2. The transactional ids that this broker coordinates.

Filters: state and producer id, age (v1), and a regular expression in RE2 syntax (v2).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from kio.schema.list_transactions.v2.response import ListTransactionsResponse, TransactionState

from penstock.broker.coordinators.requests import NO_THROTTLE
from penstock.broker.network.requests import RequestContext
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.transactions.messages import ListTransactionsFilters, ListTransactionsReply


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        replies = await ctx.services.transactions.list_transactions(_filters(request))
    except ApiError as error:
        return _response(error.code, [])
    if ctx.authorizer is not None:
        replies = [_visible(ctx, reply) for reply in replies]
    return _response(ErrorCode.none, replies)


def _visible(ctx: RequestContext, reply: ListTransactionsReply) -> ListTransactionsReply:
    may_describe = partial(ctx.may, Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID)
    return reply._replace(
        transactions=tuple(each for each in reply.transactions if may_describe(each.transactional_id))
    )


def _filters(request: Any) -> ListTransactionsFilters:
    """Raises ApiError."""
    filters = ListTransactionsFilters(
        frozenset(request.state_filters), frozenset(request.producer_id_filters), request.duration_filter
    )
    if not request.transactional_id_pattern:
        return filters
    from penstock.groups.consumer.consumer_group_data import compile_topic_regex

    match = compile_topic_regex(request.transactional_id_pattern).fullmatch
    return filters._replace(matches_id=lambda name: match(name) is not None)


def _response(error: ErrorCode, replies: list[ListTransactionsReply]) -> Any:
    unknown_states = dict.fromkeys(state for reply in replies for state in reply.unknown_states)
    return ListTransactionsResponse(
        throttle_time=NO_THROTTLE,
        error_code=error,
        unknown_state_filters=tuple(unknown_states),
        transaction_states=tuple(
            TransactionState(
                transactional_id=each.transactional_id,
                producer_id=each.producer_id,
                transaction_state=each.state,
            )
            for reply in replies
            for each in reply.transactions
        ),
    )
