"""A share group as one kind of group among others in its shard."""

from typing import ClassVar, Final

from penstock.groups.consumer.subscriptions import metadata_hash
from penstock.groups.messages import (
    CommitRequest,
    DescribedGroup,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LeaveResults,
    SyncReply,
    SyncRequest,
)
from penstock.groups.records import CommittedOffset
from penstock.groups.shard import GroupShard
from penstock.groups.share.draft import SESSION, Draft, session_timer
from penstock.groups.share.messages import DescribedShareGroup, DescribedShareMember
from penstock.groups.share.state import GroupState
from penstock.groups.share.values import Member
from penstock.groups.timers import Timers
from penstock.groups.topics import Topics
from penstock.groups.work import Step, Timer, Token
from penstock.protocol.errors import ApiError, ErrorCode

ASSIGNOR: Final = "simple"


class ShareGroup(GroupState):
    __slots__ = ()

    kind: ClassVar[str] = "share"

    # What it is

    @property
    def protocol_name(self) -> str:
        return self.kind

    @property
    def state_name(self) -> str:
        return "Stable" if self.members else "Empty"

    @property
    def member_count(self) -> int:
        return len(self.members)

    @property
    def is_empty(self) -> bool:
        """What share partitions know of it has to go before the group does."""
        return not self.members and self.states.is_empty

    @property
    def is_idle(self) -> bool:
        """Never: its positions are in the state of its share partitions, and do not expire."""
        return False

    @property
    def gives_way(self) -> bool:
        return False

    @property
    def stored(self) -> object:
        return (
            self.epoch,
            self.metadata_hash,
            self.target_epoch,
            dict(self.members),
            dict(self.targets),
            self.states,
        )

    # The classic protocol, of which it knows nothing

    def join(self, request: JoinRequest, token: Token, step: Step, *, new_member_id: str) -> None:
        error = ErrorCode.inconsistent_group_protocol
        step.reply(token, JoinReply(error=error, member_id=request.member_id))

    def sync(self, request: SyncRequest, token: Token, step: Step) -> None:
        step.reply(token, SyncReply(error=ErrorCode.unknown_member_id))

    def heartbeat(self, request: HeartbeatRequest, step: Step) -> ErrorCode:
        return ErrorCode.unknown_member_id

    def leave(self, request: LeaveRequest, step: Step) -> LeaveResults:
        return tuple((member, ErrorCode.unknown_member_id) for member in request.members)

    def described(self) -> DescribedGroup | None:
        return None

    def described_as_such(self) -> DescribedShareGroup:
        return DescribedShareGroup(
            group_id=self.group_id,
            state=self.state_name,
            epoch=self.epoch,
            target_epoch=self.target_epoch,
            assignor=ASSIGNOR,
            members=tuple(_described(member) for member in self.members.values()),
        )

    # Offsets, of which it has none

    def check_commit(
        self, request: CommitRequest, topics: Topics, *, is_transactional: bool = False
    ) -> ErrorCode:
        return ErrorCode.group_id_not_found

    def needs_member_epoch(self, member_id: str) -> bool:
        return False

    def check_fetch(self, member_id: str | None, epoch: int) -> ErrorCode:
        return ErrorCode.group_id_not_found

    def check_offset_deletion(self) -> ErrorCode:
        return ErrorCode.group_id_not_found

    def is_subscribed(self, topic: str) -> bool:
        return topic in self.subscribed

    def retained_from_ms(self, offset: CommittedOffset) -> int | None:
        """Offsets that were committed before the group was a share group are of no use to it."""
        return offset.commit_timestamp_ms

    # Life

    def loaded(self, step: Step) -> None:
        timeout_ms = step.config_of(self.group_id).share_session_timeout_ms
        for member_id in self.members:
            step.schedule_in(session_timer(self.group_id, member_id), timeout_ms)

    def heard_of(self, member_id: str, step: Step) -> None:
        """Only heartbeats count."""

    def time_out(self, timer: Timer, step: Step) -> None:
        member = self.members.get(timer.member_id)
        if member is not None and timer.kind == SESSION:
            fence(self, member, step)

    def dropped(self, timers: Timers[Timer]) -> None:
        for member_id in self.members:
            timers.cancel(session_timer(self.group_id, member_id))


def _described(member: Member) -> DescribedShareMember:
    subscription = member.subscription
    return DescribedShareMember(
        member_id=member.member_id,
        rack_id=subscription.rack_id,
        member_epoch=member.current.epoch,
        client_id=subscription.client_id,
        client_host=subscription.client_host,
        topic_names=subscription.topic_names,
        assigned=member.current.assigned,
    )


def existing(shard: GroupShard, group_id: str) -> ShareGroup:
    """Raises ApiError."""
    group = shard.groups.get(group_id)
    if group is None:
        raise ApiError(ErrorCode.group_id_not_found, f"Group {group_id} not found.")
    if not isinstance(group, ShareGroup):
        raise ApiError(ErrorCode.group_id_not_found, f"Group {group_id} is not a share group.")
    return group


def described(shard: GroupShard, group_id: str) -> DescribedShareGroup:
    """Raises ApiError."""
    return existing(shard, group_id).described_as_such()


def fence(group: GroupState, member: Member, step: Step) -> None:
    """Others read what it had, once they are heard of."""
    draft = Draft(group, step)
    draft.remove(member)
    draft.begin_epoch(metadata_hash(draft.state.subscribed, step.topics))
