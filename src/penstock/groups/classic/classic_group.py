"""A classic group as one kind of group in the shard, and the rules of its protocol.

A rebalance waits until the members have joined, then starts the next generation and sends it to them. JoinGroup
decides which members are admitted, under which id, and whether a join starts a rebalance. In SyncGroup the leader
sends the assignment and every member receives its part. Heartbeat, LeaveGroup and session timeouts determine which
members are alive.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from penstock.groups.classic.classic_group_data import ClassicGroupData, ClassicGroupMember, ClassicGroupState
from penstock.groups.coordinator_records import (
    CommittedOffset,
    GroupMetadataRecord,
    encode_group_metadata,
)
from penstock.groups.group import (
    NO_MEMBER_ID,
    CommitRequest,
    DescribedGroup,
    DescribedMember,
    HeartbeatRequest,
    JoinedMember,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LeaveResults,
    LeavingMember,
    Operation,
    ReplyToken,
    SyncReply,
    SyncRequest,
)
from penstock.groups.timers import TimerKey, Timers
from penstock.groups.topics import Topics
from penstock.protocol.errors import ErrorCode
from penstock.protocol.stored_records import KeyValue


def prepare_or_complete_rebalance(group: ClassicGroupData, operation: Operation) -> None:
    """Start a rebalance after a membership change, or complete the one in progress if all members have joined."""
    if group.can_rebalance:
        prepare_rebalance(group, operation)
    else:
        try_complete_join(group, operation)


def prepare_rebalance(group: ClassicGroupData, operation: Operation) -> None:
    if group.state is ClassicGroupState.COMPLETING_REBALANCE:
        _reply_rebalance_to_syncing(group, operation)
    group.unsynced.clear()
    operation.timers.cancel(TimerKey("sync", group.group_id))
    was_empty = group.state is ClassicGroupState.EMPTY
    group.move(ClassicGroupState.PREPARING_REBALANCE)
    if was_empty:
        _begin_initial_delay(group, operation)
    elif group.all_joined:
        complete_join(group, operation)
    else:
        operation.schedule_in(TimerKey("join", group.group_id), group.rebalance_timeout_ms)


def try_complete_join(group: ClassicGroupData, operation: Operation) -> None:
    """Complete the rebalance if all members have joined. The first rebalance of a group always waits for its delay."""
    if group.state is ClassicGroupState.PREPARING_REBALANCE and not group.is_initial and group.all_joined:
        complete_join(group, operation)


def join_timed_out(group: ClassicGroupData, operation: Operation) -> None:
    if group.is_initial and group.new_member_arrived and group.initial_remaining_ms > 0:
        _extend_initial_delay(group, operation)
    else:
        complete_join(group, operation)


def complete_join(group: ClassicGroupData, operation: Operation) -> None:
    """Start the next generation with the members that have joined. Static members stay until their session ends."""
    assert group.state is ClassicGroupState.PREPARING_REBALANCE
    operation.timers.cancel(TimerKey("join", group.group_id))
    for member in [m for m in group.members.values() if not m.is_joining and not m.is_static]:
        remove_member(group, member.member_id, operation)
    if not group.members:
        operation.store_group(group.emptied(operation.now_ms))
    elif not group.elect_joined_leader():
        operation.schedule_in(TimerKey("join", group.group_id), group.rebalance_timeout_ms)
    else:
        _begin_generation(group, operation)


def sync_timed_out(group: ClassicGroupData, operation: Operation) -> None:
    """Remove the members that did not send SyncGroup, and start a rebalance."""
    if not group.unsynced:
        return
    for member_id in sorted(group.unsynced):
        remove_member(group, member_id, operation)
    prepare_rebalance(group, operation)


def mark_synced(group: ClassicGroupData, member_id: str, operation: Operation) -> None:
    group.unsynced.discard(member_id)
    if not group.unsynced:
        operation.timers.cancel(TimerKey("sync", group.group_id))


def remove_member(
    group: ClassicGroupData,
    member_id: str,
    operation: Operation,
    error: ErrorCode = ErrorCode.unknown_member_id,
) -> ClassicGroupMember | None:
    """Remove a member, or an id that no member has joined with yet; a waiting request of it gets the error."""
    operation.timers.cancel(TimerKey("session", group.group_id, member_id))
    member = group.members.get(member_id)
    if member is not None:
        reply_to_waiting(group, member, operation, error, member_id=NO_MEMBER_ID)
    return group.remove(member_id)


def reply_to_waiting(
    group: ClassicGroupData,
    member: ClassicGroupMember,
    operation: Operation,
    error: ErrorCode,
    *,
    member_id: str,
) -> None:
    if (join_token := group.take_join(member)) is not None:
        operation.reply(join_token, JoinReply(error=error, member_id=member_id))
    if member.sync_token is not None:
        operation.reply(member.sync_token, SyncReply(error=error))
        member.sync_token = None


def schedule_session_timeout(
    group: ClassicGroupData, member: ClassicGroupMember, operation: Operation
) -> None:
    operation.schedule_in(TimerKey("session", group.group_id, member.member_id), member.session_timeout_ms)


def joined_reply(group: ClassicGroupData, member_id: str) -> JoinReply:
    """The current generation as a JoinGroup reply: only the leader gets the list of members."""
    assert group.leader is not None
    return JoinReply(
        generation=group.generation,
        protocol_type=group.protocol_type,
        protocol=group.protocol,
        leader=group.leader,
        member_id=member_id,
        members=joined_members(group) if group.leader == member_id else (),
    )


def joined_members(group: ClassicGroupData) -> tuple[JoinedMember, ...]:
    assert group.protocol is not None
    return tuple(
        JoinedMember(
            member_id=member.member_id,
            instance_id=member.instance_id,
            metadata=member.metadata(group.protocol),
        )
        for member in group.members.values()
    )


def _begin_generation(group: ClassicGroupData, operation: Operation) -> None:
    group.begin_generation()
    for member in group.members.values():
        if (token := group.take_join(member)) is not None:
            operation.reply(token, joined_reply(group, member.member_id))
        member.is_new = False
        schedule_session_timeout(group, member, operation)
    operation.schedule_in(TimerKey("sync", group.group_id), group.rebalance_timeout_ms)


def _begin_initial_delay(group: ClassicGroupData, operation: Operation) -> None:
    delay_ms = operation.settings.initial_rebalance_delay_ms
    group.is_initial = True
    group.new_member_arrived = False
    group.initial_remaining_ms = max(group.rebalance_timeout_ms - delay_ms, 0)
    operation.schedule_in(TimerKey("join", group.group_id), delay_ms)


def _extend_initial_delay(group: ClassicGroupData, operation: Operation) -> None:
    delay_ms = min(operation.settings.initial_rebalance_delay_ms, group.initial_remaining_ms)
    group.new_member_arrived = False
    group.initial_remaining_ms -= delay_ms
    operation.schedule_in(TimerKey("join", group.group_id), delay_ms)


def _reply_rebalance_to_syncing(group: ClassicGroupData, operation: Operation) -> None:
    """The assignment that these members wait for is void: they must join again."""
    for member in group.members.values():
        member.assignment = b""
        if member.sync_token is not None:
            operation.reply(member.sync_token, SyncReply(error=ErrorCode.rebalance_in_progress))
            member.sync_token = None
            schedule_session_timeout(group, member, operation)


def handle_heartbeat(group: ClassicGroupData, request: HeartbeatRequest, operation: Operation) -> ErrorCode:
    error = group.check_member(request.member_id, request.instance_id)
    if error is not ErrorCode.none:
        return error
    if request.generation != group.generation:
        return ErrorCode.illegal_generation
    schedule_session_timeout(group, group.members[request.member_id], operation)
    return (
        ErrorCode.rebalance_in_progress
        if group.state is ClassicGroupState.PREPARING_REBALANCE
        else ErrorCode.none
    )


def handle_leave(
    group: ClassicGroupData, request: LeaveRequest, operation: Operation
) -> tuple[tuple[LeavingMember, ErrorCode], ...]:
    size_before = len(group.members)
    results = tuple((member, _remove_leaving(group, member, operation)) for member in request.members)
    if len(group.members) < size_before:
        prepare_or_complete_rebalance(group, operation)
    else:
        try_complete_join(group, operation)
    return results


def session_timed_out(group: ClassicGroupData, member_id: str, operation: Operation) -> None:
    member = group.members.get(member_id)
    if member is not None and member.needs_no_heartbeat:
        return
    remove_member(group, member_id, operation)
    if member is not None:
        prepare_or_complete_rebalance(group, operation)
    else:
        try_complete_join(group, operation)


def _remove_leaving(group: ClassicGroupData, leaving: LeavingMember, operation: Operation) -> ErrorCode:
    member_id = leaving.member_id
    if member_id == NO_MEMBER_ID:
        # An operator may remove a static member without knowing its id.
        member_id = group.static_id(leaving.instance_id) or NO_MEMBER_ID
    if member_id not in group.pending:
        error = group.check_member(member_id, leaving.instance_id)
        if error is not ErrorCode.none:
            return error
    remove_member(group, member_id, operation)
    return ErrorCode.none


def handle_join(
    group: ClassicGroupData,
    request: JoinRequest,
    token: ReplyToken,
    operation: Operation,
    *,
    new_member_id: str,
) -> None:
    if not _has_room(group, request, operation.settings.size_max):
        _reject_group_full(group, request, token, operation)
    elif not group.supports(request.protocol_type, request.protocols):
        _reject_join(request, token, operation, ErrorCode.inconsistent_group_protocol)
    elif request.member_id != NO_MEMBER_ID:
        _join_known(group, request, token, operation)
    elif request.instance_id is None:
        _join_new_dynamic(group, request, token, operation, new_member_id)
    elif (old_id := group.static_id(request.instance_id)) is None:
        _add_member(group, request, token, operation, new_member_id)
    else:
        _join_returning_static(group, request, token, operation, old_id, new_member_id)


def _has_room(group: ClassicGroupData, request: JoinRequest, size_max: int) -> bool:
    known = group.members.get(request.member_id or group.static_id(request.instance_id) or NO_MEMBER_ID)
    match group.state:
        case ClassicGroupState.PREPARING_REBALANCE:
            # Only members that have rejoined count, so that a group over its limit loses the members that come last.
            return (known is not None and known.is_joining) or group.joining_count < size_max
        case ClassicGroupState.COMPLETING_REBALANCE | ClassicGroupState.STABLE:
            return known is not None or len(group.members) < size_max
        case _:
            return True


def _reject_group_full(
    group: ClassicGroupData, request: JoinRequest, token: ReplyToken, operation: Operation
) -> None:
    operation.reply(token, JoinReply(error=ErrorCode.group_max_size_reached))
    if request.member_id != NO_MEMBER_ID:
        remove_member(group, request.member_id, operation)
        try_complete_join(group, operation)


def _reject_join(request: JoinRequest, token: ReplyToken, operation: Operation, error: ErrorCode) -> None:
    operation.reply(token, JoinReply(error=error, member_id=request.member_id))


def _join_new_dynamic(
    group: ClassicGroupData, request: JoinRequest, token: ReplyToken, operation: Operation, new_member_id: str
) -> None:
    if not request.member_id_required:
        _add_member(group, request, token, operation, new_member_id)
        return
    if len(group.pending) >= operation.settings.size_max:
        _reject_join(request, token, operation, ErrorCode.group_max_size_reached)
        return
    # The second round proves that the client received the id: a lost reply leaves no member behind.
    group.pending.add(new_member_id)
    operation.schedule_in(TimerKey("session", group.group_id, new_member_id), request.session_timeout_ms)
    operation.reply(token, JoinReply(error=ErrorCode.member_id_required, member_id=new_member_id))


def _join_known(
    group: ClassicGroupData, request: JoinRequest, token: ReplyToken, operation: Operation
) -> None:
    if request.member_id in group.pending and request.instance_id is None:
        _add_member(group, request, token, operation, request.member_id)
        return
    error = group.check_member(request.member_id, request.instance_id)
    if error is not ErrorCode.none:
        _reject_join(request, token, operation, error)
        return
    member = group.members[request.member_id]
    if _must_rebalance(group, member, request):
        _rejoin(group, member, request, token, operation)
        prepare_or_complete_rebalance(group, operation)
    else:
        operation.reply(token, joined_reply(group, member.member_id))


def _must_rebalance(group: ClassicGroupData, member: ClassicGroupMember, request: JoinRequest) -> bool:
    if group.state is ClassicGroupState.PREPARING_REBALANCE or member.protocols != request.protocols:
        return True
    # The leader rejoins with unchanged protocols when the topics have changed.
    return group.state is ClassicGroupState.STABLE and group.leader == member.member_id


def _add_member(
    group: ClassicGroupData, request: JoinRequest, token: ReplyToken, operation: Operation, member_id: str
) -> None:
    member = ClassicGroupMember.joining(request, member_id)
    group.new_member_arrived = group.is_initial
    group.add(member, request.protocol_type)
    group.park_join(member, token)
    timer = TimerKey("session", group.group_id, member_id)
    operation.schedule_in(timer, operation.settings.new_member_join_timeout_ms)
    prepare_or_complete_rebalance(group, operation)


def _rejoin(
    group: ClassicGroupData,
    member: ClassicGroupMember,
    request: JoinRequest,
    token: ReplyToken,
    operation: Operation,
) -> None:
    """A member has one request in flight, so its client has abandoned an older one that still waits."""
    reply_to_waiting(group, member, operation, ErrorCode.rebalance_in_progress, member_id=member.member_id)
    group.update(member, request)
    group.park_join(member, token)


def _join_returning_static(
    group: ClassicGroupData,
    request: JoinRequest,
    token: ReplyToken,
    operation: Operation,
    old_id: str,
    new_id: str,
) -> None:
    """Give the instance its new member id. Requests with the old id are fenced, whatever the group's state."""
    old_leader = group.leader
    reply_to_waiting(group, group.members[old_id], operation, ErrorCode.fenced_instance_id, member_id=old_id)
    operation.timers.cancel(TimerKey("session", group.group_id, old_id))
    member = group.replace_static(old_id, new_id)
    group.update(member, request)
    schedule_session_timeout(group, member, operation)
    if group.state is ClassicGroupState.STABLE and group.choose_protocol() == group.protocol:
        _keep_assignment(group, member, request, token, operation, old_leader or "")
        return
    if (renamed := group.renamed(old_id, new_id)) is not None:
        # If the shard is lost during this rebalance, the new id must not be the fenced one.
        operation.store_group(renamed)
    group.park_join(member, token)
    if group.state is ClassicGroupState.PREPARING_REBALANCE:
        try_complete_join(group, operation)
    else:
        # The leader may be computing an assignment for the old id right now, so all members must join again.
        prepare_rebalance(group, operation)


