"""DescribeProducers (key 61), v0. The producer states of a partition, to find hanging transactions.

Followers have the producer states too, and serve the request.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.describe_producers.v0.response import (
    DescribeProducersResponse,
    PartitionResponse,
    ProducerState,
    TopicResponse,
)

from penstock.broker.network.requests import RequestContext
from penstock.cluster.topic_names import topic_name_error
from penstock.protocol.errors import ApiError, ErrorCode


def handle(ctx: RequestContext, request: Any) -> Any:
    return DescribeProducersResponse(
        throttle_time=timedelta(0),
        topics=tuple(
            TopicResponse(
                name=topic.name,
                partitions=tuple(_partition(ctx, topic.name, index) for index in topic.partition_indexes),
            )
            for topic in request.topics
        ),
    )


def _partition(ctx: RequestContext, topic: str, index: int) -> Any:
    try:
        if (flaw := topic_name_error(topic)) is not None:
            raise ApiError(ErrorCode.invalid_topic_exception, flaw)
        partitions = ctx.services.partitions
        partition = partitions.get(topic, index) or partitions.find(topic, index)
    except ApiError as error:
        return PartitionResponse(
            partition_index=index, error_code=error.code, error_message=error.message, active_producers=()
        )
    return PartitionResponse(
        partition_index=index,
        error_code=ErrorCode.none,
        error_message=None,
        active_producers=tuple(
            ProducerState(
                producer_id=producer_id,
                producer_epoch=state.epoch,
                last_sequence=state.last_sequence,
                last_timestamp=state.last_timestamp,
                coordinator_epoch=state.coordinator_epoch,
                current_txn_start_offset=state.txn_first_offset,
            )
            for producer_id, state in partition.log.producers.states.items()
        ),
    )
