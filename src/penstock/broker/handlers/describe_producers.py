"""DescribeProducers (key 61), v0. The producer states of a partition, to find hanging transactions.

Followers have the producer states too, and serve the request.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kio.schema.describe_producers.v0.response import (
    DescribeProducersResponse,
    PartitionResponse,
    ProducerState,
    TopicResponse,
)

from penstock.broker.network.requests import RequestContext, in_slices
from penstock.cluster.topic_names import topic_name_error
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.log.producer_state import ProducerStateEntry
    from penstock.protocol.steps import Steps


@in_slices
def handle(ctx: RequestContext, request: Any) -> Steps[Any]:
    """Each partition is looked up as it is in its own step."""
    topics = []
    for topic in request.topics:
        partitions = []
        for index in topic.partition_indexes:
            partitions.append((yield from _partition(ctx, topic.name, index)))
            yield
        topics.append(TopicResponse(name=topic.name, partitions=tuple(partitions)))
        yield
    return DescribeProducersResponse(throttle_time=timedelta(0), topics=tuple(topics))


def _partition(ctx: RequestContext, topic: str, index: int) -> Steps[Any]:
    try:
        if (flaw := topic_name_error(topic)) is not None:
            raise ApiError(ErrorCode.invalid_topic_exception, flaw)
        partitions = ctx.services.partitions
        partition = partitions.get(topic, index) or partitions.find(topic, index)
    except ApiError as error:
        return PartitionResponse(
            partition_index=index, error_code=error.code, error_message=error.message, active_producers=()
        )
    producers = []
    # A copy, because producers may come and go between the steps.
    for producer_id, state in list(partition.log.producers.states.items()):
        producers.append(_producer(producer_id, state))
        yield
    return PartitionResponse(
        partition_index=index,
        error_code=ErrorCode.none,
        error_message=None,
        active_producers=tuple(producers),
    )


def _producer(producer_id: int, state: ProducerStateEntry) -> ProducerState:
    return ProducerState(
        producer_id=producer_id,
        producer_epoch=state.epoch,
        last_sequence=state.last_sequence,
        last_timestamp=state.last_timestamp,
        coordinator_epoch=state.coordinator_epoch,
        current_txn_start_offset=state.txn_first_offset,
    )
