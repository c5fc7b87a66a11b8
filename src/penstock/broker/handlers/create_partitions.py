"""CreatePartitions (key 37), v0-3. Sets the new partition count of topics, optionally with their replicas."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Final

from kio.schema.create_partitions.v3.response import CreatePartitionsResponse, CreatePartitionsTopicResult

from penstock.broker.network.quotas import QUOTA_EXCEEDED
from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.alter_topics import CreatePartitionsResult, NewPartitions, create_partitions
from penstock.protocol.errors import ErrorCode

_STRICT_QUOTA_FROM: Final = 3


async def handle(ctx: RequestContext, request: Any) -> Any:
    image = ctx.services.image

    def count(topic: NewPartitions) -> int:
        present = image.topics.get(topic.name)
        return max(topic.count - len(present.partitions), 0) if present is not None else 0

    topics = await ctx.mapped(_more_partitions, request.topics)
    admitted = await ctx.finish_in_slices(
        ctx.services.quotas.admit(ctx, topics, count, strict_from=_STRICT_QUOTA_FROM)
    )
    partitions_max = ctx.services.settings.integer("penstock.create.topics.partitions.max")
    results = await ctx.services.metadata.propose(
        lambda image: create_partitions(
            image,
            admitted.items,
            partitions_max=partitions_max,
            draw=random.randrange,
            validate_only=request.validate_only,
            broker_replicas_max=ctx.services.topic_creator.broker_replicas_max(),
        )
    )
    without_room = ctx.services.topic_creator.topics_refused_by_disk()

    def topic_result(result: CreatePartitionsResult) -> CreatePartitionsTopicResult:
        if result.name in without_room:
            result = _with_storage_error(result)
        return CreatePartitionsTopicResult(
            name=result.name, error_code=result.error, error_message=result.message
        )

    return CreatePartitionsResponse(
        throttle_time=admitted.throttle_time,
        results=(
            *(await ctx.mapped(topic_result, results)),
            *(await ctx.mapped(_refused, admitted.refused)),
        ),
    )


def _refused(topic: NewPartitions) -> CreatePartitionsTopicResult:
    return CreatePartitionsTopicResult(
        name=topic.name, error_code=ErrorCode.throttling_quota_exceeded, error_message=QUOTA_EXCEEDED
    )


def _with_storage_error(result: CreatePartitionsResult) -> CreatePartitionsResult:
    """Reports the disk's error: the partitions exist from now on and the node retries, but the client should know."""
    if result.error is not ErrorCode.none:
        return result
    message = "the partitions were added, but the disk refuses them; they follow once it does not"
    return replace(result, error=ErrorCode.kafka_storage_error, message=message)


def _more_partitions(topic: Any) -> NewPartitions:
    given = topic.assignments
    return NewPartitions(
        name=topic.name,
        count=topic.count,
        assignments=None if given is None else tuple(assignment.broker_ids for assignment in given),
    )
