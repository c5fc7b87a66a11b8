"""Requests of the raft core to other nodes: encodes them as Kafka's quorum messages and decodes the responses."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, assert_never

from kio.schema.begin_quorum_epoch.v1 import request as begin_wire
from kio.schema.end_quorum_epoch.v1 import request as end_wire
from kio.schema.fetch.v18 import request as fetch_wire
from kio.schema.fetch_snapshot.v1 import request as snapshot_wire
from kio.schema.vote.v2 import request as vote_wire

from penstock.broker.network.peers import QUORUM, QUORUM_FETCH, Destination
from penstock.broker.quorum.storage import METADATA_TOPIC_ID
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.raft.types import (
    Address,
    BeginEpochReply,
    BeginEpochRequest,
    EndEpochReply,
    EndEpochRequest,
    FetchReply,
    FetchRequest,
    FetchSnapshotReply,
    FetchSnapshotRequest,
    OffsetAndEpoch,
    PeerReply,
    Request,
    VoteReply,
    VoteRequest,
)

if TYPE_CHECKING:
    from penstock.broker.environment import PeerCalls

FETCH_BYTES_MAX: Final = 8 << 20
_VOTE, _BEGIN, _END, _FETCH, _FETCH_SNAPSHOT = 52, 53, 54, 1, 59


async def send_request(
    peers: PeerCalls, where: Destination, request: Request, *, cluster_id: str | None, timeout_s: float
) -> PeerReply:
    """Send a request and return the reply.

    Raises PeerUnreachable, TimeoutError, and ApiError when the request is refused as a whole.
    """
    call = partial(peers.call, where, timeout_s=timeout_s, purpose=QUORUM)
    match request:
        case VoteRequest():
            response = await call(_VOTE, _vote(request, cluster_id))
            granted = _partition(response, response.topics).vote_granted
            return VoteReply(**_leader_fields(response), granted=granted)
        case BeginEpochRequest():
            return BeginEpochReply(**_leader_fields(await call(_BEGIN, _begin(request, cluster_id))))
        case EndEpochRequest():
            return EndEpochReply(**_leader_fields(await call(_END, _end(request, cluster_id))))
        case FetchRequest():
            timeout_s += request.max_wait_ms / 1000
            call = partial(peers.call, where, timeout_s=timeout_s, purpose=QUORUM_FETCH)
            return _fetch_reply(await call(_FETCH, _fetch(request, cluster_id)))
        case FetchSnapshotRequest():
            call = partial(peers.call, where, timeout_s=timeout_s, purpose=QUORUM_FETCH)
            return _snapshot_reply(await call(_FETCH_SNAPSHOT, _fetch_snapshot(request, cluster_id)))
    assert_never(request)


def _vote(request: VoteRequest, cluster_id: str | None) -> Any:
    partition = vote_wire.PartitionData(
        partition_index=0,
        replica_epoch=request.epoch,
        replica_id=request.candidate.id,
        replica_directory_id=request.candidate.directory,
        voter_directory_id=request.voter.directory,
        last_offset_epoch=request.last.epoch,
        last_offset=request.last.offset,
        pre_vote=request.pre_vote,
    )
    topic = vote_wire.TopicData(topic_name=CLUSTER_METADATA, partitions=(partition,))
    return vote_wire.VoteRequest(cluster_id=cluster_id, voter_id=request.voter.id, topics=(topic,))


def _begin(request: BeginEpochRequest, cluster_id: str | None) -> Any:
    partition = begin_wire.PartitionData(
        partition_index=0,
        voter_directory_id=request.voter.directory,
        leader_id=request.leader_id,
        leader_epoch=request.epoch,
    )
    return begin_wire.BeginQuorumEpochRequest(
        cluster_id=cluster_id,
        voter_id=request.voter.id,
        topics=(begin_wire.TopicData(topic_name=CLUSTER_METADATA, partitions=(partition,)),),
        leader_endpoints=tuple(
            begin_wire.LeaderEndpoint(name=at.name, host=at.host, port=at.port) for at in request.addresses
        ),
    )


def _end(request: EndEpochRequest, cluster_id: str | None) -> Any:
    partition = end_wire.PartitionData(
        partition_index=0,
        leader_id=request.leader_id,
        leader_epoch=request.epoch,
        preferred_candidates=tuple(
            end_wire.ReplicaInfo(candidate_id=key.id, candidate_directory_id=key.directory)
            for key in request.successors
        ),
    )
    topic = end_wire.TopicData(topic_name=CLUSTER_METADATA, partitions=(partition,))
    return end_wire.EndQuorumEpochRequest(cluster_id=cluster_id, topics=(topic,), leader_endpoints=())


def _fetch(request: FetchRequest, cluster_id: str | None) -> Any:
    partition = fetch_wire.FetchPartition(
        partition=0,
        current_leader_epoch=request.epoch,
        fetch_offset=request.offset,
        last_fetched_epoch=request.last_epoch,
        log_start_offset=-1,
        partition_max_bytes=FETCH_BYTES_MAX,
        replica_directory_id=request.replica.directory,
        high_watermark=request.high_watermark,
    )
    return fetch_wire.FetchRequest(
        cluster_id=cluster_id,
        replica_state=fetch_wire.ReplicaState(replica_id=request.replica.id),
        max_wait=timedelta(milliseconds=request.max_wait_ms),
        min_bytes=0,
        max_bytes=FETCH_BYTES_MAX,
        topics=(fetch_wire.FetchTopic(topic_id=METADATA_TOPIC_ID, partitions=(partition,)),),
        forgotten_topics_data=(),
    )


def _fetch_snapshot(request: FetchSnapshotRequest, cluster_id: str | None) -> Any:
    partition = snapshot_wire.PartitionSnapshot(
        partition=0,
        current_leader_epoch=request.epoch,
        snapshot_id=snapshot_wire.SnapshotId(end_offset=request.id.offset, epoch=request.id.epoch),
        position=request.position,
        replica_directory_id=request.replica.directory,
    )
    return snapshot_wire.FetchSnapshotRequest(
        cluster_id=cluster_id,
        replica_id=request.replica.id,
        max_bytes=FETCH_BYTES_MAX,
        topics=(snapshot_wire.TopicSnapshot(name=CLUSTER_METADATA, partitions=(partition,)),),
    )


def _partition(response: Any, topics: Any) -> Any:
    """Return the only partition of the response. Raises ApiError when the request was refused as a whole."""
    if response.error_code is not ErrorCode.none:
        raise ApiError(response.error_code)
    if not topics or not topics[0].partitions:
        raise ApiError(ErrorCode.unknown_server_error, "response without a partition")
    return topics[0].partitions[0]


def _endpoint(response: Any, leader_id: int) -> tuple[Address, ...]:
    return tuple(
        Address("", at.host, int(at.port)) for at in response.node_endpoints if at.node_id == leader_id
    )


def _leader_fields(response: Any) -> dict[str, Any]:
    found = _partition(response, response.topics)
    return {
        "error": found.error_code,
        "epoch": int(found.leader_epoch),
        "leader_id": int(found.leader_id),
        "leader_addresses": _endpoint(response, found.leader_id),
    }


def _fetch_reply(response: Any) -> FetchReply:
    found = _partition(response, response.responses)
    diverging, snapshot, leader = found.diverging_epoch, found.snapshot_id, found.current_leader
    return FetchReply(
        error=found.error_code,
        epoch=int(leader.leader_epoch),
        leader_id=int(leader.leader_id),
        leader_addresses=_endpoint(response, leader.leader_id),
        high_watermark=int(found.high_watermark),
        log_start=int(found.log_start_offset),
        diverging=OffsetAndEpoch(int(diverging.end_offset), int(diverging.epoch))
        if diverging.epoch >= 0
        else None,
        snapshot=OffsetAndEpoch(int(snapshot.end_offset), int(snapshot.epoch))
        if snapshot.epoch >= 0
        else None,
        records=bytes(found.records or b""),
    )


def _snapshot_reply(response: Any) -> FetchSnapshotReply:
    found = _partition(response, response.topics)
    leader, id = found.current_leader, found.snapshot_id
    return FetchSnapshotReply(
        error=found.error_code,
        epoch=int(leader.leader_epoch),
        leader_id=int(leader.leader_id),
        leader_addresses=_endpoint(response, leader.leader_id),
        id=OffsetAndEpoch(int(id.end_offset), int(id.epoch)),
        size=int(found.size),
        position=int(found.position),
        data=bytes(found.unaligned_records),
    )
