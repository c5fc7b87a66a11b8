"""CreatePartitions (key 37), v0-3. Sets the new partition count of topics, optionally with their replicas."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from typing import Any

from kio.schema.create_partitions.v3.response import CreatePartitionsResponse, CreatePartitionsTopicResult

from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.alter_topics import CreatePartitionsResult, NewPartitions, create_partitions
from penstock.protocol.errors import ErrorCode


async def handle(ctx: RequestContext, request: Any) -> Any:
    topics = [_more_partitions(topic) for topic in request.topics]
    partitions_max = ctx.services.settings.integer("penstock.create.topics.partitions.max")
    results = await ctx.services.metadata.propose(
        lambda image: create_partitions(
            image,
            topics,
            partitions_max=partitions_max,
            draw=random.randrange,
            validate_only=request.validate_only,
            broker_replicas_max=ctx.services.topic_creator.broker_replicas_max(),
        )
    )
    without_room = ctx.services.topic_creator.topics_refused_by_disk()
    results = tuple(
        _with_storage_error(result) if result.name in without_room else result for result in results
    )
    return CreatePartitionsResponse(
        throttle_time=timedelta(0),
        results=tuple(
            CreatePartitionsTopicResult(
                name=result.name, error_code=result.error, error_message=result.message
            )
            for result in results
        ),
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