def _keep_assignment(
    group: ClassicGroupData,
    member: ClassicGroupMember,
    request: JoinRequest,
    token: ReplyToken,
    operation: Operation,
    old_leader: str,
) -> None:
    """Give the new id the assignment of the old one without a rebalance; only that change is stored."""
    assignments = {each.member_id: each.assignment for each in group.members.values()}
    operation.store_group(group.assigned(assignments, operation.now_ms))
    reply = joined_reply(group, member.member_id)
    is_leader = group.leader == member.member_id
    if not request.can_skip_assignment:
        # An older client computes a new assignment if the reply names it as the leader.
        reply = replace(reply, leader=old_leader, members=())
    elif is_leader:
        reply = replace(reply, skip_assignment=True, members=joined_members(group))
    operation.reply(token, reply)


def handle_sync(
    group: ClassicGroupData, request: SyncRequest, token: ReplyToken, operation: Operation
) -> None:
    error = _check_sync(group, request)
    if error is not ErrorCode.none:
        operation.reply(token, SyncReply(error=error))
    elif group.state is ClassicGroupState.COMPLETING_REBALANCE:
        _await_assignment(group, request, token, operation)
    else:
        assert group.state is ClassicGroupState.STABLE
        member = group.members[request.member_id]
        mark_synced(group, member.member_id, operation)
        schedule_session_timeout(group, member, operation)
        operation.reply(token, _sync_reply(group, member.assignment))


