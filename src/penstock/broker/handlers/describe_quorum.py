"""DescribeQuorum (key 55), v0-2. The voters and observers, their log end offsets, and the voters' endpoints.

The quorum leader serves it. A node that has not joined a cluster returns UNKNOWN_TOPIC_OR_PARTITION at the top level;
the initial voters use that to find each other.
"""

from __future__ import annotations

from typing import Any

from kio.schema.describe_quorum.v2 import response as wire

from penstock.broker.network.requests import RequestContext
from penstock.broker.quorum.inbound_requests import metadata_partition, no_cluster_error
from penstock.cluster.topic_names import CLUSTER_METADATA
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.steps import Steps
from penstock.raft.types import QuorumDescription, ReplicaDescription


def handle(ctx: RequestContext, request: Any) -> Any:
    """Raises NOT_CONTROLLER if another node is the leader."""
    quorum = ctx.services.quorum
    if not quorum.has_cluster:
        error = no_cluster_error()
        return _response(error.code, error.message, (), ())
    try:
        metadata_partition(request.topics, "topic_name", "partition_index")
    except ApiError as error:
        return ctx.in_slices(_refusal(request, error))
    view = quorum.describe()
    topic = wire.TopicData(topic_name=CLUSTER_METADATA, partitions=(_partition(ctx, view),))
    return _response(ErrorCode.none, None, (topic,), _nodes(view))


def _refusal(request: Any, error: ApiError) -> Steps[Any]:
    topics = []
    for topic in request.topics:
        partitions = []
        for asked in topic.partitions:
            partitions.append(_partition_with_error(asked, error))
            yield
        topics.append(wire.TopicData(topic_name=topic.topic_name, partitions=tuple(partitions)))
        yield
    return _response(ErrorCode.none, None, tuple(topics), ())


def _response(code: ErrorCode, message: str | None, topics: Any, nodes: Any) -> Any:
    return wire.DescribeQuorumResponse(error_code=code, error_message=message, topics=topics, nodes=nodes)


def _partition(ctx: RequestContext, view: QuorumDescription) -> Any:
    return wire.PartitionData(
        partition_index=0,
        error_code=ErrorCode.none,
        error_message=None,
        leader_id=view.leader_id,
        leader_epoch=view.epoch,
        high_watermark=view.high_watermark,
        current_voters=tuple(_replica(ctx, replica) for replica in view.voters),
        observers=tuple(_replica(ctx, replica) for replica in view.observers),
    )


def _replica(ctx: RequestContext, replica: ReplicaDescription) -> Any:
    wall_clock_ms = ctx.services.quorum.wall_clock_ms
    return wire.ReplicaState(
        replica_id=replica.key.id,
        replica_directory_id=replica.key.directory,
        log_end_offset=replica.offset,
        last_fetch_timestamp=wall_clock_ms(replica.last_fetch_ms),
        last_caught_up_timestamp=wall_clock_ms(replica.last_caught_up_ms),
    )


def _nodes(view: QuorumDescription) -> tuple[Any, ...]:
    return tuple(
        wire.Node(
            node_id=voter.key.id,
            listeners=tuple(
                wire.Listener(name=at.name, host=at.host, port=at.port) for at in voter.addresses
            ),
        )
        for voter in view.voter_set
    )


def _partition_with_error(asked: Any, error: ApiError) -> Any:
    return wire.PartitionData(
        partition_index=asked.partition_index,
        error_code=error.code,
        error_message=error.message,
        leader_id=-1,
        leader_epoch=-1,
        high_watermark=-1,
        current_voters=(),
        observers=(),
    )
