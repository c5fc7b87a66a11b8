"""A consumer group as one kind of group among others in its shard."""

from typing import ClassVar

from penstock.groups.consumer import classic_members
from penstock.groups.consumer.departure import fence
from penstock.groups.consumer.draft import JOIN, REBALANCE, SESSION, SYNC, cancel_timers, expect_heartbeat
from penstock.groups.consumer.messages import DescribedConsumer, DescribedConsumerGroup
from penstock.groups.consumer.state import GroupState
from penstock.groups.consumer.values import AWAY, JOINING, NOTHING, Member, Phase
from penstock.groups.messages import (
    CommitRequest,
    DescribedGroup,
    HeartbeatRequest,
    JoinRequest,
    LeaveRequest,
    LeaveResults,
    OffsetToCommit,
    SyncRequest,
)
from penstock.groups.records import CommittedOffset
from penstock.groups.shard import GroupShard
from penstock.groups.subscription import CONSUMER_PROTOCOL_TYPE
from penstock.groups.timers import Timers
from penstock.groups.topics import Topics
from penstock.groups.work import Step, Timer, Token
from penstock.protocol.errors import ApiError, ErrorCode


class ConsumerGroup(GroupState):
    __slots__ = ()

    kind: ClassVar[str] = "consumer"

    # What it is

    @property
    def protocol_name(self) -> str:
        return CONSUMER_PROTOCOL_TYPE

    @property
    def state_name(self) -> str:
        if not self.members:
            return "Empty"
        if self.epoch > self.target_epoch:
            return "Assigning"
        settled = all(member.current.is_settled(self.target_epoch) for member in self.members.values())
        return "Stable" if settled else "Reconciling"

    @property
    def member_count(self) -> int:
        return len(self.members)

    @property
    def is_empty(self) -> bool:
        return not self.members

    @property
    def is_idle(self) -> bool:
        return not self.members

    @property
    def gives_way(self) -> bool:
        return not self.members

    @property
    def stored(self) -> object:
        return (
            self.epoch,
            self.metadata_hash,
            self.target_epoch,
            dict(self.members),
            dict(self.targets),
            dict(self.regexes),
        )

    # The classic protocol

    def join(self, request: JoinRequest, token: Token, step: Step, *, new_member_id: str) -> None:
        classic_members.join(self, request, token, step, new_member_id=new_member_id)

    def sync(self, request: SyncRequest, token: Token, step: Step) -> None:
        classic_members.sync(self, request, token, step)

    def heartbeat(self, request: HeartbeatRequest, step: Step) -> ErrorCode:
        return classic_members.heartbeat(self, request, step)

    def leave(self, request: LeaveRequest, step: Step) -> LeaveResults:
        return classic_members.leave(self, request, step)

    def described(self) -> DescribedGroup | None:
        return None

    def described_as_such(self, default_assignor: str) -> DescribedConsumerGroup:
        return DescribedConsumerGroup(
            group_id=self.group_id,
            state=self.state_name,
            epoch=self.epoch,
            target_epoch=self.target_epoch,
            assignor=self.preferred_assignor or default_assignor,
            members=tuple(self._described(member) for member in self.members.values()),
        )

    def _described(self, member: Member) -> DescribedConsumer:
        subscription = member.subscription
        return DescribedConsumer(
            member_id=member.member_id,
            instance_id=subscription.instance_id,
            rack_id=subscription.rack_id,
            member_epoch=member.current.epoch,
            client_id=subscription.client_id,
            client_host=subscription.client_host,
            topic_names=subscription.topic_names,
            topic_regex=subscription.topic_regex or None,
            assigned=member.current.assigned,
            target=self.targets.get(member.member_id, NOTHING),
            is_classic=member.is_classic,
        )

    # Offsets

    def check_commit(
        self, request: CommitRequest, topics: Topics, *, is_transactional: bool = False
    ) -> ErrorCode:
        """A member that was fenced is no longer in the group.

        One that has not heard of its last epochs yet may commit what it has had without a break since it last heard:
        nobody else can have moved that offset meanwhile.
        """
        member_id, epoch = request.member_id, request.generation
        if epoch < 0 and self.is_empty:
            return ErrorCode.none
        if is_transactional and epoch < 0 and not member_id and request.instance_id is None:
            # Older transactional producers do not say for which member they commit.
            return ErrorCode.none
        member = self.members.get(member_id)
        if member is not None and JOINING < epoch < member.current.epoch:
            has_had = all(_has_had(member, each, epoch, topics) for each in request.offsets)
            return ErrorCode.none if has_had else _wrong_epoch(member)
        return self._check_epoch(member_id, epoch)

    def needs_member_epoch(self, member_id: str) -> bool:
        member = self.members.get(member_id)
        return member is not None and not member.is_classic

    def check_fetch(self, member_id: str | None, epoch: int) -> ErrorCode:
        if member_id is None and epoch < 0:
            return ErrorCode.none
        return self._check_epoch(member_id or "", epoch)

    def _check_epoch(self, member_id: str, epoch: int) -> ErrorCode:
        member = self.members.get(member_id)
        if member is None:
            return ErrorCode.unknown_member_id
        if epoch == member.current.epoch and epoch != AWAY:
            return ErrorCode.none
        return _wrong_epoch(member)

    def check_offset_deletion(self) -> ErrorCode:
        return ErrorCode.none

    def is_subscribed(self, topic: str) -> bool:
        return topic in self.subscribed

    def retained_from_ms(self, offset: CommittedOffset) -> int | None:
        return offset.commit_timestamp_ms

    # Life

    def loaded(self, step: Step) -> None:
        timeout_ms = step.config_of(self.group_id).consumer_session_timeout_ms
        for member in self.members.values():
            expect_heartbeat(step, self.group_id, member, timeout_ms)
            if member.current.phase is Phase.UNREVOKED and not member.is_classic:
                timer = Timer(REBALANCE, self.group_id, member.member_id)
                step.schedule_in(timer, member.subscription.rebalance_timeout_ms)

    def heard_of(self, member_id: str, step: Step) -> None:
        """Only heartbeats count."""

    def time_out(self, timer: Timer, step: Step) -> None:
        """Not heard of, not let go of partitions, not come back when it was called, or not asked for its assignment."""
        member = self.members.get(timer.member_id)
        if member is not None and timer.kind in (SESSION, REBALANCE, JOIN, SYNC):
            fence(self, member, step)

    def dropped(self, timers: Timers[Timer]) -> None:
        for member_id in self.members:
            cancel_timers(timers, self.group_id, member_id)


def _wrong_epoch(member: Member) -> ErrorCode:
    return ErrorCode.illegal_generation if member.is_classic else ErrorCode.stale_member_epoch


def _has_had(member: Member, offset: OffsetToCommit, epoch: int, topics: Topics) -> bool:
    """Whether the partition is the member's, and was already at this epoch."""
    topic = topics.get(offset.topic)
    since = {} if topic is None else member.current.since.get(topic.id, {})
    return since.get(offset.partition, epoch + 1) <= epoch


def described(shard: GroupShard, group_id: str) -> DescribedConsumerGroup:
    """Raises GROUP_ID_NOT_FOUND."""
    group = shard.groups.get(group_id)
    if not isinstance(group, ConsumerGroup):
        flaw = "not found" if group is None else "is not a consumer group"
        raise ApiError(ErrorCode.group_id_not_found, f"Group {group_id} {flaw}.")
    return group.described_as_such(shard.settings.consumer_assignors[0])
