"""The values a cluster image is made of."""

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple
from uuid import UUID

from penstock.cluster.records import NO_LEADER


class ResourceType(IntEnum):
    """What a configuration belongs to, numbered as in DescribeConfigs."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


class ConfigResource(NamedTuple):
    """A broker named "" stands for all brokers."""

    type: int
    name: str


class Endpoint(NamedTuple):
    """Where a broker's listener is reached."""

    host: str
    port: int
    security_protocol: int = 0


class PartitionState(NamedTuple):
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    leader: int
    leader_epoch: int
    partition_epoch: int
    directories: tuple[UUID | None, ...]
    removing_replicas: tuple[int, ...] = ()
    adding_replicas: tuple[int, ...] = ()
    elr: tuple[int, ...] = ()
    last_known_elr: tuple[int, ...] = ()
    #: The leader was elected uncleanly and has not yet recovered.
    leader_recovering: bool = False

    @property
    def has_leader(self) -> bool:
        return self.leader != NO_LEADER


class TopicState(NamedTuple):
    """`partitions` changes only by replay, before readers see it; numbers run from 0 without gaps."""

    name: str
    id: UUID
    partitions: dict[int, PartitionState]


class BrokerState(NamedTuple):
    id: int
    epoch: int
    incarnation: UUID
    endpoints: Mapping[str, Endpoint]  # by listener name
    features: Mapping[str, tuple[int, int]]
    rack: str | None
    fenced: bool
    in_controlled_shutdown: bool
    log_dirs: tuple[UUID, ...]

    @property
    def rack_or_host(self) -> str:
        """What fails together: without a rack, all the nodes of one host."""
        if self.rack is not None:
            return self.rack
        return next((f"host {endpoint.host}" for endpoint in self.endpoints.values()), "")

    @property
    def is_active(self) -> bool:
        """Able to lead and to be in an in-sync set."""
        return not self.fenced and not self.in_controlled_shutdown
