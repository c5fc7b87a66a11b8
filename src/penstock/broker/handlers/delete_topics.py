"""DeleteTopics (key 20), v1-6. By name; from v6 on by name or id. Files are deleted in the background."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from kio.schema.delete_topics.v6.response import DeletableTopicResult, DeleteTopicsResponse

from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.alter_topics import TopicRef, delete_topics
from penstock.protocol.errors import ApiError, ErrorCode

_TOPIC_REFS_FROM: Final = 6
_DELETION_DISABLED_FROM: Final = 3


async def handle(ctx: RequestContext, request: Any) -> Any:
    topics = _requested_topics(ctx, request)
    _refuse_when_disabled(ctx)
    results = await ctx.services.metadata.propose(lambda image: delete_topics(image, topics))
    return DeleteTopicsResponse(
        throttle_time=timedelta(0),
        responses=tuple(
            DeletableTopicResult(
                name=result.name, topic_id=result.id, error_code=result.error, error_message=result.message
            )
            for result in results
        ),
    )


def _requested_topics(ctx: RequestContext, request: Any) -> list[TopicRef]:
    """Decodes by version: before v6 the request is a list of names."""
    if ctx.version < _TOPIC_REFS_FROM:
        return [TopicRef(name) for name in request.topic_names]
    return [TopicRef(topic.name, topic.topic_id) for topic in request.topics]


def _refuse_when_disabled(ctx: RequestContext) -> None:
    if not ctx.services.settings.boolean("delete.topic.enable"):
        has_code = ctx.version >= _DELETION_DISABLED_FROM
        code = ErrorCode.topic_deletion_disabled if has_code else ErrorCode.invalid_request
        raise ApiError(code, "Topic deletion is disabled.")
