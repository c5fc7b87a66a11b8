"""Vote (key 52), v0-2. A candidate requests a vote, or (v2) a pre-vote; the vote is saved before the reply."""

from __future__ import annotations

from typing import Any

from kio.schema.vote.v2.response import PartitionData, TopicData, VoteResponse

from penstock.broker.network.requests import RequestContext
from penstock.broker.quorum.inbound_requests import check_cluster, leader_endpoints, metadata_partition
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.types import OffsetAndEpoch, ReplicaKey, VoteRequest


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        check_cluster(ctx, request.cluster_id)
        asked = metadata_partition(request.topics, "topic_name", "partition_index")
    except ApiError as error:
        return VoteResponse(error_code=error.code, topics=())
    reply = await ctx.services.quorum.handle(
        VoteRequest(
            epoch=int(asked.replica_epoch),
            candidate=ReplicaKey(int(asked.replica_id), asked.replica_directory_id),
            voter=ctx.services.quorum.addressed_replica(request.voter_id, asked.voter_directory_id),
            last=OffsetAndEpoch(int(asked.last_offset), int(asked.last_offset_epoch)),
            pre_vote=asked.pre_vote,
        )
    )
    partition = PartitionData(
        partition_index=0,
        error_code=reply.error,
        leader_id=reply.leader_id,
        leader_epoch=reply.epoch,
        vote_granted=reply.granted,
    )
    return VoteResponse(
        error_code=ErrorCode.none,
        topics=(TopicData(topic_name=CLUSTER_METADATA, partitions=(partition,)),),
        node_endpoints=leader_endpoints(ctx, reply),
    )
