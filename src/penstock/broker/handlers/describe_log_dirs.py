"""DescribeLogDirs (key 35), v1-5. The node's data directory, the size of each partition in it, and its disk.

Null topics select all; a partition without a replica on this node is omitted, as in Apache Kafka. Replicas never move
between directories, so there is no lag and no future replica.
"""

from __future__ import annotations

import os
from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kio.schema.describe_log_dirs.v5.response import (
    DescribeLogDirsPartition,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)

from penstock.broker.network.requests import RequestContext
from penstock.protocol.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.broker.partition.partition import Partition
    from penstock.protocol.steps import Steps


async def handle(ctx: RequestContext, request: Any) -> Any:
    directory = ctx.services.settings.data_dir
    # statvfs runs in a thread, because a disk that hangs must not block the event loop.
    disk = await ctx.services.in_thread(os.statvfs, directory)
    by_topic = await ctx.finish_in_slices(_described_partitions(ctx, request))
    result = DescribeLogDirsResult(
        error_code=ErrorCode.none,
        log_dir=directory,
        topics=tuple(
            DescribeLogDirsTopic(name=name, partitions=tuple(partitions))
            for name, partitions in by_topic.items()
        ),
        total_bytes=disk.f_frsize * disk.f_blocks,
        usable_bytes=disk.f_frsize * disk.f_bavail,
        is_cordoned=False,
    )
    return DescribeLogDirsResponse(throttle_time=timedelta(0), error_code=ErrorCode.none, results=(result,))


def _described_partitions(ctx: RequestContext, request: Any) -> Steps[dict[str, list[Any]]]:
    """Each partition is described as it is in its own step."""
    by_topic: dict[str, list[Any]] = defaultdict(list)
    if request.topics is None:
        for partition in list(ctx.services.partitions):
            by_topic[partition.topic].append(_description(partition))
            yield
        return by_topic
    described: set[tuple[str, int]] = set()
    for topic in request.topics:
        for index in topic.partitions:
            found = ctx.services.partitions.get(topic.topic, index)
            if found is not None and found.key not in described:
                described.add(found.key)
                by_topic[topic.topic].append(_description(found))
            yield
    return by_topic


def _description(partition: Partition) -> Any:
    return DescribeLogDirsPartition(
        partition_index=partition.index,
        partition_size=partition.log.size_bytes,
        offset_lag=0,
        is_future_key=False,
    )
