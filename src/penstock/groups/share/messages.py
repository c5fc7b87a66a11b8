"""What members and administrators of share groups say and are told, free of any wire version."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

from penstock.groups.consumer.values import NOTHING, Assignment
from penstock.protocol.errors import ErrorCode

NO_NAMES: Final[Mapping[UUID, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareHeartbeat:
    """None for what has not changed since the last one."""

    group_id: str
    member_id: str
    member_epoch: int
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topic_names: tuple[str, ...] | None = None
    #: What holds for this group now.
    session_timeout_ms: int
    heartbeat_interval_ms: int


class Upkeep(NamedTuple):
    """What is to be done at the share coordinator before a group can read, deletions first."""

    #: As of when: states are made with it, so that what was there before is told apart.
    epoch: int
    delete: Assignment = NOTHING
    initialize: Assignment = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareHeartbeatReply:
    error: ErrorCode = ErrorCode.none
    message: str | None = None
    member_id: str | None = None
    member_epoch: int = 0
    heartbeat_interval_ms: int = 0
    #: None when it is what the member was told before.
    assigned: Assignment | None = None
    upkeep: Upkeep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedShareMember:
    member_id: str
    rack_id: str | None
    member_epoch: int
    client_id: str
    client_host: str
    topic_names: tuple[str, ...]
    assigned: Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedShareGroup:
    group_id: str
    state: str
    epoch: int
    target_epoch: int
    assignor: str
    members: tuple[DescribedShareMember, ...] = ()


#: Start offsets by topic name and partition.
StartOffsets = Mapping[str, Mapping[int, int]]


class AlterReply(NamedTuple):
    """States of `places` may now be begun anew with `epoch`; nothing else was asked for that exists."""

    error: ErrorCode = ErrorCode.none
    message: str | None = None
    epoch: int = 0
    places: Assignment = NOTHING
    #: What is still being deleted cannot be begun anew: see to that, and ask again.
    waits_for_deletion: bool = False


class DeleteReply(NamedTuple):
    """`places` may have a state, which is to be deleted if it was not begun after `epoch`. Other topics have none."""

    error: ErrorCode = ErrorCode.none
    message: str | None = None
    epoch: int = 0
    places: Assignment = NOTHING
    names: Mapping[UUID, str] = NO_NAMES
