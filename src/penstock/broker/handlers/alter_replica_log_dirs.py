"""AlterReplicaLogDirs (key 34), v1-2. A node has one data directory: a replica can only stay in it.

Any other directory is LOG_DIR_NOT_FOUND. As in Apache Kafka, the path is compared as text with the one that
DescribeLogDirs returns. A partition without a replica on this node is UNKNOWN_TOPIC_OR_PARTITION.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.alter_replica_log_dirs.v2.response import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
)

from penstock.broker.network.requests import RequestContext, in_slices
from penstock.protocol.errors import ErrorCode
from penstock.protocol.steps import Steps


@in_slices
def handle(ctx: RequestContext, request: Any) -> Steps[Any]:
    """Nothing is changed. Each partition is looked up as it is in its own step."""
    # A partition that is listed under two directories gets one result, for the last directory.
    by_topic: dict[str, dict[int, AlterReplicaLogDirPartitionResult]] = {}
    for directory in request.dirs:
        for topic in directory.topics:
            for index in topic.partitions:
                error = _error(ctx, topic.name, index, directory.path)
                result = AlterReplicaLogDirPartitionResult(partition_index=index, error_code=error)
                by_topic.setdefault(topic.name, {})[index] = result
                yield
    topics = []
    for name, results in by_topic.items():
        topics.append(AlterReplicaLogDirTopicResult(topic_name=name, partitions=tuple(results.values())))
        yield
    return AlterReplicaLogDirsResponse(throttle_time=timedelta(0), results=tuple(topics))


def _error(ctx: RequestContext, topic: str, index: int, path: str) -> ErrorCode:
    if path != ctx.services.settings.data_dir:
        return ErrorCode.log_dir_not_found
    if ctx.services.partitions.get(topic, index) is None:
        return ErrorCode.unknown_topic_or_partition
    return ErrorCode.none
