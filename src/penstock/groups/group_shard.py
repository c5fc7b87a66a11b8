"""All groups of one `__consumer_offsets` partition.

An operation decides: it returns the records to append and the replies to send. Only `replay` changes the stored state,
both live and while loading. Requests that wait for a reply are kept beside the stored state and may be lost with the
shard.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from pkgutil import resolve_name
from typing import Final, TypeVar

from penstock.groups import offsets as offset_rules
from penstock.groups.classic.classic_group import ClassicGroup
from penstock.groups.coordinator_records import (
    CLASSIC_KEY_TYPES,
    CONSUMER_KEY_TYPES,
    OFFSET_KEY_TYPES,
    SHARE_KEY_TYPES,
    STREAMS_KEY_TYPES,
    CommittedOffset,
    GroupMetadataRecord,
    OffsetCommitRecord,
    decode_record,
)
from penstock.groups.group import (
    NO_MEMBER_ID,
    CommitRequest,
    DescribedGroup,
    FetchedOffset,
    Group,
    GroupResult,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    ListedGroup,
    Operation,
    PartitionsReply,
    ReplyToken,
    SyncReply,
    SyncRequest,
    TransactionProducer,
)
from penstock.groups.group_config import GroupConfig, GroupCoordinatorConfig
from penstock.groups.offsets import OffsetStore, TopicPartition
from penstock.groups.timers import TimerKey, Timers
from penstock.groups.topics import NO_TOPICS, Topics
from penstock.protocol.errors import ErrorCode
from penstock.protocol.stored_records import can_store, key_type

Result = TypeVar("Result")

_OFFSET_EXPIRY_TIMER: Final = TimerKey("expire")


class GroupCoordinatorShard:
    """Operations of the other kinds are functions in the packages of those kinds; the shard is their argument."""

    __slots__ = (
        "_config_of",
        "_timers",
        "groups",
        "may_describe",
        "offsets",
        "settings",
        "topics",
        "unknown_records",
    )

    def __init__(
        self,
        settings: GroupCoordinatorConfig,
        topics: Topics = NO_TOPICS,
        config_of: Callable[[str], GroupConfig] | None = None,
    ) -> None:
        """`config_of` returns a group's current settings; without it every group has the node's settings."""
        self.settings = settings
        self.topics = topics
        self._config_of = config_of or settings.config_of
        self.groups: dict[str, Group] = {}
        #: Records of unknown kinds, which replay skips.
        self.unknown_records = 0
        self.offsets = OffsetStore()
        self._timers: Timers[TimerKey] = Timers()
        #: During an operation: whether its client may know a topic. None if no client has sent it.
        self.may_describe: Callable[[str], bool] | None = None

    def __repr__(self) -> str:
        return f"<GroupShard of {len(self.groups)} groups>"

    def operation(self, now_ms: int) -> Operation:
        """Begin an operation."""
        return Operation(
            now_ms=now_ms,
            settings=self.settings,
            config_of=self._config_of,
            timers=self._timers,
            topics=self.topics,
            groups=self.groups,
            may_describe=self.may_describe,
        )

    def for_client(self, may_describe: Callable[[str], bool], operate: Callable[[], Result]) -> Result:
        """Carry out an operation for a client that may know only some topics."""
        self.may_describe = may_describe
        try:
            return operate()
        finally:
            self.may_describe = None

    # Replay

    def replay(self, key: bytes, value: bytes | None) -> None:
        replay = _replay_function(key_type(key))
        if replay is None:
            self.unknown_records += 1
        else:
            replay(self, key, value)

    @property
    def transactional(self) -> "GroupCoordinatorShard":
        """Producers commit offsets in transactions, so the log of this shard has records of transactions."""
        return self

    def replay_pending(self, producer_id: int, key: bytes, value: bytes | None) -> None:
        """Replay a record of a transaction, which takes effect when the transaction commits."""
        record = decode_record(key, value)
        if not isinstance(record, OffsetCommitRecord):
            self.unknown_records += 1
        elif record.value is None:
            self._replay_offset(key, value)
        else:
            self.offsets.replay_pending(producer_id, record)
            self.groups.setdefault(record.group, ClassicGroup(record.group))

    def transaction_ended(self, producer_id: int, committed: bool) -> None:
        for group_id in self.offsets.end_transaction(producer_id, committed):
            if group_id in self.groups:
                self._drop_if_unused(self.groups[group_id])

    def loaded(self, now_ms: int) -> GroupResult:
        """Start the timers. Call once after the log was replayed."""
        operation = self.operation(now_ms)
        operation.schedule_in(_OFFSET_EXPIRY_TIMER, self.settings.offsets_retention_check_interval_ms)
        for group in self.groups.values():
            group.loaded(operation)
        return operation.work()

    # Time

    def next_deadline_ms(self) -> int | None:
        return self._timers.next_deadline_ms()

    def tick(self, now_ms: int) -> GroupResult:
        """Process due timers up to the first decision with records. Call again while a deadline is overdue."""
        operation = self.operation(now_ms)
        while not operation.has_records and (timer := self._timers.pop_due(now_ms)) is not None:
            self._time_out(timer, operation)
        return operation.work()

    def clock_moved(self, by_ms: int) -> None:
        """Keep all timeouts unchanged after the wall clock was set forward by `by_ms`."""
        self._timers.shift(by_ms)

    # Membership, by the classic protocol

    def join(
        self, request: JoinRequest, token: ReplyToken, *, now_ms: int, new_member_id: str
    ) -> GroupResult:
        operation = self.operation(now_ms)
        error = self._check_join(request, new_member_id)
        if error is not ErrorCode.none:
            operation.reply(token, JoinReply(error=error, member_id=request.member_id))
            return operation.work()
        group = self._group_to_join(request.group_id, operation)
        group.join(request, token, operation, new_member_id=new_member_id)
        self._drop_if_unused(group)
        return operation.work()

    def sync(self, request: SyncRequest, token: ReplyToken, *, now_ms: int) -> GroupResult:
        operation = self.operation(now_ms)
        group = self.groups.get(request.group_id)
        if group is None:
            error = ErrorCode.unknown_member_id if request.group_id else ErrorCode.invalid_group_id
            operation.reply(token, SyncReply(error=error))
        else:
            group.sync(request, token, operation)
        return operation.work()

    def heartbeat(self, request: HeartbeatRequest, token: ReplyToken, *, now_ms: int) -> GroupResult:
        operation = self.operation(now_ms)
        group = self.groups.get(request.group_id)
        if group is None:
            error = ErrorCode.unknown_member_id if request.group_id else ErrorCode.invalid_group_id
        else:
            error = group.heartbeat(request, operation)
        operation.reply(token, HeartbeatReply(error=error))
        return operation.work()

    def leave(self, request: LeaveRequest, token: ReplyToken, *, now_ms: int) -> GroupResult:
        operation = self.operation(now_ms)
        group = self.groups.get(request.group_id)
        if not request.group_id:
            reply = LeaveReply(error=ErrorCode.invalid_group_id)
        elif group is None:
            reply = LeaveReply(
                members=tuple((member, ErrorCode.unknown_member_id) for member in request.members)
            )
        else:
            reply = LeaveReply(members=group.leave(request, operation))
            self._drop_if_unused(group)
        operation.reply(token, reply)
        return operation.work()

    # Offsets

    def commit(self, request: CommitRequest, token: ReplyToken, *, now_ms: int) -> GroupResult:
        operation = self.operation(now_ms)
        if can_store(request.group_id):
            reply = offset_rules.commit_offsets(self.groups.get(request.group_id), request, operation)
        else:
            reply = PartitionsReply(error=ErrorCode.invalid_group_id)
        operation.reply(token, reply)
        return operation.work()

    def commit_in_transaction(
        self, request: CommitRequest, producer: TransactionProducer, token: ReplyToken, *, now_ms: int
    ) -> GroupResult:
        operation = self.operation(now_ms)
        if can_store(request.group_id):
            reply = offset_rules.commit_transactional_offsets(
                self.groups.get(request.group_id), request, operation
            )
        else:
            reply = PartitionsReply(error=ErrorCode.invalid_group_id)
        operation.reply(token, reply)
        return operation.work(producer)

    def delete_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], token: ReplyToken, *, now_ms: int
    ) -> GroupResult:
        operation = self.operation(now_ms)
        group = self.groups.get(group_id)
        operation.reply(token, offset_rules.delete_offsets(self.offsets, group, partitions, operation))
        return operation.work()

    def check_fetch(self, group_id: str, member_id: str | None, epoch: int) -> ErrorCode:
        """Fetching offsets of a group that does not exist is no error: it has none."""
        group = self.groups.get(group_id)
        return ErrorCode.none if group is None else group.check_fetch(member_id, epoch)

    def fetch(
        self,
        group_id: str,
        partitions: Iterable[TopicPartition] | None,
        *,
        require_stable: bool = False,
    ) -> tuple[FetchedOffset, ...]:
        return offset_rules.fetch_offsets(
            self.offsets, group_id, partitions, self.topics, require_stable=require_stable
        )

    def forget_topics(self, topics: Iterable[str], token: ReplyToken, *, now_ms: int) -> GroupResult:
        """Delete the offsets of deleted topics; a new topic of the same name must not inherit them."""
        operation = self.operation(now_ms)
        for topic in topics:
            for group_id, partition in self.offsets.of_topic(topic):
                committed = self.offsets.get(group_id, topic, partition)
                if not offset_rules.belongs_to_current_topic(committed, topic, operation):
                    offset_rules.delete_offset(group_id, topic, partition, operation)
        operation.reply(token, None)
        return operation.work()

    # Groups

    def delete_groups(self, group_ids: Iterable[str], token: ReplyToken, *, now_ms: int) -> GroupResult:
        operation = self.operation(now_ms)
        operation.reply(token, {group_id: self._delete(group_id, operation) for group_id in group_ids})
        return operation.work()

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
        """The durable state: a shard that is loaded from the same records has the same."""
        groups = {name: group.stored for name, group in self.groups.items() if group.stored is not None}
        committed = {
            (group_id, topic, partition): offset
            for group_id in self.groups
            for topic, partition, offset in self.offsets.of_group(group_id)
        }
        return groups, committed

    # Internals

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

    def _time_out(self, timer: TimerKey, operation: Operation) -> None:
        if timer == _OFFSET_EXPIRY_TIMER:
            self._expire(operation)
            return
        group = self.groups.get(timer.group_id)
        if group is not None:
            group.time_out(timer, operation)
            self._drop_if_unused(group)

    def _expire(self, operation: Operation) -> None:
        operation.schedule_in(_OFFSET_EXPIRY_TIMER, self.settings.offsets_retention_check_interval_ms)
        for group in self.groups.values():
            nothing_left = offset_rules.expire_offsets(self.offsets, group, operation)
            if nothing_left and group.is_idle:
                operation.store_all(group.tombstones())

    def _delete(self, group_id: str, operation: Operation) -> ErrorCode:
        group = self.groups.get(group_id)
        if group is None:
            return ErrorCode.group_id_not_found
        if not group.is_empty:
            return ErrorCode.non_empty_group
        for topic, partition in self.offsets.places_of(group_id):
            offset_rules.delete_offset(group_id, topic, partition, operation)
        operation.store_all(group.tombstones())
        return ErrorCode.none

    def _group_to_join(self, group_id: str, operation: Operation) -> Group:
        """A classic group replaces an empty group of another kind."""
        group = self.groups.get(group_id)
        if group is None or (group.kind != ClassicGroup.kind and group.can_be_replaced):
            if group is not None:
                operation.store_all(group.tombstones())
            group = self.groups[group_id] = ClassicGroup(group_id)
        return group

    # The groups in the shard

    def drop(self, group: Group) -> None:
        group.removed(self._timers)
        if self.groups.get(group.group_id) is group:
            del self.groups[group.group_id]
            if any(self.offsets.places_of(group.group_id)):
                # The offsets stay, in a group that has only offsets.
                self.groups[group.group_id] = ClassicGroup(group.group_id)

    def _drop_if_unused(self, group: Group) -> None:
        """Drop a group that was never stored as soon as no client uses it."""
        if group.stored is None and group.is_idle and not self.offsets.has(group.group_id):
            self.drop(group)

    def _replay_classic(self, key: bytes, value: bytes | None) -> None:
        record = decode_record(key, value)
        assert isinstance(record, GroupMetadataRecord)
        group = self.groups.get(record.group)
        if record.value is None:
            if isinstance(group, ClassicGroup):
                self.drop(group)
            return
        if not isinstance(group, ClassicGroup):
            group = self.groups[record.group] = ClassicGroup(record.group)
        group.install(record.value)

    def _replay_offset(self, key: bytes, value: bytes | None) -> None:
        record = decode_record(key, value)
        assert isinstance(record, OffsetCommitRecord)
        self.offsets.replay(record)
        if record.value is not None:
            # A commit by a client that is not a member creates a group that has only offsets.
            self.groups.setdefault(record.group, ClassicGroup(record.group))
        elif record.group in self.groups:
            self._drop_if_unused(self.groups[record.group])


ReplayFunction = Callable[[GroupCoordinatorShard, bytes, bytes | None], None]


_MODERN_GROUP_CLASSES: Final = {
    CONSUMER_KEY_TYPES: "penstock.groups.consumer.consumer_group:ConsumerGroup",
    SHARE_KEY_TYPES: "penstock.groups.share.share_group:ShareGroup",
    STREAMS_KEY_TYPES: "penstock.groups.streams.streams_group:StreamsGroup",
}


@cache
def _replay_function(number: int) -> ReplayFunction | None:
    """The replay function for this key type.

    The modules of the other kinds are loaded at their first record, to keep the start fast.
    """
    if number in OFFSET_KEY_TYPES:
        return GroupCoordinatorShard._replay_offset
    if number in CLASSIC_KEY_TYPES:
        return GroupCoordinatorShard._replay_classic
    for key_types, path in _MODERN_GROUP_CLASSES.items():
        if number in key_types:
            replay = resolve_name("penstock.groups.modern_group:replay_modern_group")
            return partial(replay, resolve_name(path))
    return None
