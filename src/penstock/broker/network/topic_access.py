"""What a client may do with the topics of the requests that are unpacked by hand, which have names and ids as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.broker.partition.client_view import find_topic
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.fetch import TOPIC_IDS_FROM as FETCHED_BY_ID_FROM
from penstock.protocol.produce import TOPIC_IDS_FROM as PRODUCED_BY_ID_FROM

if TYPE_CHECKING:
    from penstock.broker.network.requests import RequestContext
    from penstock.broker.partition.partition import Partition
    from penstock.security.authorizer import Decisions

#: Produce and Fetch; the APIs of share groups have topic ids in all versions.
_BY_ID_FROM = {0: PRODUCED_BY_ID_FROM, 1: FETCHED_BY_ID_FROM}


def may_use_topic(
    ctx: RequestContext, operation: Operation, raw: bytes, found: Mapping[int, Partition] | None = None
) -> bool:
    """Whether the client may do this to the topic; `found` are its partitions on this node, by index.

    A topic id that does not exist is no secret, and what is unknown gets its own error.
    """
    by_id = ctx.version >= _BY_ID_FROM.get(ctx.api_key, 0)
    if found:
        name = next(iter(found.values())).topic
    elif by_id:
        topic = find_topic(ctx.services.image, raw, by_id=True)
        if topic is None:
            return True
        name = topic.name
    else:
        name = raw.decode(errors="replace")
    if not ctx.demand(operation, ResourceType.TOPIC, name):
        return False
    decisions = known_decisions(ctx)
    if decisions is not None:
        # An id belongs to one name for ever, so what was decided for the name holds until the rules change.
        decisions.remember_topic(operation, raw, by_id=by_id)
    return True


def known_decisions(ctx: RequestContext) -> Decisions | None:
    """Return what is already decided for the client of this request, by the rules as they are now.

    Produce and Fetch look into it first: most of their requests are about the topic of the request before.
    """
    authorizer, connection = ctx.services.authorizer, ctx.connection
    if authorizer is None or connection is None:
        return None
    decisions = connection.decisions
    if (
        decisions is not None
        and decisions.generation == authorizer.generation
        and decisions.principal is ctx.principal
    ):
        return decisions
    return None


def topic_refused() -> ApiError:
    return ApiError(ErrorCode.topic_authorization_failed)


def check_group_access(ctx: RequestContext, group_id: str | None) -> None:
    """Raises ApiError if the client may not be a member of the group."""
    if group_id is not None and not ctx.demand(Operation.READ, ResourceType.GROUP, group_id):
        raise ApiError(ErrorCode.group_authorization_failed)