def _check_sync(group: ClassicGroupData, request: SyncRequest) -> ErrorCode:
    if group.state is ClassicGroupState.EMPTY:
        return ErrorCode.unknown_member_id
    error = group.check_member(request.member_id, request.instance_id)
    if error is not ErrorCode.none:
        return error
    if request.generation != group.generation:
        return ErrorCode.illegal_generation
    if _is_other_protocol(request.protocol_type, group.protocol_type) or _is_other_protocol(
        request.protocol, group.protocol
    ):
        return ErrorCode.inconsistent_group_protocol
    return (
        ErrorCode.rebalance_in_progress
        if group.state is ClassicGroupState.PREPARING_REBALANCE
        else ErrorCode.none
    )


def _is_other_protocol(named: str | None, current: str | None) -> bool:
    """Older clients send no protocol."""
    return named is not None and current is not None and named != current


def _await_assignment(
    group: ClassicGroupData, request: SyncRequest, token: ReplyToken, operation: Operation
) -> None:
    member = group.members[request.member_id]
    if member.sync_token is not None:
        operation.reply(member.sync_token, SyncReply(error=ErrorCode.rebalance_in_progress))
    member.sync_token = token
    mark_synced(group, member.member_id, operation)
    if group.leader == member.member_id:
        _accept_assignment(group, dict(request.assignments), operation)


