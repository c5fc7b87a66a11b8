"""EndQuorumEpoch (key 54), v0-1. A leader resigns and names its preferred successors."""

from __future__ import annotations

from typing import Any

from kio.schema.end_quorum_epoch.v1.response import EndQuorumEpochResponse, PartitionData, TopicData

from penstock.broker.network.requests import RequestContext
from penstock.broker.quorum.inbound_requests import check_cluster, leader_endpoints, metadata_partition
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.types import EndEpochRequest, ReplicaKey


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        check_cluster(ctx, request.cluster_id)
        asked = metadata_partition(request.topics, "topic_name", "partition_index")
    except ApiError as error:
        return EndQuorumEpochResponse(error_code=error.code, topics=())
    reply = await ctx.services.quorum.handle(
        EndEpochRequest(
            epoch=int(asked.leader_epoch),
            leader_id=int(asked.leader_id),
            successors=tuple(
                ReplicaKey(int(chosen.candidate_id), chosen.candidate_directory_id)
                for chosen in asked.preferred_candidates
            ),
        )
    )
    partition = PartitionData(
        partition_index=0, error_code=reply.error, leader_id=reply.leader_id, leader_epoch=reply.epoch
    )
    return EndQuorumEpochResponse(
        error_code=ErrorCode.none,
        topics=(TopicData(topic_name=CLUSTER_METADATA, partitions=(partition,)),),
        node_endpoints=leader_endpoints(ctx, reply),
    )
