"""DeleteTopics (key 20), v1-6. By name; from v6 on by name or id. The files go in the background."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from kio.schema.delete_topics.v6.response import DeletableTopicResult, DeleteTopicsResponse

from penstock.broker.context import RequestContext
from penstock.cluster.controller.delete_topics import TopicRef, delete_topics
from penstock.protocol.errors import ApiError, ErrorCode

_REFS_FROM: Final = 6
_DISABLED_HAS_ITS_CODE_FROM: Final = 3


async def handle(ctx: RequestContext, request: Any) -> Any:
    topics = _asked(ctx, request)
    _refuse_when_disabled(ctx)
    results = await ctx.node.metadata.propose(lambda image: delete_topics(image, topics))
    return DeleteTopicsResponse(
        throttle_time=timedelta(0),
        responses=tuple(
            DeletableTopicResult(
                name=result.name, topic_id=result.id, error_code=result.error, error_message=result.message
            )
            for result in results
        ),
    )


def _asked(ctx: RequestContext, request: Any) -> list[TopicRef]:
    """This request is read as sent: before v6 it is a list of names."""
    if ctx.version < _REFS_FROM:
        return [TopicRef(name) for name in request.topic_names]
    return [TopicRef(topic.name, topic.topic_id) for topic in request.topics]


def _refuse_when_disabled(ctx: RequestContext) -> None:
    if not ctx.node.settings.boolean("delete.topic.enable"):
        has_code = ctx.version >= _DISABLED_HAS_ITS_CODE_FROM
        code = ErrorCode.topic_deletion_disabled if has_code else ErrorCode.invalid_request
        raise ApiError(code, "Topic deletion is disabled.")
