"""Brokers and partitions as the clients of one listener see them: which brokers they can reach, which error
explains that a partition is not on this broker, and which leader they should send the request to instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from penstock.cluster.image import BrokerState, ClusterImage, Endpoint, PartitionState, TopicState
from penstock.cluster.metadata_records import NO_LEADER
from penstock.protocol.errors import ErrorCode
from penstock.protocol.produce import NodeEndpoint as LeaderEndpoint

if TYPE_CHECKING:
    from penstock.broker.environment import ImageView
    from penstock.broker.partition.replica_manager import ReplicaManager


def _bits(*operations: int) -> int:
    return sum(1 << operation for operation in operations)


_READ, _WRITE, _CREATE, _DELETE, _ALTER, _DESCRIBE = 3, 4, 5, 6, 7, 8
_CLUSTER_ACTION, _DESCRIBE_CONFIGS, _ALTER_CONFIGS, _IDEMPOTENT_WRITE = 9, 10, 11, 12

#: Without ACLs every client may perform every operation that the resource type supports.
TOPIC_AUTHORIZED_OPERATIONS: Final = _bits(
    _READ, _WRITE, _CREATE, _DELETE, _ALTER, _DESCRIBE, _DESCRIBE_CONFIGS, _ALTER_CONFIGS
)
CLUSTER_AUTHORIZED_OPERATIONS: Final = _bits(
    _CREATE, _ALTER, _DESCRIBE, _CLUSTER_ACTION, _DESCRIBE_CONFIGS, _ALTER_CONFIGS, _IDEMPOTENT_WRITE
)
#: The value of these fields when the client did not request them.
OPERATIONS_NOT_REQUESTED: Final = -(1 << 31)


class ReachableBroker(NamedTuple):
    broker: BrokerState
    endpoint: Endpoint


def reachable_brokers(
    image: ClusterImage, listener: str, *, with_fenced: bool = False
) -> list[ReachableBroker]:
    """Return the brokers that are alive, with their endpoints on the listener that the client itself uses."""
    return [
        ReachableBroker(broker, broker.endpoints[listener])
        for _, broker in sorted(image.brokers.items())
        if listener in broker.endpoints and (with_fenced or not broker.fenced)
    ]


class PartitionView(NamedTuple):
    error: ErrorCode
    leader: int
    offline: tuple[int, ...]


class PartitionViewer:
    """Views many partitions of one image; computes only once which brokers are reachable."""

    def __init__(self, image: ClusterImage, listener: str) -> None:
        self._brokers = image.brokers
        self._reachable = {found.broker.id for found in reachable_brokers(image, listener)}

    def view(self, partition: PartitionState) -> PartitionView:
        offline = tuple(self.unreachable(partition.replicas))
        if partition.leader in self._reachable:
            return PartitionView(ErrorCode.none, partition.leader, offline)
        if partition.leader in self._brokers:
            return PartitionView(ErrorCode.listener_not_found, NO_LEADER, offline)
        return PartitionView(ErrorCode.leader_not_available, NO_LEADER, offline)

    def unreachable(self, brokers: Iterable[int]) -> list[int]:
        return [broker for broker in brokers if broker not in self._reachable]


def find_topic(image: ClusterImage, raw: bytes, *, by_id: bool) -> TopicState | None:
    """Return the topic that a request names by the raw bytes of its name or id."""
    if by_id:
        return image.topics_by_id.get(UUID(bytes=raw))
    return image.topics.get(raw.decode(errors="replace"))


#: Error codes that tell a client that another broker leads.
_WRONG_LEADER_CODES: Final = frozenset({ErrorCode.not_leader_or_follower, ErrorCode.fenced_leader_epoch})


class LeaderHints:
    """Collects the endpoints of the leaders that a response redirects its client to."""

    __slots__ = ("_by_id", "_listener", "_metadata", "_partitions", "endpoints")

    def __init__(
        self, metadata: ImageView, partitions: ReplicaManager, listener: str, *, by_id: bool
    ) -> None:
        self._metadata = metadata
        self._partitions = partitions
        self._listener = listener
        self._by_id = by_id
        self.endpoints: dict[int, LeaderEndpoint] = {}

    def leader(self, raw_topic: bytes, index: int, error: ErrorCode) -> tuple[int, int] | None:
        """Return leader id and epoch if the error means that the client should send its request to another broker."""
        leader = self._leader_of(raw_topic, index) if error in _WRONG_LEADER_CODES else None
        if leader is None or leader[0] == NO_LEADER:
            return None
        broker = self._metadata.image.brokers.get(leader[0])
        at = None if broker is None else broker.endpoints.get(self._listener)
        if broker is not None and at is not None:
            self.endpoints[broker.id] = LeaderEndpoint(broker.id, at.host, at.port, broker.rack)
        return leader

    def _leader_of(self, raw_topic: bytes, index: int) -> tuple[int, int] | None:
        partitions = self._partitions
        here = (partitions.by_raw_id if self._by_id else partitions.by_raw_name).get(raw_topic, {})
        if (partition := here.get(index)) is not None:
            # The partition may already have applied an image that the node has yet to publish.
            return partition.leader_id, partition.leader_epoch
        topic = find_topic(self._metadata.image, raw_topic, by_id=self._by_id)
        state = None if topic is None else topic.partitions.get(index)
        return None if state is None else (state.leader, state.leader_epoch)
