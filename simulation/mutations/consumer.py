"""Bugs of consumer groups: the rules of both protocols, and the coordinator runtime under them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock.broker.coordinators.runtime import active_shard
from penstock.broker.coordinators.runtime.active_shard import ActiveShard, replay_log
from penstock.broker.coordinators.runtime.runtime import CoordinatorRuntime
from penstock.groups import offsets as group_offsets
from penstock.groups.classic import classic_group as classic_rules
from penstock.groups.classic.classic_group import ClassicGroup
from penstock.groups.classic.classic_group_data import ClassicGroupState
from penstock.groups.consumer import classic_members
from penstock.groups.consumer import membership as membership_rules
from penstock.groups.consumer import migration as migration_rules
from penstock.groups.consumer import reconciliation as reconcile_rules
from penstock.groups.consumer.consumer_group import ConsumerGroup
from penstock.groups.consumer.consumer_group_data import ConsumerGroupData, ConsumerGroupDraft
from penstock.groups.consumer.consumer_group_records import ConsumerGroupMember, ConsumerGroupRecordType
from penstock.groups.consumer.membership import ConsumerHeartbeatReply
from penstock.groups.group import PartitionsReply, SyncReply
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.modern_group import JOIN_GROUP_MEMBER_EPOCH, MemberState
from penstock.protocol.errors import ErrorCode
from penstock.protocol.record_batch import encode_coordinator_batch
from simulation.mutation import Mutation, Patch, Traps

# -- rules of the consumer protocol --------------------------------------------------------------------


def _without_letting_go(state: Any, member: Any, target: Any, owned: Any, *, holds_nothing_else: bool) -> Any:
    return _reconcile(state, member, target, {}, holds_nothing_else=True)


_reconcile = reconcile_rules.reconcile


def _revoke_in_old_epoch(
    state: Any, member: Any, target: Any, owned: Any, *, holds_nothing_else: bool
) -> Any:
    current = _reconcile(state, member, target, owned, holds_nothing_else=holds_nothing_else)
    if current.phase is MemberState.UNREVOKED and member.current.phase is not MemberState.UNREVOKED:
        return current._replace(epoch=member.current.epoch, previous_epoch=member.current.previous_epoch)
    return current


def _old_id_stays(draft: ConsumerGroupDraft, old: ConsumerGroupMember, member_id: str) -> ConsumerGroupMember:
    target = draft.state.targets.get(old.member_id)
    draft.change(ConsumerGroupRecordType.MEMBER_METADATA, member_id, old.subscription)
    if target is not None:
        draft.change(ConsumerGroupRecordType.TARGET_ASSIGNMENT_MEMBER, member_id, target)
    new = draft.state.members[member_id]
    return draft.tell(
        new, old.current._replace(epoch=JOIN_GROUP_MEMBER_EPOCH, previous_epoch=JOIN_GROUP_MEMBER_EPOCH)
    )


def _load_without_sessions(self: ConsumerGroup, operation: Any) -> None: ...


# -- rules of the classic protocol ---------------------------------------------------------------------


def _commit_anything(*_: Any) -> ErrorCode:
    return ErrorCode.none


def _heartbeat_changes_nothing(group: Any, request: Any, operation: Any) -> ErrorCode:
    error = group.check_member(request.member_id, request.instance_id)
    if error is ErrorCode.none and request.generation != group.generation:
        error = ErrorCode.illegal_generation
    is_rebalancing = group.state is ClassicGroupState.PREPARING_REBALANCE
    return ErrorCode.rebalance_in_progress if error is ErrorCode.none and is_rebalancing else error


def _replace_without_storing(
    group: Any, member: Any, request: Any, token: Any, operation: Any, old_leader: str
) -> None:
    operation.reply(token, classic_rules.joined_reply(group, member.member_id))


def _convert_to_empty(group: Any, topics: Any) -> Any:
    """The members come without their assignments."""
    found = _members_of_classic_group(group, topics)
    return [
        member._replace(current=member.current.moved(member.current.epoch, MemberState.STABLE, {}))
        for member in found
    ]


_members_of_classic_group = migration_rules._members_of_classic_group


def _load_as_stored(self: ClassicGroup, operation: Any) -> None:
    for member in self.members.values():
        classic_rules.schedule_session_timeout(self, member, operation)


# -- the coordinator runtime ---------------------------------------------------------------------------


def _answer_at_once(kind: type) -> Callable[..., None]:
    """Replies of one kind do not wait until their records are committed."""

    def reply(self: Any, replies: Iterable[tuple[Any, object]]) -> None:
        replies = tuple(replies)
        for token, value in replies:
            if isinstance(value, kind) and not token.done():
                token.set_result(value)
        _reply_when_committed(self, replies)

    return reply


_reply_when_committed = ActiveShard._reply_when_committed


def _read_at_once(self: Any, question: Any) -> Any:
    token = self._new_token()
    token.set_result(question(self.shard))
    return token


def _read_unchecked(log: Any, offset: int, max_bytes: int, upto: Any) -> Any:
    return log.read(offset, max_bytes, upto)


async def _load_committed_only(self: Any, index: int) -> None:
    partition = self._find_partition(index)
    if partition is None:
        return
    shard, end, epoch = self._new_shard(), partition.high, partition.leader_epoch
    await replay_log(shard, partition.log, end, self._in_thread)
    if self._is_current(partition, index, epoch):
        self._activate(index, shard, partition, partition.log.end.offset - 1)


async def _load_while_serving(self: Any, index: int) -> None:
    partition = self._find_partition(index)
    if partition is None or index in self._active:
        return
    shard, end = self._new_shard(), partition.log.end
    self._activate(index, shard, partition, end.offset - 1)
    await replay_log(shard, partition.log, end, self._in_thread)


def _append_in_any_epoch(self: Any, batch: bytearray) -> None:
    self._last_offset = self.partition.append_internal(
        batch, self._now_ms(), leader_epoch=self.partition.leader_epoch
    )


def _keep(self: Any, *_: Any) -> None: ...


def _first_timer_only(self: Any) -> None:
    if self._timer is None:
        _set_timer(self)


_set_timer = ActiveShard._set_timer


def _replay_after_commit(self: Any, work: Any, guard: Any) -> None:
    """What was decided is not visible to the next decision before it is committed."""
    if getattr(work, "producer", None) is not None or not work.records:
        _append(self, work, guard)
        return
    self._append_batch(encode_coordinator_batch(work.records, self._now_ms()))

    def replay(error: Any) -> None:
        if error is None and not self.is_closed:
            for key, value in work.records:
                self.shard.replay(key, value)

    self.partition.when_committed(self._last_offset, replay)


_append = ActiveShard._append


def _tick_once(self: Any, now_ms: int) -> Any:
    """Due timers are popped, but nothing that they decide is returned."""
    operation = self.operation(now_ms)
    while (timer := self._timers.pop_due(now_ms)) is not None:
        self._time_out(timer, operation)
        operation = self.operation(now_ms)
    return operation.work()


MUTATIONS: tuple[Mutation, ...] = (
    Mutation(
        name="handed-over-too-early",
        sentence="A partition is given to its new owner while the old one still has it.",
        trap=Traps.OWNER,
        world="consumer",
        patches=(Patch(ConsumerGroupData, "is_free", lambda self, topic_id, partition, for_member: True),),
    ),
    Mutation(
        name="revocation-not-awaited",
        sentence="What a member is told to give up is free at once.",
        trap=Traps.OWNER,
        world="consumer",
        patches=(Patch(reconcile_rules, "reconcile", _without_letting_go),),
    ),
    Mutation(
        name="revocation-in-old-epoch",
        sentence="A member is told to revoke in its old epoch, so a heartbeat sent before that confirms it.",
        trap=Traps.OWNER,
        world="consumer",
        faults=("late requests", "client suspended"),
        apis=(68,),
        patches=(Patch(reconcile_rules, "reconcile", _revoke_in_old_epoch),),
    ),
    Mutation(
        name="static-member-not-fenced",
        sentence="A static member that returns gets a second place in the group.",
        trap=Traps.STATIC,
        world="consumer",
        patches=(
            Patch(classic_members, "replace_static", _old_id_stays),
            Patch(membership_rules, "replace_static", _old_id_stays),
        ),
    ),
    Mutation(
        name="static-return-not-stored",
        sentence="The new id of a static classic member is not stored, so the next coordinator knows the fenced one.",
        trap=Traps.STATIC,
        world="consumer",
        patches=(Patch(classic_rules, "_keep_assignment", _replace_without_storing),),
    ),
    Mutation(
        name="fenced-member-commits",
        sentence="Commits are accepted from every member that the group ever had.",
        trap=Traps.OWNER,
        world="consumer",
        patches=(Patch(ConsumerGroup, "_check_epoch", lambda self, member_id, epoch: ErrorCode.none),),
    ),
    Mutation(
        name="old-generation-commits",
        sentence="A member of an earlier generation may still commit offsets.",
        trap=Traps.OWNER,
        world="consumer",
        patches=(Patch(group_offsets, "check_commit", _commit_anything),),
    ),
    Mutation(
        name="classic-heartbeat-forgotten",
        sentence="A heartbeat of a classic member does not extend its session.",
        trap=Traps.OWNER,
        world="consumer",
        patches=(Patch(classic_rules, "handle_heartbeat", _heartbeat_changes_nothing),),
    ),
    Mutation(
        name="sessions-forgotten-at-failover",
        sentence="A new coordinator starts no session timeouts, so members that are gone stay for ever.",
        trap=Traps.LOST_DECISION,
        world="consumer",
        patches=(
            Patch(ConsumerGroup, "loaded", _load_without_sessions),
            Patch(ClassicGroup, "loaded", _load_without_sessions),
        ),
    ),
    Mutation(
        name="upgrade-forgets-assignments",
        sentence="A classic group becomes a consumer group as if its members held nothing.",
        trap=Traps.OWNER,
        world="consumer",
        patches=(Patch(migration_rules, "_members_of_classic_group", _convert_to_empty),),
    ),
    Mutation(
        name="conversion-not-rebalanced",
        sentence="A classic group that was a consumer group is not rebalanced if its coordinator moves meanwhile.",
        trap=Traps.LOST_DECISION,
        world="consumer",
        faults=("kill", "preferred election", "power loss"),
        patches=(Patch(ClassicGroup, "loaded", _load_as_stored),),
    ),
    Mutation(
        name="damaged-records-loaded",
        sentence="A coordinator does not verify the checksums of what it loads.",
        trap=Traps.CORRUPTION,
        world="consumer",
        faults=("bit flip", "suspend", "preferred election", "cut from the controller"),
        patches=(Patch(active_shard, "read_validated", _read_unchecked),),
    ),
    Mutation(
        name="heartbeat-answered-uncommitted",
        sentence="A member is told its assignment before that is committed.",
        trap=Traps.GROUP_READ,
        world="consumer",
        patches=(Patch(ActiveShard, "_reply_when_committed", _answer_at_once(ConsumerHeartbeatReply)),),
    ),
    Mutation(
        name="sync-answered-uncommitted",
        sentence="A classic member is told its assignment before that is committed.",
        trap=Traps.GROUP_READ,
        world="consumer",
        patches=(Patch(ActiveShard, "_reply_when_committed", _answer_at_once(SyncReply)),),
    ),
    Mutation(
        name="group-reads-uncommitted",
        sentence="A coordinator shows committed offsets before their records are committed.",
        trap=Traps.GROUP_READ,
        world="consumer",
        patches=(Patch(ActiveShard, "read", _read_at_once),),
    ),
    Mutation(
        name="group-answers-uncommitted",
        sentence="A coordinator confirms a commit before its record is committed.",
        trap=Traps.GROUP_READ,
        world="consumer",
        patches=(Patch(ActiveShard, "_reply_when_committed", _answer_at_once(PartitionsReply)),),
    ),
    Mutation(
        name="coordinator-loads-committed-only",
        sentence="A new coordinator leaves out what lies above its stale high watermark.",
        trap=Traps.GROUP_READ,
        world="consumer",
        patches=(Patch(CoordinatorRuntime, "_load", _load_committed_only),),
    ),
    Mutation(
        name="coordinator-serves-while-loading",
        sentence="A shard is active before it is loaded.",
        trap=Traps.GROUP_READ,
        world="consumer",
        patches=(Patch(CoordinatorRuntime, "_load", _load_while_serving),),
    ),
    Mutation(
        name="coordinator-outlives-its-epoch",
        sentence="A shard goes on in a later leader epoch without the decisions of the leaders in between.",
        trap=Traps.FENCE,
        world="consumer",
        patches=(
            Patch(CoordinatorRuntime, "_unload_outdated", _keep),
            Patch(CoordinatorRuntime, "unload", _keep),
            Patch(ActiveShard, "_append_batch", _append_in_any_epoch),
            Patch(ActiveShard, "_fail", _keep),
        ),
    ),
    Mutation(
        name="coordinator-replays-at-commit",
        sentence="A decision is applied when it is committed, so the next one is made without it.",
        trap=Traps.OWNER,
        world="consumer",
        patches=(Patch(ActiveShard, "_append", _replay_after_commit),),
    ),
    Mutation(
        name="earlier-deadline-lost",
        sentence="A coordinator's timer is not moved when an earlier deadline is set.",
        trap=Traps.LOST_DECISION,
        world="consumer",
        patches=(Patch(ActiveShard, "_set_timer", _first_timer_only),),
    ),
    Mutation(
        name="timeout-decides-nothing",
        sentence="A session timeout comes, and its decision is dropped.",
        trap=Traps.LOST_DECISION,
        world="consumer",
        patches=(Patch(GroupCoordinatorShard, "tick", _tick_once),),
    ),
    Mutation(
        name="clock-step-taken-for-time",
        sentence="A coordinator whose clock is set forward takes the step for silence of its members.",
        trap=Traps.OWNER,
        world="consumer",
        faults=("clock jump",),
        patches=(Patch(ActiveShard, "_detect_clock_step", _keep),),
    ),
)
