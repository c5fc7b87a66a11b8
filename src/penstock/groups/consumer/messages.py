"""What members of consumer groups say and are told, free of any wire version."""

from dataclasses import dataclass

from penstock.groups.consumer.values import Assignment
from penstock.protocol.errors import ErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerHeartbeat:
    """None (or -1) for what has not changed since the last one."""

    group_id: str
    member_id: str
    member_epoch: int
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    rebalance_timeout_ms: int = -1
    topic_names: tuple[str, ...] | None = None
    topic_regex: str | None = None
    assignor: str | None = None
    owned: Assignment | None = None
    #: What holds for this group now.
    session_timeout_ms: int
    heartbeat_interval_ms: int
    assignment_interval_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerHeartbeatReply:
    error: ErrorCode = ErrorCode.none
    message: str | None = None
    member_id: str | None = None
    member_epoch: int = 0
    heartbeat_interval_ms: int = 0
    #: None when it is what the member was told before.
    assigned: Assignment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedConsumer:
    member_id: str
    instance_id: str | None
    rack_id: str | None
    member_epoch: int
    client_id: str
    client_host: str
    topic_names: tuple[str, ...]
    topic_regex: str | None
    assigned: Assignment
    target: Assignment
    is_classic: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedConsumerGroup:
    group_id: str
    state: str
    epoch: int
    target_epoch: int
    assignor: str
    members: tuple[DescribedConsumer, ...] = ()
