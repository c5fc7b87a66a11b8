"""DeleteTopics (key 20), v1-6. By name; from v6 on by name or id. Files are deleted in the background."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kio.schema.delete_topics.v6.response import DeletableTopicResult, DeleteTopicsResponse

from penstock.broker.network.quotas import QUOTA_EXCEEDED
from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.alter_topics import DeleteTopicResult, TopicRef, delete_topics
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps

_TOPIC_REFS_FROM: Final = 6
_STRICT_QUOTA_FROM: Final = 5
_DELETION_DISABLED_FROM: Final = 3


async def handle(ctx: RequestContext, request: Any) -> Any:
    topics = await _requested_topics(ctx, request)
    _refuse_when_disabled(ctx)
    refused: Sequence[Any] = ()
    if ctx.authorizer is not None and not ctx.may(Operation.DELETE, ResourceType.CLUSTER):
        topics, refused = await ctx.finish_in_slices(_split(ctx, topics))
    image = ctx.services.image

    def count(ref: TopicRef) -> int:
        if ref.name is not None:
            topic = image.topics.get(ref.name)
        else:
            topic = None if ref.id is None else image.topics_by_id.get(ref.id)
        return 0 if topic is None else len(topic.partitions)

    admitted = await ctx.finish_in_slices(
        ctx.services.quotas.admit(ctx, topics, count, strict_from=_STRICT_QUOTA_FROM)
    )
    results = await ctx.services.metadata.propose(lambda image: delete_topics(image, admitted.items))
    return DeleteTopicsResponse(
        throttle_time=admitted.throttle_time,
        responses=(
            *(await ctx.mapped(_topic_result, results)),
            *(await ctx.mapped(_throttled, admitted.refused)),
            *refused,
        ),
    )


def _topic_result(result: DeleteTopicResult) -> DeletableTopicResult:
    return DeletableTopicResult(
        name=result.name, topic_id=result.id, error_code=result.error, error_message=result.message
    )


def _throttled(ref: TopicRef) -> DeletableTopicResult:
    return DeletableTopicResult(
        name=ref.name,
        topic_id=ref.id,
        error_code=ErrorCode.throttling_quota_exceeded,
        error_message=QUOTA_EXCEEDED,
    )


def _split(ctx: RequestContext, topics: Sequence[TopicRef]) -> Steps[tuple[list[TopicRef], list[Any]]]:
    """Return the topics that the client may delete, and the results of the others.

    These do not tell whether a name exists. An id is no secret; its name is, unless the client may describe the topic.
    """
    allowed: list[TopicRef] = []
    refused: list[Any] = []
    for topic in topics:
        yield
        name = topic.name
        if name is None and topic.id is not None:
            known = ctx.services.image.topics_by_id.get(topic.id)
            name = None if known is None else known.name
        may_describe = name is None or ctx.may(Operation.DESCRIBE, ResourceType.TOPIC, name)
        # A topic that may be described but does not exist is unknown, whether it could be deleted or not.
        is_unknown = may_describe and name not in ctx.services.image.topics
        is_visible = may_describe or topic.name is None
        if (
            name is None
            or is_unknown
            or (is_visible and ctx.demand(Operation.DELETE, ResourceType.TOPIC, name))
        ):
            allowed.append(topic)
            continue
        refused.append(
            DeletableTopicResult(
                name=name if topic.name is not None or may_describe else None,
                topic_id=topic.id,
                error_code=ErrorCode.topic_authorization_failed,
                error_message=None,
            )
        )
    return allowed, refused


async def _requested_topics(ctx: RequestContext, request: Any) -> Sequence[TopicRef]:
    """Decodes by version: before v6 the request is a list of names."""
    if ctx.version < _TOPIC_REFS_FROM:
        return await ctx.mapped(TopicRef, request.topic_names)
    return await ctx.mapped(_topic_ref, request.topics)


def _topic_ref(topic: Any) -> TopicRef:
    return TopicRef(topic.name, topic.topic_id)


def _refuse_when_disabled(ctx: RequestContext) -> None:
    if not ctx.services.settings.boolean("delete.topic.enable"):
        has_code = ctx.version >= _DELETION_DISABLED_FROM
        code = ErrorCode.topic_deletion_disabled if has_code else ErrorCode.invalid_request
        raise ApiError(code, "Topic deletion is disabled.")
