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

from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ErrorCode


def handle(ctx: RequestContext, request: Any) -> Any:
    data_dir = ctx.services.settings.data_dir
    # A partition that is listed under two directories gets one result, for the last directory.
    asked = {
        (topic.name, index): directory.path
        for directory in request.dirs
        for topic in directory.topics
        for index in topic.partitions
    }
    by_topic: dict[str, list[Any]] = {}
    for (topic, index), path in asked.items():
        if path != data_dir:
            error = ErrorCode.log_dir_not_found
        elif ctx.services.partitions.get(topic, index) is None:
            error = ErrorCode.unknown_topic_or_partition
        else:
            error = ErrorCode.none
        result = AlterReplicaLogDirPartitionResult(partition_index=index, error_code=error)
        by_topic.setdefault(topic, []).append(result)
    return AlterReplicaLogDirsResponse(
        throttle_time=timedelta(0),
        results=tuple(
            AlterReplicaLogDirTopicResult(topic_name=name, partitions=tuple(results))
            for name, results in by_topic.items()
        ),
    )
