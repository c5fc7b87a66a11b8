"""A consumer group as one kind of group in the shard."""

from penstock.groups.consumer import classic_members
from penstock.groups.consumer.consumer_group_data import (
    REBALANCE_TIMER,
    ConsumerGroupData,
    schedule_session_timeout,
)
from penstock.groups.consumer.consumer_group_records import ConsumerGroupMember
from penstock.groups.consumer.membership import DescribedConsumerGroup, DescribedConsumerMember, fence_member
from penstock.groups.group import (
    CommitRequest,
    HeartbeatRequest,
    JoinRequest,
    LeaveRequest,
    LeaveResults,
    OffsetToCommit,
    Operation,
    ReplyToken,
    SyncRequest,
)
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.modern_group import (
    JOIN_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_STATIC_MEMBER_EPOCH,
    NO_PARTITIONS,
    MemberState,
    require_group,
)
from penstock.groups.timers import TimerKey
from penstock.groups.topics import Topics
from penstock.protocol.errors import ErrorCode


class ConsumerGroup(ConsumerGroupData):
    __slots__ = ()

    @property
    def state_name(self) -> str:
        if not self.members:
            return "Empty"
        if self.epoch > self.target_epoch:
            return "Assigning"
        settled = all(member.current.is_settled(self.target_epoch) for member in self.members.values())
        return "Stable" if settled else "Reconciling"

    @property
    def can_be_replaced(self) -> bool:
        return not self.members

    @property
    def stored(self) -> tuple[object, ...]:
        return (*super().stored, dict(self.regexes))

    # The classic protocol

    def join(
        self, request: JoinRequest, token: ReplyToken, operation: Operation, *, new_member_id: str
    ) -> None:
        classic_members.handle_classic_join(self, request, token, operation, new_member_id=new_member_id)

    def sync(self, request: SyncRequest, token: ReplyToken, operation: Operation) -> None:
        classic_members.handle_classic_sync(self, request, token, operation)

    def heartbeat(self, request: HeartbeatRequest, operation: Operation) -> ErrorCode:
        return classic_members.handle_classic_heartbeat(self, request, operation)

    def leave(self, request: LeaveRequest, operation: Operation) -> LeaveResults:
        return classic_members.handle_classic_leave(self, request, operation)

    def description(self, default_assignor: str) -> DescribedConsumerGroup:
        return DescribedConsumerGroup(
            group_id=self.group_id,
            state=self.state_name,
            epoch=self.epoch,
            target_epoch=self.target_epoch,
            assignor=self.preferred_assignor or default_assignor,
            members=tuple(self._described(member) for member in self.members.values()),
        )

    def _described(self, member: ConsumerGroupMember) -> DescribedConsumerMember:
        subscription = member.subscription
        return DescribedConsumerMember(
            member_id=member.member_id,
            instance_id=subscription.instance_id,
            rack_id=subscription.rack_id,
            member_epoch=member.current.epoch,
            client_id=subscription.client_id,
            client_host=subscription.client_host,
            topic_names=subscription.topic_names,
            topic_regex=subscription.topic_regex or None,
            assigned=member.current.assigned,
            target=self.targets.get(member.member_id, NO_PARTITIONS),
            is_classic=member.is_classic,
        )

    # Offsets

    def check_commit(
        self, request: CommitRequest, topics: Topics, *, is_transactional: bool = False
    ) -> ErrorCode:
        """A fenced member is no longer in the group.

        A member that has not received its latest epochs yet may commit offsets of partitions that it has held without
        interruption since the epoch of the request: no other member can have moved those offsets meanwhile.
        """
        if self.is_commit_without_member(request, is_transactional=is_transactional):
            return ErrorCode.none
        member_id, epoch = request.member_id, request.generation
        member = self.members.get(member_id)
        if member is not None and JOIN_GROUP_MEMBER_EPOCH < epoch < member.current.epoch:
            has_had = all(_was_assigned_at(member, each, epoch, topics) for each in request.offsets)
            return ErrorCode.none if has_had else _wrong_epoch_error(member)
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
        if epoch == member.current.epoch and epoch != LEAVE_GROUP_STATIC_MEMBER_EPOCH:
            return ErrorCode.none
        return _wrong_epoch_error(member)

    def is_subscribed(self, topic: str) -> bool:
        return topic in self.subscribed

    # Lifecycle

    def loaded(self, operation: Operation) -> None:
        timeout_ms = operation.config_of(self.group_id).consumer_session_timeout_ms
        for member in self.members.values():
            schedule_session_timeout(operation, self.group_id, member, timeout_ms)
            if member.current.phase is MemberState.UNREVOKED and not member.is_classic:
                timer = TimerKey(REBALANCE_TIMER, self.group_id, member.member_id)
                operation.schedule_in(timer, member.subscription.rebalance_timeout_ms)

    def time_out(self, timer: TimerKey, operation: Operation) -> None:
        """Fence a member that sent no heartbeat, revoked no partitions, did not rejoin, or did not sync in time."""
        member = self.members.get(timer.member_id)
        if member is not None and timer.kind in self.member_timers:
            fence_member(self, member, operation)


def _wrong_epoch_error(member: ConsumerGroupMember) -> ErrorCode:
    return ErrorCode.illegal_generation if member.is_classic else ErrorCode.stale_member_epoch


def _was_assigned_at(member: ConsumerGroupMember, offset: OffsetToCommit, epoch: int, topics: Topics) -> bool:
    """Whether the member holds the partition and already held it at this epoch."""
    topic = topics.get(offset.topic)
    since = {} if topic is None else member.current.since.get(topic.id, {})
    return since.get(offset.partition, epoch + 1) <= epoch


def describe_consumer_group(shard: GroupCoordinatorShard, group_id: str) -> DescribedConsumerGroup:
    """Raises GROUP_ID_NOT_FOUND."""
    group = require_group(shard, group_id, ConsumerGroup)
    return group.description(shard.settings.consumer_assignors[0])
