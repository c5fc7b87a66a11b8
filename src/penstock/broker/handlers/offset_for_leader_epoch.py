"""OffsetForLeaderEpoch (key 23), v2-4. The end offset of a leader epoch, for truncation detection."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from penstock.broker.network.requests import RequestContext, in_slices
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.schemas import schema_class
from penstock.protocol.steps import Steps


@in_slices
def handle(ctx: RequestContext, request: Any) -> Steps[Any]:
    """Each partition is looked up as it is in its own step."""
    topic_result = schema_class("offset_for_leader_epoch.v4.response:OffsetForLeaderTopicResult")
    response = schema_class("offset_for_leader_epoch.v4.response:OffsetForLeaderEpochResponse")
    topics = []
    for topic in request.topics:
        partitions = []
        for part in topic.partitions:
            partitions.append(_end(ctx, topic.topic, part))
            yield
        topics.append(topic_result(topic=topic.topic, partitions=tuple(partitions)))
        yield
    return response(throttle_time=timedelta(0), topics=tuple(topics))


def _end(ctx: RequestContext, topic: str, part: Any) -> Any:
    result = schema_class("offset_for_leader_epoch.v4.response:EpochEndOffset")
    try:
        partition = ctx.services.partitions.find(topic, part.partition, part.current_leader_epoch)
    except ApiError as error:
        return result(error_code=error.code, partition=part.partition, leader_epoch=-1, end_offset=-1)
    epoch, end_offset = partition.end_of_epoch(part.leader_epoch)
    return result(
        error_code=ErrorCode.none, partition=part.partition, leader_epoch=epoch, end_offset=end_offset
    )
