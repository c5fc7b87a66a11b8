"""What the handlers of quorum requests share: the one partition that there is, and who may ask about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.cluster.names import CLUSTER_METADATA
from penstock.protocol.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from penstock.broker.context import RequestContext
    from penstock.raft.messages import PeerReply

METADATA_PARTITION: Final = 0


class LeaderEndpoint(NamedTuple):
    """For any response's `node_endpoints`, which all have the same fields."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


def check_cluster(ctx: RequestContext, cluster_id: str | None) -> None:
    """Raises ApiError: one who is not of this cluster asks, or there is no cluster here yet.

    Every member of the quorum says which cluster it means; Apache Kafka lets the id be left out.
    """
    if not ctx.node.quorum.is_taking_part:
        raise no_cluster()
    if cluster_id != ctx.node.cluster_id:
        raise ApiError(ErrorCode.inconsistent_cluster_id)


def no_cluster() -> ApiError:
    return ApiError(ErrorCode.unknown_topic_or_partition, "this node belongs to no cluster yet")


def metadata_partition(topics: Sequence[Any], topic_field: str, index_field: str) -> Any:
    """The one partition that there is, if just that is asked about. Raises ApiError."""
    if len(topics) == 1 and len(topics[0].partitions) == 1:
        topic, partition = topics[0], topics[0].partitions[0]
        if (
            getattr(topic, topic_field) == CLUSTER_METADATA
            and getattr(partition, index_field) == METADATA_PARTITION
        ):
            return partition
    raise ApiError(ErrorCode.unknown_topic_or_partition)


def leader_endpoints(ctx: RequestContext, reply: PeerReply) -> tuple[LeaderEndpoint, ...]:
    """Where the leader that a reply names is reached from the listener that was asked."""
    named = [at for at in reply.leader_addresses if at.name == ctx.listener] or reply.leader_addresses[:1]
    return tuple(LeaderEndpoint(reply.leader_id, at.host, at.port) for at in named[:1])
