"""ListPartitionReassignments (key 46), v0. The reassignments in progress, of all topics or of the requested ones."""

from __future__ import annotations

from collections import defaultdict
from datetime import timedelta
from typing import Any

from kio.schema.list_partition_reassignments.v0.response import (
    ListPartitionReassignmentsResponse,
    OngoingPartitionReassignment,
    OngoingTopicReassignment,
)

from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.reassignment import list_reassignments
from penstock.cluster.image import TopicPartition
from penstock.protocol.errors import ErrorCode


def handle(ctx: RequestContext, request: Any) -> Any:
    by_topic: defaultdict[str, list[Any]] = defaultdict(list)
    for ongoing in list_reassignments(ctx.services.image, _requested_partitions(request)):
        by_topic[ongoing.topic].append(
            OngoingPartitionReassignment(
                partition_index=ongoing.partition,
                replicas=ongoing.replicas,
                adding_replicas=ongoing.adding,
                removing_replicas=ongoing.removing,
            )
        )
    return ListPartitionReassignmentsResponse(
        throttle_time=timedelta(0),
        error_code=ErrorCode.none,
        error_message=None,
        topics=tuple(
            OngoingTopicReassignment(name=topic, partitions=tuple(found)) for topic, found in by_topic.items()
        ),
    )


def _requested_partitions(request: Any) -> list[TopicPartition] | None:
    if request.topics is None:
        return None
    return [
        TopicPartition(topic.name, index) for topic in request.topics for index in topic.partition_indexes
    ]
