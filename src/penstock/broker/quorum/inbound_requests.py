"""What the handlers of quorum requests share, and Fetch of the metadata log.

The handlers check the cluster id, and that a request names the metadata partition. Fetch of the metadata log is read
and written with kio's schemas, because it is not performance-critical.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from kio.schema.fetch.v18 import response as wire

from penstock.broker.network.apis import FETCH, encode_response
from penstock.broker.quorum.storage import METADATA_TOPIC_ID
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.protocol.compression import BytesLike
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.schemas import request_reader
from penstock.raft.types import FetchReply, FetchRequest, ReplicaKey

if TYPE_CHECKING:
    from penstock.broker.network.requests import RequestContext
    from penstock.raft.types import PeerReply


METADATA_PARTITION: Final = 0


class LeaderEndpoint(NamedTuple):
    """For any response's `node_endpoints`, which all have the same fields."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


def check_cluster(ctx: RequestContext, cluster_id: str | None) -> None:
    """Raises ApiError if the request is for another cluster, or if this node belongs to no cluster yet.

    Every member of the quorum must send its cluster id; Apache Kafka also allows requests without one.
    """
    if not ctx.services.quorum.is_started:
        raise no_cluster_error()
    if cluster_id != ctx.services.cluster_id:
        raise ApiError(ErrorCode.inconsistent_cluster_id)


def no_cluster_error() -> ApiError:
    return ApiError(ErrorCode.unknown_topic_or_partition, "this node belongs to no cluster yet")


def metadata_partition(topics: Sequence[Any], topic_field: str, index_field: str) -> Any:
    """Return the metadata partition if the request names exactly that one. Raises ApiError."""
    if len(topics) == 1 and len(topics[0].partitions) == 1:
        topic, partition = topics[0], topics[0].partitions[0]
        if (
            getattr(topic, topic_field) == CLUSTER_METADATA
            and getattr(partition, index_field) == METADATA_PARTITION
        ):
            return partition
    raise ApiError(ErrorCode.unknown_topic_or_partition)


def leader_endpoints(ctx: RequestContext, reply: PeerReply) -> tuple[LeaderEndpoint, ...]:
    """Return the endpoint of the leader that a reply names, on the listener that received the request."""
    names = {ctx.listener}
    if ctx.listener == ctx.services.settings.controller_listener:
        names.add("")  # an address that this node knows from a reply to itself
    named = [at for at in reply.leader_addresses if at.name in names]
    if not named and (voter := ctx.services.quorum.voters.get(reply.leader_id)) is not None:
        # While the controller listener is changed from node to node, the client may use another one than this node.
        named = [at for at in voter.addresses if at.name == ctx.listener]
    named = named or list(reply.leader_addresses[:1])
    return tuple(LeaderEndpoint(reply.leader_id, at.host, at.port) for at in named[:1])


async def answer_metadata_fetch(
    ctx: RequestContext, frame: BytesLike, position: int, correlation_id: int
) -> bytes:
    """Return the whole encoded reply. Raises MalformedFrame."""
    request = request_reader(FETCH, ctx.version)(memoryview(frame), position)
    try:
        check_cluster(ctx, getattr(request, "cluster_id", None))
        asked = _raft_request(request)
    except ApiError as error:
        return encode_response(FETCH, ctx.version, correlation_id, _fetch_response(error.code, ()))
    reply = await ctx.services.quorum.handle(asked)
    response = _fetch_response(ErrorCode.none, (_fetchable_topic(reply),), leader_endpoints(ctx, reply))
    return encode_response(FETCH, ctx.version, correlation_id, response)


def _raft_request(request: Any) -> FetchRequest:
    """Raises ApiError unless a replica fetches exactly the metadata partition."""
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
        # A replica whose version cannot send its high watermark gets a reply at every change of ours.
        high_watermark=int(getattr(partition, "high_watermark", -1)),
        max_wait_ms=request.max_wait // timedelta(milliseconds=1),
    )


def _replica_id(request: Any) -> int:
    state = getattr(request, "replica_state", None)
    return int(request.replica_id if state is None else state.replica_id)


def _fetchable_topic(reply: FetchReply) -> Any:
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
    return _FetchableTopic(topic=CLUSTER_METADATA, topic_id=METADATA_TOPIC_ID, partitions=(partition,))


class _FetchableTopic:
    """Older versions name the topic, newer ones give its id: this has both."""

    __slots__ = ("partitions", "topic", "topic_id")

    def __init__(self, *, topic: str, topic_id: UUID, partitions: tuple[Any, ...]) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.partitions = partitions


def _fetch_response(code: ErrorCode, topics: Any, endpoints: Any = ()) -> Any:
    return wire.FetchResponse(
        throttle_time=timedelta(0), error_code=code, responses=topics, node_endpoints=endpoints
    )
