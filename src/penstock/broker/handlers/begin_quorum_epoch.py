"""BeginQuorumEpoch (key 53), v0-1. A new leader announces itself to a voter that has not fetched from it yet."""

from __future__ import annotations

from typing import Any

from kio.schema.begin_quorum_epoch.v1.response import BeginQuorumEpochResponse, PartitionData, TopicData

from penstock.broker.network.requests import RequestContext
from penstock.broker.quorum.inbound_requests import check_cluster, leader_endpoints, metadata_partition
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.types import Address, BeginEpochRequest


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        check_cluster(ctx, request.cluster_id)
        asked = metadata_partition(request.topics, "topic_name", "partition_index")
    except ApiError as error:
        return BeginQuorumEpochResponse(error_code=error.code, topics=())
    reply = await ctx.services.quorum.handle(
        BeginEpochRequest(
            epoch=int(asked.leader_epoch),
            leader_id=int(asked.leader_id),
            voter=ctx.services.quorum.addressed_replica(request.voter_id, asked.voter_directory_id),
            addresses=tuple(Address(at.name, at.host, int(at.port)) for at in request.leader_endpoints),
        )
    )
    partition = PartitionData(
        partition_index=0, error_code=reply.error, leader_id=reply.leader_id, leader_epoch=reply.epoch
    )
    return BeginQuorumEpochResponse(
        error_code=ErrorCode.none,
        topics=(TopicData(topic_name=CLUSTER_METADATA, partitions=(partition,)),),
        node_endpoints=leader_endpoints(ctx, reply),
    )
