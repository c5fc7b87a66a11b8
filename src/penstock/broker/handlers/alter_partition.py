"""AlterPartition (key 56), v3. A leader requests a new in-sync replica set; only the active controller serves it.

Each partition has its own result. A successful result carries the partition state after the change is committed. If
all target replicas of a reassignment are in sync, the change completes the reassignment. AssignReplicasToDirs shares
`propose_for_broker`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

from kio.schema.alter_partition.v3.response import AlterPartitionResponse, PartitionData, TopicData

from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.alter_partition import (
    AlterPartition,
    AlterPartitionResult,
    IsrMember,
    alter_partitions,
)
from penstock.cluster.controller.decision import Decision
from penstock.protocol.errors import ApiError, ErrorCode

_NONE = -1

Result = TypeVar("Result")


async def handle(ctx: RequestContext, request: Any) -> Any:
    items = [_item(topic, partition) for topic in request.topics for partition in topic.partitions]
    try:
        results = await propose_for_broker(ctx, request, alter_partitions, items)
    except ApiError as error:
        return AlterPartitionResponse(throttle_time=timedelta(0), error_code=error.code, topics=())
    return AlterPartitionResponse(
        throttle_time=timedelta(0), error_code=ErrorCode.none, topics=_topics(results)
    )


async def propose_for_broker(
    ctx: RequestContext,
    request: Any,
    decide: Callable[..., Decision[tuple[Result, ...]]],
    items: Sequence[object],
) -> tuple[Result, ...]:
    """Let the controller decide about partitions that a broker reports. Raises ApiError: STALE_BROKER_EPOCH."""
    controller = ctx.services.controller
    return await controller.propose(
        lambda image: decide(
            image,
            items,
            broker_id=request.broker_id,
            broker_epoch=request.broker_epoch,
            rules=controller.rules(),
        )
    )


def _item(topic: Any, partition: Any) -> AlterPartition:
    return AlterPartition(
        topic_id=topic.topic_id or UUID(int=0),
        partition=partition.partition_index,
        leader_epoch=partition.leader_epoch,
        partition_epoch=partition.partition_epoch,
        isr=tuple(
            IsrMember(member.broker_id, member.broker_epoch) for member in partition.new_isr_with_epochs
        ),
        leader_recovering=partition.leader_recovery_state == 1,
    )


def _topics(results: Iterable[AlterPartitionResult]) -> tuple[Any, ...]:
    by_topic: defaultdict[UUID, list[Any]] = defaultdict(list)
    for result in results:
        by_topic[result.topic_id].append(_partition(result))
    return tuple(TopicData(topic_id=id, partitions=tuple(found)) for id, found in by_topic.items())


def _partition(result: AlterPartitionResult) -> Any:
    state = result.state
    if state is None:
        return PartitionData(
            partition_index=result.partition,
            error_code=result.error,
            leader_id=_NONE,
            leader_epoch=_NONE,
            partition_epoch=_NONE,
        )
    return PartitionData(
        partition_index=result.partition,
        error_code=result.error,
        leader_id=state.leader,
        leader_epoch=state.leader_epoch,
        isr=state.isr,
        leader_recovery_state=int(state.leader_recovering),
        partition_epoch=state.partition_epoch,
    )
