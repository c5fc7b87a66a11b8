"""CreateTopics (key 19), v2-7. Each topic has its own result, sent once the receiving node's image shows the topic.

From v5 on the response carries the topic's settings with their sources, and from v7 on its id. Values that the request
omits come from the settings of the active controller. The timeout limits the search for a controller.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.create_topics.v7.response import (
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreateTopicsResponse,
)

from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.create_topics import CreateTopicResult, NewTopic


async def handle(ctx: RequestContext, request: Any) -> Any:
    topics = [_new_topic(topic) for topic in request.topics]
    results = await ctx.services.topic_creator.create_on_controller(
        topics, validate_only=request.validate_only
    )
    return CreateTopicsResponse(
        throttle_time=timedelta(0), topics=tuple(_result(result) for result in results)
    )


def _new_topic(topic: Any) -> NewTopic:
    return NewTopic(
        name=topic.name,
        partitions=topic.num_partitions,
        replication_factor=topic.replication_factor,
        assignments=tuple((a.partition_index, a.broker_ids) for a in topic.assignments),
        configs=tuple((config.name, config.value) for config in topic.configs),
    )


def _result(result: CreateTopicResult) -> Any:
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
