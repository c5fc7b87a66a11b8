"""All groups of one `__consumer_offsets` partition.

An operation decides: it returns the records to append and the replies to give. What is stored changes only in
`replay`, live and on loading alike. Who waits for what lives beside it, and may be lost with the shard.
"""

from collections.abc import Iterable
from typing import Final

from penstock.groups import offsets as offset_rules
from penstock.groups.classic import ClassicGroup
from penstock.groups.join import join
from penstock.groups.messages import (
    NO_MEMBER_ID,
    CommitRequest,
    DescribedGroup,
    DescribedMember,
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
from penstock.groups.presence import heartbeat, leave, session_timed_out
from penstock.groups.rebalance import expect_heartbeat, join_timed_out, prepare, sync_timed_out
from penstock.groups.records import CommittedOffset, GroupRecord, OffsetRecord, StoredGroup, can_store, decode
from penstock.groups.settings import GroupSettings
from penstock.groups.states import State
from penstock.groups.sync import sync
from penstock.groups.timers import Timers
from penstock.groups.work import Step, Timer, Token, Work
from penstock.protocol.errors import ErrorCode

_EXPIRE: Final = Timer("expire")


class GroupShard:
    __slots__ = ("_offsets", "_timers", "groups", "settings", "unknown_records")

    def __init__(self, settings: GroupSettings) -> None:
        self.settings = settings
        self.groups: dict[str, ClassicGroup] = {}
        #: Records of newer group protocols, passed over on replay.
        self.unknown_records = 0
        self._offsets = OffsetStore()
        self._timers: Timers[Timer] = Timers()

    def __repr__(self) -> str:
        return f"<GroupShard of {len(self.groups)} groups>"

    # Replay

    def replay(self, key: bytes, value: bytes | None) -> None:
        match decode(key, value):
            case OffsetRecord() as record:
                self._replay_offset(record)
            case GroupRecord() as record:
                self._replay_group(record)
            case None:
                self.unknown_records += 1

    def loaded(self, now_ms: int) -> Work:
        """To be called once after the log was replayed: from now on members are expected to be heard of."""
        step = self._step(now_ms)
        step.schedule_in(_EXPIRE, self.settings.offsets_retention_check_interval_ms)
        for group in self.groups.values():
            for member in group.members.values():
                expect_heartbeat(group, member, step)
            if len(group.members) > self.settings.size_max:
                prepare(group, step)
        return step.work()

    # Time

    def next_deadline_ms(self) -> int | None:
        return self._timers.next_deadline_ms()

    def tick(self, now_ms: int) -> Work:
        """What is due, up to the first decision that must be stored: call again while one is overdue."""
        step = self._step(now_ms)
        while not step.has_records and (timer := self._timers.pop_due(now_ms)) is not None:
            self._time_out(timer, step)
        return step.work()

    def clock_moved(self, by_ms: int) -> None:
        """The wall clock was set by so much: timeouts run on as if it had not been."""
        self._timers.shift(by_ms)

    # Membership

    def join(self, request: JoinRequest, token: Token, *, now_ms: int, new_member_id: str) -> Work:
        step = self._step(now_ms)
        error = self._check_join(request, new_member_id)
        if error is not ErrorCode.none:
            step.reply(token, JoinReply(error=error, member_id=request.member_id))
            return step.work()
        group = self.groups.setdefault(request.group_id, ClassicGroup(request.group_id))
        join(group, request, token, step, new_member_id=new_member_id)
        self._drop_if_unused(group)
        return step.work()

    def sync(self, request: SyncRequest, token: Token, *, now_ms: int) -> Work:
        step = self._step(now_ms)
        group = self.groups.get(request.group_id)
        if group is None:
            error = ErrorCode.unknown_member_id if request.group_id else ErrorCode.invalid_group_id
            step.reply(token, SyncReply(error=error))
        else:
            sync(group, request, token, step)
        return step.work()

    def heartbeat(self, request: HeartbeatRequest, token: Token, *, now_ms: int) -> Work:
        step = self._step(now_ms)
        group = self.groups.get(request.group_id)
        if group is None:
            error = ErrorCode.unknown_member_id if request.group_id else ErrorCode.invalid_group_id
        else:
            error = heartbeat(group, request, step)
        step.reply(token, HeartbeatReply(error=error))
        return step.work()

    def leave(self, request: LeaveRequest, token: Token, *, now_ms: int) -> Work:
        step = self._step(now_ms)
        group = self.groups.get(request.group_id)
        if not request.group_id:
            reply = LeaveReply(error=ErrorCode.invalid_group_id)
        elif group is None:
            reply = LeaveReply(
                members=tuple((member, ErrorCode.unknown_member_id) for member in request.members)
            )
        else:
            reply = LeaveReply(members=leave(group, request, step))
            self._drop_if_unused(group)
        step.reply(token, reply)
        return step.work()

    # Offsets

    def commit(self, request: CommitRequest, token: Token, *, now_ms: int) -> Work:
        step = self._step(now_ms)
        if can_store(request.group_id):
            reply = offset_rules.commit(self.groups.get(request.group_id), request, step)
        else:
            reply = PartitionsReply(error=ErrorCode.invalid_group_id)
        step.reply(token, reply)
        return step.work()

    def delete_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], token: Token, *, now_ms: int
    ) -> Work:
        step = self._step(now_ms)
        group = self.groups.get(group_id)
        step.reply(token, offset_rules.delete_offsets(self._offsets, group, partitions, step))
        return step.work()

    def fetch(self, group_id: str, partitions: Iterable[TopicPartition] | None) -> tuple[FetchedOffset, ...]:
        return offset_rules.fetch(self._offsets, group_id, partitions)

    def forget_topics(self, topics: Iterable[str], token: Token, *, now_ms: int) -> Work:
        """These topics were deleted; a new topic of the same name must not inherit positions."""
        step = self._step(now_ms)
        for topic in topics:
            for group_id, partition in self._offsets.of_topic(topic):
                offset_rules.forget(group_id, topic, partition, step)
        step.reply(token, None)
        return step.work()

    # Groups

    def delete_groups(self, group_ids: Iterable[str], token: Token, *, now_ms: int) -> Work:
        step = self._step(now_ms)
        step.reply(token, {group_id: self._delete(group_id, step) for group_id in group_ids})
        return step.work()

    def list_groups(self) -> tuple[ListedGroup, ...]:
        return tuple(
            ListedGroup(
                group_id=group.group_id, protocol_type=group.protocol_type or "", state=group.state.value
            )
            for group in self.groups.values()
        )

    def describe(self, group_id: str) -> DescribedGroup | None:
        group = self.groups.get(group_id)
        if group is None:
            return None
        protocol = group.protocol if group.state is State.STABLE else None
        return DescribedGroup(
            group_id=group_id,
            state=group.state.value,
            protocol_type=group.protocol_type or "",
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
                for member in group.members.values()
            ),
        )

    def stored(self) -> tuple[dict[str, StoredGroup], dict[tuple[str, str, int], CommittedOffset]]:
        """Everything durable: what a shard loaded from the same records would hold too."""
        groups = {name: group.stored for name, group in self.groups.items() if group.stored is not None}
        committed = {
            (group_id, topic, partition): offset
            for group_id in self.groups
            for topic, partition, offset in self._offsets.of_group(group_id)
        }
        return groups, committed

    # Inside

    def _step(self, now_ms: int) -> Step:
        return Step(now_ms=now_ms, settings=self.settings, timers=self._timers)

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
        group = self.groups[timer.group_id]
        match timer.kind:
            case "session":
                session_timed_out(group, timer.member_id, step)
                self._drop_if_unused(group)
            case "join":
                join_timed_out(group, step)
            case "sync":
                sync_timed_out(group, step)

    def _expire(self, step: Step) -> None:
        step.schedule_in(_EXPIRE, self.settings.offsets_retention_check_interval_ms)
        for group in self.groups.values():
            nothing_left = offset_rules.expire(self._offsets, group, step)
            if nothing_left and group.state is State.EMPTY and not group.pending:
                step.store_group(GroupRecord(group=group.group_id, value=None))

    def _delete(self, group_id: str, step: Step) -> ErrorCode:
        group = self.groups.get(group_id)
        if group is None:
            return ErrorCode.group_id_not_found
        if group.state is not State.EMPTY:
            return ErrorCode.non_empty_group
        for topic, partition, _ in self._offsets.of_group(group_id):
            offset_rules.forget(group_id, topic, partition, step)
        step.store_group(GroupRecord(group=group_id, value=None))
        return ErrorCode.none

    def _replay_group(self, record: GroupRecord) -> None:
        if record.value is None:
            group = self.groups.get(record.group)
            if group is not None:
                self._drop(group)
        else:
            self.groups.setdefault(record.group, ClassicGroup(record.group)).install(record.value)

    def _replay_offset(self, record: OffsetRecord) -> None:
        self._offsets.replay(record)
        if record.value is not None:
            # Who commits without being a member makes a group that has offsets and nothing else.
            self.groups.setdefault(record.group, ClassicGroup(record.group))
        elif record.group in self.groups:
            self._drop_if_unused(self.groups[record.group])

    def _drop_if_unused(self, group: ClassicGroup) -> None:
        """A group that was never stored exists as long as somebody uses it."""
        used = group.members or group.pending or group.state is not State.EMPTY
        if group.stored is None and not used and not self._offsets.has(group.group_id):
            self._drop(group)

    def _drop(self, group: ClassicGroup) -> None:
        group.move(State.DEAD)
        for member_id in (*group.members, *group.pending):
            self._timers.cancel(Timer("session", group.group_id, member_id))
        del self.groups[group.group_id]
