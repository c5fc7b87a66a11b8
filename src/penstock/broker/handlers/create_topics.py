"""CreateTopics (key 19), v2-7. Each topic has its own result, sent once the receiving node's image shows the topic.

From v5 on the response carries the topic's settings with their sources, and from v7 on its id. Values that the request
omits come from the settings of the active controller. The timeout limits the search for a controller.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from kio.schema.create_topics.v7.response import (
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreateTopicsResponse,
)

from penstock.broker.network.quotas import QUOTA_EXCEEDED
from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.create_topics import CreateTopicResult, NewTopic
from penstock.protocol.acls import Operation, ResourceType
from penstock.protocol.errors import ErrorCode

_STRICT_QUOTA_FROM: Final = 6


async def handle(ctx: RequestContext, request: Any) -> Any:
    services = ctx.services
    partitions_default = services.settings.integer("num.partitions")

    def count(topic: NewTopic) -> int:
        return len(topic.assignments) or (topic.partitions if topic.partitions > 0 else partitions_default)

    topics = await ctx.mapped(_new_topic, request.topics)
    admitted = await ctx.finish_in_slices(
        services.quotas.admit(ctx, topics, count, strict_from=_STRICT_QUOTA_FROM)
    )
    results = await services.topic_creator.create_on_controller(
        admitted.items, validate_only=request.validate_only
    )
    refused = [
        CreateTopicResult(topic.name, ErrorCode.throttling_quota_exceeded, QUOTA_EXCEEDED)
        for topic in admitted.refused
    ]
    return CreateTopicsResponse(
        throttle_time=admitted.throttle_time,
        topics=await ctx.mapped(partial(_result, ctx), (*results, *refused)),
    )


def _new_topic(topic: Any) -> NewTopic:
    return NewTopic(
        name=topic.name,
        partitions=topic.num_partitions,
        replication_factor=topic.replication_factor,
        assignments=tuple((a.partition_index, a.broker_ids) for a in topic.assignments),
        configs=tuple((config.name, config.value) for config in topic.configs),
    )


def _result(ctx: RequestContext, result: CreateTopicResult) -> Any:
    if result.error is ErrorCode.none and not ctx.may(
        Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, result.name
    ):
        return CreatableTopicResult(
            name=result.name,
            topic_id=result.topic_id,
            error_code=result.error,
            error_message=result.message,
            topic_config_error_code=ErrorCode.topic_authorization_failed.value,
            num_partitions=-1,
            replication_factor=-1,
            configs=None,
        )
    return CreatableTopicResult(
        name=result.name,
        topic_id=result.topic_id,
        error_code=result.error,
        error_message=result.message,
        num_partitions=result.partitions,
        replication_factor=result.replication_factor,
        configs=tuple(
            CreatableTopicConfigs(
                name=name,
                value=effective.text,
                read_only=False,
                config_source=effective.source,
                is_sensitive=False,
            )
            for name, effective in sorted(result.settings.items())
        ),
    )
