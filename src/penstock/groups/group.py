"""What every kind of group can be asked, so that one shard holds them all."""

from collections.abc import Iterator
from typing import ClassVar, Protocol

from penstock.groups.messages import (
    CommitRequest,
    DescribedGroup,
    HeartbeatRequest,
    JoinRequest,
    LeaveRequest,
    LeaveResults,
    SyncRequest,
)
from penstock.groups.records import CommittedOffset, KeyValue
from penstock.groups.timers import Timers
from penstock.groups.topics import Topics
from penstock.groups.work import Step, Timer, Token
from penstock.protocol.errors import ErrorCode


class Group(Protocol):
    """How a group changes is its kind's affair. It is replaced in the shard when it becomes one of another kind."""

    #: As ListGroups names it.
    kind: ClassVar[str]
    group_id: str

    @property
    def protocol_name(self) -> str:
        """The protocol type, as ListGroups names it."""

    @property
    def state_name(self) -> str:
        """As Kafka prints it."""

    @property
    def member_count(self) -> int: ...
    @property
    def is_empty(self) -> bool:
        """Without members, so that it may be deleted, and that whoever is no member may commit."""

    @property
    def is_idle(self) -> bool:
        """Empty, and nobody is on the way: it goes when its offsets have."""

    @property
    def gives_way(self) -> bool:
        """Whether a group of another kind may take its name: its offsets stay."""

    @property
    def stored(self) -> object:
        """All of it that is durable, to be compared; None for a group of which nothing is."""

    # The classic protocol, which members may still speak in a group of another kind

    def join(self, request: JoinRequest, token: Token, step: Step, *, new_member_id: str) -> None: ...
    def sync(self, request: SyncRequest, token: Token, step: Step) -> None: ...
    def heartbeat(self, request: HeartbeatRequest, step: Step) -> ErrorCode: ...
    def leave(self, request: LeaveRequest, step: Step) -> LeaveResults: ...
    def described(self) -> DescribedGroup | None:
        """None for a group that the classic protocol does not know."""

    # Offsets

    def check_commit(
        self, request: CommitRequest, topics: Topics, *, is_transactional: bool = False
    ) -> ErrorCode:
        """Its generation is a classic member's, or the member's epoch. One offset too many spoils all."""

    def needs_member_epoch(self, member_id: str) -> bool:
        """Whether this member may commit only with a request that knows of member epochs."""

    def check_fetch(self, member_id: str | None, epoch: int) -> ErrorCode: ...
    def check_offset_deletion(self) -> ErrorCode: ...
    def is_subscribed(self, topic: str) -> bool:
        """Whether somebody consumes the topic, or may do so."""

    def retained_from_ms(self, offset: CommittedOffset) -> int | None:
        """From when the retention of an offset counts: None while it is in use."""

    # Life

    def loaded(self, step: Step) -> None:
        """All records were replayed: from now on members are expected to be heard of."""

    def heard_of(self, member_id: str, step: Step) -> None:
        """A member committed."""

    def time_out(self, timer: Timer, step: Step) -> None:
        """A timer of this group came up; it may be of what the group was before."""

    def tombstones(self) -> Iterator[KeyValue]:
        """Records that take it from the log, for a group without members."""

    def dropped(self, timers: Timers[Timer]) -> None:
        """It is no longer in its shard."""
