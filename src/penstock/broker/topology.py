"""What clients are told of brokers and partitions, seen from one listener."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from penstock.cluster.image import ClusterImage
from penstock.cluster.records import NO_LEADER
from penstock.cluster.state import BrokerState, Endpoint, PartitionState
from penstock.protocol.errors import ErrorCode


def _bits(*operations: int) -> int:
    return sum(1 << operation for operation in operations)


_READ, _WRITE, _CREATE, _DELETE, _ALTER, _DESCRIBE = 3, 4, 5, 6, 7, 8
_CLUSTER_ACTION, _DESCRIBE_CONFIGS, _ALTER_CONFIGS, _IDEMPOTENT_WRITE = 9, 10, 11, 12

#: Without access rules everyone may do everything that the kind of resource knows.
TOPIC_OPERATIONS: Final = _bits(
    _READ, _WRITE, _CREATE, _DELETE, _ALTER, _DESCRIBE, _DESCRIBE_CONFIGS, _ALTER_CONFIGS
)
CLUSTER_OPERATIONS: Final = _bits(
    _CREATE, _ALTER, _DESCRIBE, _CLUSTER_ACTION, _DESCRIBE_CONFIGS, _ALTER_CONFIGS, _IDEMPOTENT_WRITE
)
#: What stands in these fields when nobody asked.
OPERATIONS_NOT_ASKED: Final = -(1 << 31)


class ReachableBroker(NamedTuple):
    broker: BrokerState
    endpoint: Endpoint


def reachable_brokers(
    image: ClusterImage, listener: str, *, with_fenced: bool = False
) -> list[ReachableBroker]:
    """Brokers alive, and their addresses on the listener that the client itself uses."""
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
    """Looks at many partitions of one image; which brokers are reachable is worked out once."""

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
