"""FetchSnapshot (key 59), v0-1. A chunk of a metadata snapshot, for a replica that is behind the start of the log."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from kio.schema.fetch_snapshot.v1 import response as wire

from penstock.broker.network.requests import RequestContext
from penstock.broker.quorum.inbound_requests import check_cluster, leader_endpoints, metadata_partition
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.types import FetchSnapshotReply, FetchSnapshotRequest, OffsetAndEpoch, ReplicaKey


async def handle(ctx: RequestContext, request: Any) -> Any:
    try:
        check_cluster(ctx, request.cluster_id)
        asked = metadata_partition(request.topics, "name", "partition")
    except ApiError as error:
        return wire.FetchSnapshotResponse(throttle_time=timedelta(0), error_code=error.code, topics=())
    reply = await ctx.services.quorum.handle(
        FetchSnapshotRequest(
            epoch=int(asked.current_leader_epoch),
            replica=ReplicaKey(int(request.replica_id), asked.replica_directory_id),
            id=OffsetAndEpoch(int(asked.snapshot_id.end_offset), int(asked.snapshot_id.epoch)),
            position=int(asked.position),
        )
    )
    return wire.FetchSnapshotResponse(
        throttle_time=timedelta(0),
        error_code=ErrorCode.none,
        topics=(wire.TopicSnapshot(name=CLUSTER_METADATA, partitions=(_partition(reply),)),),
        node_endpoints=leader_endpoints(ctx, reply),
    )


def _partition(reply: FetchSnapshotReply) -> Any:
    return wire.PartitionSnapshot(
        index=0,
        error_code=reply.error,
        snapshot_id=wire.SnapshotId(end_offset=reply.id.offset, epoch=reply.id.epoch),
        current_leader=wire.LeaderIdAndEpoch(leader_id=reply.leader_id, leader_epoch=reply.epoch),
        size=reply.size,
        position=reply.position,
        unaligned_records=reply.data,
    )
