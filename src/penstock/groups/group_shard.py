"""All groups of one `__consumer_offsets` partition.

An operation decides: it returns the records to append and the replies to give. What is stored changes only in
`replay`, live and on loading alike. Who waits for what lives beside it, and may be lost with the shard.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Final

from penstock.groups import offsets as offset_rules
from penstock.groups.classic_kind import Classic
from penstock.groups.config import GroupConfig
from penstock.groups.group import Group
from penstock.groups.messages import (
    NO_MEMBER_ID,
    CommitRequest,
    DescribedGroup,
    FetchedOffset,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    ListedGroup,
    PartitionsReply,
    SyncReply,
    SyncRequest,
)
from penstock.groups.offsets import OffsetStore, TopicPartition
from penstock.groups.records import (
    CLASSIC_KEYS,
    CONSUMER_KEYS,
    OFFSET_KEYS,
    SHARE_KEYS,
    STREAMS_KEYS,
    CommittedOffset,
    GroupRecord,
    OffsetRecord,
    can_store,
    decode,
    key_type,
)
from penstock.groups.settings import GroupSettings
from penstock.groups.timers import Timers
from penstock.groups.topics import NO_TOPICS, Topics
from penstock.groups.work import Producer, Step, Timer, Token, Work
from penstock.protocol.errors import ErrorCode

_EXPIRE: Final = Timer("expire")


class GroupShard:
    """Operations of other kinds than classic are functions in the rooms of their kinds, which are given the shard."""

    __slots__ = ("_config_of", "_timers", "groups", "offsets", "settings", "topics", "unknown_records")

    def __init__(
        self,
        settings: GroupSettings,
        topics: Topics = NO_TOPICS,
        config_of: Callable[[str], GroupConfig] | None = None,
    ) -> None:
        """`config_of`: what a group's own settings say now; without it they say what the node's do."""
        self.settings = settings
        self.topics = topics
        self._config_of = config_of or settings.config_of
        self.groups: dict[str, Group] = {}
        #: Records of kinds of groups that are not known here, passed over on replay.
        self.unknown_records = 0
        self.offsets = OffsetStore()
        self._timers: Timers[Timer] = Timers()

    def __repr__(self) -> str:
        return f"<GroupShard of {len(self.groups)} groups>"

    def step(self, now_ms: int) -> Step:
        """The pad for one operation."""
        return Step(
            now_ms=now_ms,
            settings=self.settings,
            config_of=self._config_of,
            timers=self._timers,
            topics=self.topics,
            groups=self.groups,
        )

    # Replay

    def replay(self, key: bytes, value: bytes | None) -> None:
        replay = _replay_of(key_type(key))
        if replay is None:
            self.unknown_records += 1
        else:
            replay(self, key, value)

    def replay_pending(self, producer_id: int, key: bytes, value: bytes | None) -> None:
        """A record of a transaction, which counts once that is committed."""
        record = decode(key, value)
        if not isinstance(record, OffsetRecord):
            self.unknown_records += 1
        elif record.value is None:
            self._replay_offset(key, value)
        else:
            self.offsets.replay_pending(producer_id, record)
            self.groups.setdefault(record.group, Classic(record.group))

    def transaction_ended(self, producer_id: int, committed: bool) -> None:
        for group_id in self.offsets.end_transaction(producer_id, committed):
            if group_id in self.groups:
                self._drop_if_unused(self.groups[group_id])

    def loaded(self, now_ms: int) -> Work:
        """To be called once after the log was replayed: from now on members are expected to be heard of."""
        step = self.step(now_ms)
        step.schedule_in(_EXPIRE, self.settings.offsets_retention_check_interval_ms)
        for group in self.groups.values():
            group.loaded(step)
        return step.work()

    # Time

    def next_deadline_ms(self) -> int | None:
        return self._timers.next_deadline_ms()

    def tick(self, now_ms: int) -> Work:
        """What is due, up to the first decision that must be stored: call again while one is overdue."""
        step = self.step(now_ms)
        while not step.has_records and (timer := self._timers.pop_due(now_ms)) is not None:
            self._time_out(timer, step)
        return step.work()

    def clock_moved(self, by_ms: int) -> None:
        """The wall clock was set by so much: timeouts run on as if it had not been."""
        self._timers.shift(by_ms)

    # Membership, by the classic protocol

    def join(self, request: JoinRequest, token: Token, *, now_ms: int, new_member_id: str) -> Work:
        step = self.step(now_ms)
        error = self._check_join(request, new_member_id)
        if error is not ErrorCode.none:
            step.reply(token, JoinReply(error=error, member_id=request.member_id))
            return step.work()
        group = self._group_to_join(request.group_id, step)
        group.join(request, token, step, new_member_id=new_member_id)
        self._drop_if_unused(group)
        return step.work()

    def sync(self, request: SyncRequest, token: Token, *, now_ms: int) -> Work:
        step = self.step(now_ms)
        group = self.groups.get(request.group_id)
        if group is None:
            error = ErrorCode.unknown_member_id if request.group_id else ErrorCode.invalid_group_id
            step.reply(token, SyncReply(error=error))
        else:
            group.sync(request, token, step)
        return step.work()

    def heartbeat(self, request: HeartbeatRequest, token: Token, *, now_ms: int) -> Work:
        step = self.step(now_ms)
        group = self.groups.get(request.group_id)
        if group is None:
            error = ErrorCode.unknown_member_id if request.group_id else ErrorCode.invalid_group_id
        else:
            error = group.heartbeat(request, step)
        step.reply(token, HeartbeatReply(error=error))
        return step.work()

    def leave(self, request: LeaveRequest, token: Token, *, now_ms: int) -> Work:
        step = self.step(now_ms)
        group = self.groups.get(request.group_id)
        if not request.group_id:
            reply = LeaveReply(error=ErrorCode.invalid_group_id)
        elif group is None:
            reply = LeaveReply(
                members=tuple((member, ErrorCode.unknown_member_id) for member in request.members)
            )
        else:
            reply = LeaveReply(members=group.leave(request, step))
            self._drop_if_unused(group)
        step.reply(token, reply)
        return step.work()

    # Offsets

    def commit(self, request: CommitRequest, token: Token, *, now_ms: int) -> Work:
        step = self.step(now_ms)
        if can_store(request.group_id):
            reply = offset_rules.commit(self.groups.get(request.group_id), request, step)
        else:
            reply = PartitionsReply(error=ErrorCode.invalid_group_id)
        step.reply(token, reply)
        return step.work()

    def commit_in_transaction(
        self, request: CommitRequest, producer: Producer, token: Token, *, now_ms: int
    ) -> Work:
        step = self.step(now_ms)
        if can_store(request.group_id):
            reply = offset_rules.stage(self.groups.get(request.group_id), request, step)
        else:
            reply = PartitionsReply(error=ErrorCode.invalid_group_id)
        step.reply(token, reply)
        return step.work(producer)

    def delete_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], token: Token, *, now_ms: int
    ) -> Work:
        step = self.step(now_ms)
        group = self.groups.get(group_id)
        step.reply(token, offset_rules.delete_offsets(self.offsets, group, partitions, step))
        return step.work()

    def check_fetch(self, group_id: str, member_id: str | None, epoch: int) -> ErrorCode:
        """Offsets of a group that does not exist are none, whoever asks."""
        group = self.groups.get(group_id)
        return ErrorCode.none if group is None else group.check_fetch(member_id, epoch)

    def fetch(
        self,
        group_id: str,
        partitions: Iterable[TopicPartition] | None,
        *,
        require_stable: bool = False,
    ) -> tuple[FetchedOffset, ...]:
        return offset_rules.fetch(
            self.offsets, group_id, partitions, self.topics, require_stable=require_stable
        )

    def forget_topics(self, topics: Iterable[str], token: Token, *, now_ms: int) -> Work:
        """These topics were deleted; a new topic of the same name must not inherit positions."""
        step = self.step(now_ms)
        for topic in topics:
            for group_id, partition in self.offsets.of_topic(topic):
                committed = self.offsets.get(group_id, topic, partition)
                if not offset_rules.is_of_the_present(committed, topic, step):
                    offset_rules.forget(group_id, topic, partition, step)
        step.reply(token, None)
        return step.work()

    # Groups

    def delete_groups(self, group_ids: Iterable[str], token: Token, *, now_ms: int) -> Work:
        step = self.step(now_ms)
        step.reply(token, {group_id: self._delete(group_id, step) for group_id in group_ids})
        return step.work()

    def list_groups(self) -> tuple[ListedGroup, ...]:
        return tuple(
            ListedGroup(
                group_id=group.group_id,
                protocol_type=group.protocol_name,
                state=group.state_name,
                kind=group.kind,
            )
            for group in self.groups.values()
        )

    def kind_of(self, group_id: str) -> str | None:
        group = self.groups.get(group_id)
        return None if group is None else group.kind

    def describe(self, group_id: str) -> DescribedGroup | None:
        group = self.groups.get(group_id)
        return None if group is None else group.described()

    def stored(self) -> tuple[dict[str, object], dict[tuple[str, str, int], CommittedOffset]]:
        """Everything durable: what a shard loaded from the same records would hold too."""
        groups = {name: group.stored for name, group in self.groups.items() if group.stored is not None}
        committed = {
            (group_id, topic, partition): offset
            for group_id in self.groups
            for topic, partition, offset in self.offsets.of_group(group_id)
        }
        return groups, committed

    # Inside

    def _check_join(self, request: JoinRequest, new_member_id: str) -> ErrorCode:
        if not request.group_id or not can_store(request.group_id):
            return ErrorCode.invalid_group_id
        names = (name for name, _ in request.protocols)
        if not can_store(request.instance_id or "", request.protocol_type, new_member_id, *names):
            return ErrorCode.invalid_request
        shortest_ms, longest_ms = self.settings.session_timeout_min_ms, self.settings.session_timeout_max_ms
        if not shortest_ms <= request.session_timeout_ms <= longest_ms:
            return ErrorCode.invalid_session_timeout
        if request.member_id != NO_MEMBER_ID and request.group_id not in self.groups:
            return ErrorCode.unknown_member_id
        return ErrorCode.none

    def _time_out(self, timer: Timer, step: Step) -> None:
        if timer == _EXPIRE:
            self._expire(step)
            return
        group = self.groups.get(timer.group_id)
        if group is not None:
            group.time_out(timer, step)
            self._drop_if_unused(group)

    def _expire(self, step: Step) -> None:
        step.schedule_in(_EXPIRE, self.settings.offsets_retention_check_interval_ms)
        for group in self.groups.values():
            nothing_left = offset_rules.expire(self.offsets, group, step)
            if nothing_left and group.is_idle:
                step.store_all(group.tombstones())

    def _delete(self, group_id: str, step: Step) -> ErrorCode:
        group = self.groups.get(group_id)
        if group is None:
            return ErrorCode.group_id_not_found
        if not group.is_empty:
            return ErrorCode.non_empty_group
        for topic, partition in self.offsets.places_of(group_id):
            offset_rules.forget(group_id, topic, partition, step)
        step.store_all(group.tombstones())
        return ErrorCode.none

    def _group_to_join(self, group_id: str, step: Step) -> Group:
        """An empty group of another kind gives way to a classic one."""
        group = self.groups.get(group_id)
        if group is None or (group.kind != Classic.kind and group.gives_way):
            if group is not None:
                step.store_all(group.tombstones())
            group = self.groups[group_id] = Classic(group_id)
        return group

    # Who is in the shard

    def drop(self, group: Group) -> None:
        group.dropped(self._timers)
        if self.groups.get(group.group_id) is group:
            del self.groups[group.group_id]
            if any(self.offsets.places_of(group.group_id)):
                # They outlive it: what is left is a group that has offsets and nothing else.
                self.groups[group.group_id] = Classic(group.group_id)

    def _drop_if_unused(self, group: Group) -> None:
        """A group that was never stored exists as long as somebody uses it."""
        if group.stored is None and group.is_idle and not self.offsets.has(group.group_id):
            self.drop(group)

    def _replay_classic(self, key: bytes, value: bytes | None) -> None:
        record = decode(key, value)
        assert isinstance(record, GroupRecord)
        group = self.groups.get(record.group)
        if record.value is None:
            if isinstance(group, Classic):
                self.drop(group)
            return
        if not isinstance(group, Classic):
            group = self.groups[record.group] = Classic(record.group)
        group.install(record.value)

    def _replay_offset(self, key: bytes, value: bytes | None) -> None:
        record = decode(key, value)
        assert isinstance(record, OffsetRecord)
        self.offsets.replay(record)
        if record.value is not None:
            # Who commits without being a member makes a group that has offsets and nothing else.
            self.groups.setdefault(record.group, Classic(record.group))
        elif record.group in self.groups:
            self._drop_if_unused(self.groups[record.group])


Replay = Callable[[GroupShard, bytes, bytes | None], None]


@cache
def _replay_of(number: int) -> Replay | None:
    """How a record with a key of this type is replayed. The other kinds are loaded with their first record."""
    if number in OFFSET_KEYS:
        return GroupShard._replay_offset
    if number in CLASSIC_KEYS:
        return GroupShard._replay_classic
    if number in CONSUMER_KEYS:
        from penstock.groups.consumer.replay import replay

        return replay
    if number in SHARE_KEYS:
        from penstock.groups.share.replay import replay as replay_share

        return replay_share
    if number in STREAMS_KEYS:
        from penstock.groups.streams.records import replay as replay_streams

        return replay_streams
    return None
