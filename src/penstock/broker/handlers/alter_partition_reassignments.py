"""AlterPartitionReassignments (key 45), v0-1. Sets the target replicas of partitions, or cancels with null.

A reassignment takes as long as copying the data; ListPartitionReassignments shows the ones in progress.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from kio.schema.alter_partition_reassignments.v1.response import (
    AlterPartitionReassignmentsResponse,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
)

from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.reassignment import (
    Reassignment,
    ReassignmentResult,
    alter_reassignments,
)
from penstock.protocol.errors import ErrorCode
from penstock.protocol.steps import Steps


async def handle(ctx: RequestContext, request: Any) -> Any:
    controller = ctx.services.controller
    items = [
        Reassignment(topic=topic.name, partition=partition.partition_index, replicas=partition.replicas)
        for topic in request.topics
        for partition in topic.partitions
    ]
    results = await controller.propose(
        lambda image: alter_reassignments(
            image,
            items,
            rules=controller.rules(),
            allow_replication_factor_change=request.allow_replication_factor_change,
        )
    )
    return AlterPartitionReassignmentsResponse(
        throttle_time=timedelta(0),
        allow_replication_factor_change=request.allow_replication_factor_change,
        error_code=ErrorCode.none,
        error_message=None,
        responses=await ctx.finish_in_slices(_topics(results)),
    )


def _topics(results: Iterable[ReassignmentResult]) -> Steps[tuple[Any, ...]]:
    by_topic: defaultdict[str, list[Any]] = defaultdict(list)
    for result in results:
        by_topic[result.topic].append(
            ReassignablePartitionResponse(
                partition_index=result.partition, error_code=result.error, error_message=result.message
            )
        )
        yield
    return tuple(
        ReassignableTopicResponse(name=topic, partitions=tuple(found)) for topic, found in by_topic.items()
    )
