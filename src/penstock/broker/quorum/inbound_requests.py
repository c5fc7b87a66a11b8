"""Fetch of the metadata log, answered by the quorum: read and written with kio's schemas, as it is not hot."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from kio.schema.fetch.v18 import response as wire

from penstock.broker.apis import FETCH
from penstock.broker.quorum.serving import check_cluster, leader_endpoints
from penstock.broker.quorum.state import METADATA_TOPIC_ID
from penstock.broker.routes import encode
from penstock.cluster.names import CLUSTER_METADATA
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.schemas import request_reader
from penstock.raft.messages import FetchReply, FetchRequest
from penstock.raft.values import ReplicaKey

if TYPE_CHECKING:
    from penstock.broker.context import RequestContext


async def answer(ctx: RequestContext, frame: BytesLike, position: int, correlation_id: int) -> bytes:
    """The whole reply. Raises MalformedFrame."""
    request = request_reader(FETCH, ctx.version)(memoryview(frame), position)
    try:
        check_cluster(ctx, getattr(request, "cluster_id", None))
        asked = _in_raft_words(request)
    except ApiError as error:
        return encode(FETCH, ctx.version, correlation_id, _response(error.code, ()))
    reply = await ctx.node.quorum.handle(asked)
    response = _response(ErrorCode.none, (_topic(reply),), leader_endpoints(ctx, reply))
    return encode(FETCH, ctx.version, correlation_id, response)


def _in_raft_words(request: Any) -> FetchRequest:
    """Raises ApiError unless one replica asks for the one partition."""
    if len(request.topics) != 1 or len(request.topics[0].partitions) != 1:
        raise ApiError(ErrorCode.invalid_request)
    partition, replica_id = request.topics[0].partitions[0], _replica_id(request)
    if partition.partition != 0 or replica_id < 0:
        raise ApiError(ErrorCode.unknown_topic_or_partition)
    return FetchRequest(
        epoch=int(getattr(partition, "current_leader_epoch", -1)),
        replica=ReplicaKey(replica_id, getattr(partition, "replica_directory_id", None)),
        offset=int(partition.fetch_offset),
        last_epoch=int(getattr(partition, "last_fetched_epoch", -1)),
        # A replica that cannot say what it knows is told at every change.
        high_watermark=int(getattr(partition, "high_watermark", -1)),
        max_wait_ms=request.max_wait // timedelta(milliseconds=1),
    )


def _replica_id(request: Any) -> int:
    state = getattr(request, "replica_state", None)
    return int(request.replica_id if state is None else state.replica_id)


def _topic(reply: FetchReply) -> Any:
    diverging, snapshot = reply.diverging, reply.snapshot
    partition = wire.PartitionData(
        partition_index=0,
        error_code=reply.error,
        high_watermark=reply.high_watermark,
        last_stable_offset=reply.high_watermark,
        log_start_offset=reply.log_start,
        diverging_epoch=wire.EpochEndOffset()
        if diverging is None
        else wire.EpochEndOffset(epoch=diverging.epoch, end_offset=diverging.offset),
        current_leader=wire.LeaderIdAndEpoch(leader_id=reply.leader_id, leader_epoch=reply.epoch),
        snapshot_id=wire.SnapshotId()
        if snapshot is None
        else wire.SnapshotId(end_offset=snapshot.offset, epoch=snapshot.epoch),
        aborted_transactions=(),
        records=reply.records,
    )
    return _Topic(topic=CLUSTER_METADATA, topic_id=METADATA_TOPIC_ID, partitions=(partition,))


class _Topic:
    """Older versions name the topic, newer ones give its id: this has both."""

    __slots__ = ("partitions", "topic", "topic_id")

    def __init__(self, *, topic: str, topic_id: UUID, partitions: tuple[Any, ...]) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.partitions = partitions


def _response(code: ErrorCode, topics: Any, endpoints: Any = ()) -> Any:
    return wire.FetchResponse(
        throttle_time=timedelta(0), error_code=code, responses=topics, node_endpoints=endpoints
    )
