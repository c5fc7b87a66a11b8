"""ElectLeaders (key 43), v0-2. Elects preferred leaders, or from v1 on unclean ones; the controller serves it.

An unclean election may lose acknowledged records. It happens only if an operator requests it here or the topic allows
it, and each one is logged and counted. Without partitions, the election covers all partitions that need it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from kio.schema.elect_leaders.v2.response import ElectLeadersResponse, PartitionResult, ReplicaElectionResult

from penstock.broker.network.requests import RequestContext
from penstock.cluster.controller.elect_leaders import ElectionResult, ElectionType, elect_leaders
from penstock.cluster.image import TopicPartition
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps


async def handle(ctx: RequestContext, request: Any) -> Any:
    controller = ctx.services.controller
    election = _election(request)
    partitions = _requested_partitions(request)
    results = await controller.propose(
        lambda image: elect_leaders(image, partitions, election=election, rules=controller.rules())
    )
    return ElectLeadersResponse(
        throttle_time=timedelta(0),
        error_code=ErrorCode.none,
        replica_election_results=await ctx.finish_in_slices(_topics(results)),
    )


def _election(request: Any) -> ElectionType:
    try:
        return ElectionType(request.election_type)
    except ValueError:
        raise ApiError(
            ErrorCode.invalid_request, f"There is no election of type {request.election_type}"
        ) from None


def _requested_partitions(request: Any) -> list[TopicPartition] | None:
    if request.topic_partitions is None:
        return None
    return [
        TopicPartition(topic.topic, index) for topic in request.topic_partitions for index in topic.partitions
    ]


def _topics(results: Iterable[ElectionResult]) -> Steps[tuple[Any, ...]]:
    by_topic: defaultdict[str, list[Any]] = defaultdict(list)
    for result in results:
        by_topic[result.topic].append(
            PartitionResult(
                partition_id=result.partition, error_code=result.error, error_message=result.message
            )
        )
        yield
    return tuple(
        ReplicaElectionResult(topic=topic, partition_result=tuple(found)) for topic, found in by_topic.items()
    )
