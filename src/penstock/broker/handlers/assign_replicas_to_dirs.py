"""AssignReplicasToDirs (key 73), v0. A broker reports where its replicas are; only the active controller serves it.

Directory id 2 reports a lost or damaged replica: the controller removes it from the in-sync replicas, and it cannot
become leader until it has fetched the log again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from uuid import UUID

from kio.schema.assign_replicas_to_dirs.v0.response import (
    AssignReplicasToDirsResponse,
    DirectoryData,
    PartitionData,
    TopicData,
)

from penstock.broker.handlers.alter_partition import propose_for_broker
from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.alter_partition import (
    DirectoryAssignment,
    DirectoryResult,
    assign_replicas_to_dirs,
)
from penstock.protocol.errors import ApiError, ErrorCode

_NONE = UUID(int=0)


async def handle(ctx: RequestContext, request: Any) -> Any:
    items = [
        DirectoryAssignment(topic.topic_id or _NONE, partition.partition_index, directory.id_ or _NONE)
        for directory in request.directories
        for topic in directory.topics
        for partition in topic.partitions
    ]
    try:
        results = await propose_for_broker(ctx, request, assign_replicas_to_dirs, items)
    except ApiError as error:
        return AssignReplicasToDirsResponse(throttle_time=timedelta(0), error_code=error.code, directories=())
    return AssignReplicasToDirsResponse(
        throttle_time=timedelta(0), error_code=ErrorCode.none, directories=_directories(results)
    )


def _directories(results: Iterable[DirectoryResult]) -> tuple[Any, ...]:
    found: defaultdict[UUID, defaultdict[UUID, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        found[result.directory][result.topic_id].append(
            PartitionData(partition_index=result.partition, error_code=result.error)
        )
    return tuple(
        DirectoryData(
            id_=directory,
            topics=tuple(
                TopicData(topic_id=topic_id, partitions=tuple(partitions))
                for topic_id, partitions in topics.items()
            ),
        )
        for directory, topics in found.items()
    )
