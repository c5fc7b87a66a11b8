"""What members of streams groups and administrators send and receive, free of any wire version."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.groups.streams.topology import Status
from penstock.groups.streams.values import Endpoint, InternalTopic, Member, TaskSets, Topology
from penstock.protocol.errors import ErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsHeartbeat:
    """None for what has not changed since the last one."""

    group_id: str
    member_id: str
    member_epoch: int
    endpoint_epoch: int = 0
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topology: Topology | None = None
    owned: TaskSets | None = None
    process_id: str | None = None
    endpoint: Endpoint | None = None
    tags: tuple[tuple[str, str], ...] | None = None
    has_task_offsets: bool = False
    shutdown_application: bool = False
    #: What holds for this group now.
    session_timeout_ms: int
    heartbeat_interval_ms: int
    assignment_interval_ms: int
    initial_rebalance_delay_ms: int
    standby_replicas: int


class EndpointPartitions(NamedTuple):
    """What can be queried at the endpoint of a member, by topic."""

    endpoint: Endpoint
    active: Mapping[str, tuple[int, ...]]
    standby: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsHeartbeatReply:
    error: ErrorCode = ErrorCode.none
    message: str | None = None
    member_id: str = ""
    member_epoch: int = 0
    heartbeat_interval_ms: int = 0
    statuses: tuple[Status, ...] = ()
    #: None when it is what the member was assigned before.
    assigned: TaskSets | None = None
    endpoint_epoch: int = 0
    #: None when it is what the member knows.
    endpoints: tuple[EndpointPartitions, ...] | None = None
    #: Internal topics that the group waits for.
    topics_to_create: tuple[InternalTopic, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedStreamsGroup:
    group_id: str
    state: str
    epoch: int
    target_epoch: int
    topology: Topology | None
    #: Internal topics with the numbers of partitions that were decided for them, where they were.
    internal_topics: Mapping[str, InternalTopic]
    members: tuple[Member, ...]
    targets: Mapping[str, TaskSets]