def _accept_assignment(group: ClassicGroupData, assignments: dict[str, bytes], operation: Operation) -> None:
    operation.store_group(group.assigned(assignments, operation.now_ms))
    for member in group.members.values():
        if member.sync_token is not None:
            operation.reply(member.sync_token, _sync_reply(group, assignments.get(member.member_id, b"")))
            member.sync_token = None
            schedule_session_timeout(group, member, operation)


def _sync_reply(group: ClassicGroupData, assignment: bytes) -> SyncReply:
    return SyncReply(protocol_type=group.protocol_type, protocol=group.protocol, assignment=assignment)


class ClassicGroup(ClassicGroupData):
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
        return self.state is ClassicGroupState.EMPTY

    @property
    def is_idle(self) -> bool:
        return self.is_empty and not self.members and not self.pending

    @property
    def can_be_replaced(self) -> bool:
        return self.is_idle

    # The classic protocol

    def join(
        self, request: JoinRequest, token: ReplyToken, operation: Operation, *, new_member_id: str
    ) -> None:
        handle_join(self, request, token, operation, new_member_id=new_member_id)

    def sync(self, request: SyncRequest, token: ReplyToken, operation: Operation) -> None:
        handle_sync(self, request, token, operation)

    def heartbeat(self, request: HeartbeatRequest, operation: Operation) -> ErrorCode:
        return handle_heartbeat(self, request, operation)

    def leave(self, request: LeaveRequest, operation: Operation) -> LeaveResults:
        return handle_leave(self, request, operation)

    def described(self) -> DescribedGroup:
        protocol = self.protocol if self.state is ClassicGroupState.STABLE else None
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
            # Older transactional producers do not send the member for which they commit.
            return ErrorCode.none if is_transactional else ErrorCode.unknown_member_id
        error = self.check_member(member_id, instance_id)
        if error is not ErrorCode.none:
            return error
        if epoch != self.generation:
            return ErrorCode.illegal_generation
        # The member has no assignment in the new generation yet, so it cannot have processed anything in it.
        completing = self.state is ClassicGroupState.COMPLETING_REBALANCE and not is_transactional
        return ErrorCode.rebalance_in_progress if completing else ErrorCode.none

    def needs_member_epoch(self, member_id: str) -> bool:
        return False

    def check_fetch(self, member_id: str | None, epoch: int) -> ErrorCode:
        return ErrorCode.none

    def check_offset_deletion(self) -> ErrorCode:
        # For other protocol types the coordinator cannot know which topics the group uses.
        known = self.is_empty or self.is_consumer_group
        return ErrorCode.none if known else ErrorCode.non_empty_group

    def is_subscribed(self, topic: str) -> bool:
        """Members whose subscription cannot be decoded may consume any topic."""
        return self.is_consumer_group if self.subscribed is None else topic in self.subscribed

    def retained_from_ms(self, offset: CommittedOffset) -> int | None:
        if self.protocol_type is None:
            return offset.commit_timestamp_ms
        if self.is_empty:
            stored_ms = -1 if self.stored is None else self.stored.state_timestamp_ms
            return offset.commit_timestamp_ms if stored_ms == -1 else stored_ms
        if self.state is ClassicGroupState.STABLE and self.is_consumer_group and self.subscribed is not None:
            # No member of the group consumes this topic any more.
            return offset.commit_timestamp_ms
        return None

    # Lifecycle

    def loaded(self, operation: Operation) -> None:
        for member in self.members.values():
            schedule_session_timeout(self, member, operation)
        # Without a leader, the group was converted from a consumer group: a member that has left held partitions.
        is_converted = self.stored is not None and self.stored.leader is None
        if self.members and (is_converted or len(self.members) > operation.settings.size_max):
            prepare_rebalance(self, operation)

    def member_committed(self, member_id: str, operation: Operation) -> None:
        member = self.members.get(member_id)
        if member is not None:
            schedule_session_timeout(self, member, operation)

    def time_out(self, timer: TimerKey, operation: Operation) -> None:
        match timer.kind:
            case "session":
                session_timed_out(self, timer.member_id, operation)
            case "join":
                join_timed_out(self, operation)
            case "sync":
                sync_timed_out(self, operation)

    def tombstones(self) -> Iterator[KeyValue]:
        yield encode_group_metadata(GroupMetadataRecord(group=self.group_id, value=None))

    def removed(self, timers: Timers[TimerKey]) -> None:
        self.move(ClassicGroupState.DEAD)
        for member_id in (*self.members, *self.pending):
            timers.cancel(TimerKey("session", self.group_id, member_id))
        timers.cancel(TimerKey("join", self.group_id))
        timers.cancel(TimerKey("sync", self.group_id))
