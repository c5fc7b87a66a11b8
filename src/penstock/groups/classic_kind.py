"""A classic group as one kind of group among others in its shard."""

from collections.abc import Iterator
from typing import ClassVar

from penstock.groups.classic import ClassicGroup
from penstock.groups.join import join
from penstock.groups.messages import (
    NO_MEMBER_ID,
    CommitRequest,
    DescribedGroup,
    DescribedMember,
    HeartbeatRequest,
    JoinRequest,
    LeaveRequest,
    LeaveResults,
    SyncRequest,
)
from penstock.groups.presence import heartbeat, leave, session_timed_out
from penstock.groups.rebalance import expect_heartbeat, join_timed_out, prepare, sync_timed_out
from penstock.groups.records import CommittedOffset, GroupRecord, KeyValue, encode_group
from penstock.groups.states import State
from penstock.groups.sync import sync
from penstock.groups.timers import Timers
from penstock.groups.topics import Topics
from penstock.groups.work import Step, Timer, Token
from penstock.protocol.errors import ErrorCode


class Classic(ClassicGroup):
    __slots__ = ()

    kind: ClassVar[str] = "classic"

    @property
    def protocol_name(self) -> str:
        return self.protocol_type or ""

    @property
    def state_name(self) -> str:
        return self.state.value

    @property
    def member_count(self) -> int:
        return len(self.members)

    @property
    def is_empty(self) -> bool:
        return self.state is State.EMPTY

    @property
    def is_idle(self) -> bool:
        return self.is_empty and not self.members and not self.pending

    @property
    def gives_way(self) -> bool:
        return self.is_idle

    # The classic protocol

    def join(self, request: JoinRequest, token: Token, step: Step, *, new_member_id: str) -> None:
        join(self, request, token, step, new_member_id=new_member_id)

    def sync(self, request: SyncRequest, token: Token, step: Step) -> None:
        sync(self, request, token, step)

    def heartbeat(self, request: HeartbeatRequest, step: Step) -> ErrorCode:
        return heartbeat(self, request, step)

    def leave(self, request: LeaveRequest, step: Step) -> LeaveResults:
        return leave(self, request, step)

    def described(self) -> DescribedGroup:
        protocol = self.protocol if self.state is State.STABLE else None
        return DescribedGroup(
            group_id=self.group_id,
            state=self.state.value,
            protocol_type=self.protocol_type or "",
            protocol=protocol or "",
            members=tuple(
                DescribedMember(
                    member_id=member.member_id,
                    instance_id=member.instance_id,
                    client_id=member.client_id,
                    client_host=member.client_host,
                    metadata=b"" if protocol is None else member.metadata(protocol),
                    assignment=member.assignment,
                )
                for member in self.members.values()
            ),
        )

    # Offsets

    def check_commit(
        self, request: CommitRequest, topics: Topics, *, is_transactional: bool = False
    ) -> ErrorCode:
        member_id, instance_id, epoch = request.member_id, request.instance_id, request.generation
        if epoch < 0 and self.is_empty:
            return ErrorCode.none
        if epoch < 0 and member_id == NO_MEMBER_ID and instance_id is None:
            # Older transactional producers do not say for which member they commit.
            return ErrorCode.none if is_transactional else ErrorCode.unknown_member_id
        error = self.check_member(member_id, instance_id)
        if error is not ErrorCode.none:
            return error
        if epoch != self.generation:
            return ErrorCode.illegal_generation
        # It knows of the new generation but has no assignment in it, so there is nothing it can have processed.
        completing = self.state is State.COMPLETING_REBALANCE and not is_transactional
        return ErrorCode.rebalance_in_progress if completing else ErrorCode.none

    def needs_member_epoch(self, member_id: str) -> bool:
        return False

    def check_fetch(self, member_id: str | None, epoch: int) -> ErrorCode:
        return ErrorCode.none

    def check_offset_deletion(self) -> ErrorCode:
        # Which topics another kind of protocol uses is its own secret.
        known = self.is_empty or self.is_consumer_group
        return ErrorCode.none if known else ErrorCode.non_empty_group

    def is_subscribed(self, topic: str) -> bool:
        """Members whose subscription cannot be read may consume any topic."""
        return self.is_consumer_group if self.subscribed is None else topic in self.subscribed

    def retained_from_ms(self, offset: CommittedOffset) -> int | None:
        if self.protocol_type is None:
            return offset.commit_timestamp_ms
        if self.is_empty:
            stored_ms = -1 if self.stored is None else self.stored.state_timestamp_ms
            return offset.commit_timestamp_ms if stored_ms == -1 else stored_ms
        if self.state is State.STABLE and self.is_consumer_group and self.subscribed is not None:
            # Nobody in the group consumes this topic any more.
            return offset.commit_timestamp_ms
        return None

    # Life

    def loaded(self, step: Step) -> None:
        for member in self.members.values():
            expect_heartbeat(self, member, step)
        if len(self.members) > step.settings.size_max:
            prepare(self, step)

    def heard_of(self, member_id: str, step: Step) -> None:
        member = self.members.get(member_id)
        if member is not None:
            expect_heartbeat(self, member, step)

    def time_out(self, timer: Timer, step: Step) -> None:
        match timer.kind:
            case "session":
                session_timed_out(self, timer.member_id, step)
            case "join":
                join_timed_out(self, step)
            case "sync":
                sync_timed_out(self, step)

    def tombstones(self) -> Iterator[KeyValue]:
        yield encode_group(GroupRecord(group=self.group_id, value=None))

    def dropped(self, timers: Timers[Timer]) -> None:
        self.move(State.DEAD)
        for member_id in (*self.members, *self.pending):
            timers.cancel(Timer("session", self.group_id, member_id))
        timers.cancel(Timer("join", self.group_id))
        timers.cancel(Timer("sync", self.group_id))
