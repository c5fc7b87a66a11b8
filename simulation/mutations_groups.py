"""Bugs of groups: members of the server-side protocol, share groups, and the schedule that works like them."""

from __future__ import annotations

from typing import Any

from penstock.groups.consumer import consumer_heartbeat as heartbeat_rules
from penstock.groups.consumer import reconciliation as progress_rules
from penstock.groups.consumer import reconciliation as reconcile_rules
from penstock.groups.consumer.consumer_group import ConsumerGroup
from penstock.groups.consumer.consumer_group_data import ConsumerGroupData, ConsumerGroupDraft
from penstock.groups.consumer.consumer_group_records import ConsumerGroupMember, ConsumerGroupRecordType
from penstock.groups.modern_group import JOIN_GROUP_MEMBER_EPOCH
from penstock.groups.share.partition import acknowledgement, share_partition_state
from penstock.groups.share.partition.in_flight_records import at_least
from penstock.groups.share.partition.share_partition import SharePartition
from penstock.groups.share.partition.share_partition_state import SharePartitionPolicy
from penstock.groups.share.state.dead_letters import offsets_with_cause
from penstock.groups.share.state.share_state import ShareStateReply
from penstock.groups.share.state.share_state_shard import ShareCoordinatorShard
from penstock.protocol.errors import ErrorCode
from penstock.scheduling.intake import HeldBatch
from simulation.burying import Undertaker
from simulation.coordinator import Coordinator
from simulation.moving import Mover
from simulation.mutation import Mutation, Patch, Traps
from simulation.releasing import Released, Releaser, Work
from simulation.replica import Key, Produce
from simulation.script import Ask, Local, Steps, play
from simulation.share_history import DeadLetter, Shared
from simulation.sharing import LedShare, ShareAck, ShareFetch, Sharing

# --- consumer groups ---


def _without_letting_go(state: Any, member: Any, target: Any, owned: Any, *, holds_nothing_else: bool) -> Any:
    """What a member has to give up counts as given up."""
    return _reconcile(state, member, target, {}, holds_nothing_else=True)


_reconcile = reconcile_rules.reconcile


def _old_id_stays(draft: ConsumerGroupDraft, old: ConsumerGroupMember, member_id: str) -> ConsumerGroupMember:
    target = draft.state.targets.get(old.member_id)
    draft.change(ConsumerGroupRecordType.MEMBER_METADATA, member_id, old.subscription)
    if target is not None:
        draft.change(ConsumerGroupRecordType.TARGET_ASSIGNMENT_MEMBER, member_id, target)
    new = draft.state.members[member_id]
    return draft.tell(
        new, old.current._replace(epoch=JOIN_GROUP_MEMBER_EPOCH, previous_epoch=JOIN_GROUP_MEMBER_EPOCH)
    )


def _answer_at_once(self: Coordinator, replies: Any) -> None:
    self._release(replies, ErrorCode.none)


CONSUMER_MUTATIONS = (
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
        patches=(Patch(progress_rules, "reconcile", _without_letting_go),),
    ),
    Mutation(
        name="static-member-not-fenced",
        sentence="A static member that returns gets a second place in the group.",
        trap=Traps.STATIC,
        world="consumer",
        patches=(Patch(heartbeat_rules, "replace_static", _old_id_stays),),
    ),
    Mutation(
        name="fenced-member-commits",
        sentence="Commits are taken from whoever was a member once.",
        trap=Traps.OWNER,
        world="consumer",
        patches=(Patch(ConsumerGroup, "_check_epoch", lambda self, member_id, epoch: ErrorCode.none),),
    ),
    Mutation(
        name="heartbeat-answered-uncommitted",
        sentence="A member is told its assignment before that is committed.",
        trap=Traps.GROUP_READ,
        world="consumer",
        patches=(Patch(Coordinator, "_release_later", _answer_at_once),),
    ),
)

# --- share groups ---


def _failed_write_forgotten(self: SharePartition) -> None:
    self.written()


def _pay_later(self: Sharing, led: LedShare, ask: ShareFetch) -> Steps:
    acquired = led.acquire(ask.member, ask.records_max)
    if not acquired and led.reserve(ask.records_max):
        rules = led.current()
        write = rules.take_write()
        if write is not None:
            rules.written()
            play(self.node, led.store(write))
        acquired = led.acquire(ask.member, ask.records_max)
    return (ErrorCode.none, acquired)
    yield 0


def _accept_before_write(self: Sharing, led: LedShare, ask: ShareAck) -> Steps:
    batches = [batch for batch in ask.batches if batch.last_offset >= led.current().start_offset]
    if batches:
        led.acknowledge(ask.member, batches)
        self.history.confirmed(ask.group, ask.key, led.leader_epoch, batches)
    return (ErrorCode.none, [])
    yield 0


def _append_before_plan(self: Undertaker, view: Any) -> Steps:
    plan = self._planned(view)
    source = Key(view.key.topic_id, view.key.partition)
    values = tuple(
        DeadLetter(Shared(view.key.group, source, offset), *cause)
        for offset, cause in offsets_with_cause(view.pending, plan.offsets)
    )
    key = Key(plan.target.topic_id, plan.target.partition)
    yield Ask(key, "produce", Produce(key, values, True, plan.producer_id, plan.epoch, plan.sequence))
    stored = yield self._submitted(lambda shard, token: shard.plan_dead_letters(view.key, plan, token))
    return plan if stored is True else None


def _one_delivery_less(policy: SharePartitionPolicy, delivery_count: int, *, expired: bool = False) -> int:
    return _release_code(policy, delivery_count + 1, expired=expired)


_release_code = share_partition_state.release_code


def _reads_without_fencing(
    self: ShareCoordinatorShard, read: Any, stored: Any, now_ms: int
) -> ShareStateReply:
    return _read(self, read, [], now_ms)


_read = ShareCoordinatorShard._read

SHARE_MUTATIONS = (
    Mutation(
        name="failed-write-taken-for-done",
        sentence="What a failed write said is taken for stored: locks that expired, outcomes that were told.",
        trap=Traps.SHARE_LOCK,
        world="share",
        patches=(Patch(SharePartition, "write_failed", _failed_write_forgotten),),
    ),
    Mutation(
        name="accept-answered-before-write",
        sentence="A member is told that its records are accepted before that is stored.",
        trap=Traps.SHARE_LOCK,
        world="share",
        patches=(Patch(Sharing, "_acknowledge", _accept_before_write),),
    ),
    Mutation(
        name="share-leader-not-fenced",
        sentence="A new leader's read leaves the last leader free to write.",
        trap=Traps.FENCE,
        world="share",
        faults=("cut", "cut from controllers", "freeze", "preferred election", "one-way cut"),
        patches=(Patch(ShareCoordinatorShard, "_read", _reads_without_fencing),),
    ),
    Mutation(
        name="at-most-once-paid-later",
        sentence="At most once: records are handed out before it is stored that they are.",
        trap=Traps.AT_MOST_ONCE,
        world="share",
        patches=(Patch(Sharing, "_fetch", _pay_later),),
    ),
    Mutation(
        name="dead-letters-before-plan",
        sentence="Dead letters are appended before the plan for them is stored.",
        trap=Traps.PLAN,
        world="share",
        faults=("kill", "power loss", "one-way cut", "cut"),
        patches=(Patch(Undertaker, "plan", _append_before_plan),),
    ),
    Mutation(
        name="given-up-too-early",
        sentence="A record is given up one delivery before its limit.",
        trap=Traps.LIMIT,
        world="share",
        patches=(
            Patch(share_partition_state, "release_code", _one_delivery_less),
            Patch(acknowledgement, "at_least", lambda limit: at_least(limit - 1)),
        ),
    ),
)

# --- the schedule ---


def _position_apart(self: Mover, chunk: Any) -> Steps:
    """First the records, then how far they reach."""
    expected, source = self._position, self.source
    position: Any = None
    for part in (slice(None, -1), slice(-1, None)):

        def take(shard: Any, token: Any, part: slice = part) -> Work:
            records = shard.rules.take(source, expected, chunk, shard._log.end_offset)
            reply = chunk.position if records else shard.rules.position(source)
            return Work(records[part], ((token, (reply,)),))

        reply = yield self._asked(take)
        if not isinstance(reply, tuple) or not self.is_current:
            return False
        position = reply[0]
    if position != chunk.position:
        self._go_on_from(position)
        return False
    self.taken(position)
    return True


def _done_when_sent(self: Releaser, source: Any, release: Any) -> Steps:
    plan = self.schedule.rules.sources[source].plan
    assert plan is not None
    key = Key(source.topic_id, source.partition)
    values = tuple(Released(record.key_value, record.due_ms) for record in release.records)
    request = Produce(key, values, True, plan.producer_id, plan.epoch, plan.sequence)
    play(self.node, _asked(Ask(key, "produce", request)))
    self._appended(source, plan)
    return release
    yield 0


def _asked(question: Ask) -> Steps:
    yield question


def _store_and_go_on(
    self: Releaser, source: Any, plan: Any, finished: Any, *, is_repeat: bool = False
) -> Steps:
    self.host.submit(
        lambda shard, token, _: shard.plan(source, plan, finished, token, is_repeat=is_repeat),
        lambda _: None,
    )
    yield Local(lambda respond: respond(None))
    return not self.host.is_closed


def _forgets_where_it_was(self: Mover, position: Any) -> None:
    self._position = position


SCHEDULE_MUTATIONS = (
    Mutation(
        name="position-stored-apart",
        sentence="Held records and the position of their source are stored one after the other.",
        trap=Traps.PLAN,
        world="schedule",
        patches=(Patch(Mover, "_send", _position_apart),),
    ),
    Mutation(
        name="mover-goes-back",
        sentence="After a failure a mover sends again what was taken, from the position after it.",
        trap=Traps.PLAN,
        world="schedule",
        patches=(Patch(Mover, "taken", _forgets_where_it_was),),
    ),
    Mutation(
        name="release-counted-uncommitted",
        sentence="A release counts as done before its records are committed.",
        trap=Traps.PLAN,
        world="schedule",
        patches=(Patch(Releaser, "_append", _done_when_sent),),
    ),
    Mutation(
        name="release-before-plan",
        sentence="Records are released before the plan for them is committed.",
        trap=Traps.PLAN,
        world="schedule",
        patches=(Patch(Releaser, "store", _store_and_go_on),),
    ),
    Mutation(
        name="held-without-their-batch",
        sentence="Held records count although the batch that they were taken from does not follow.",
        trap=Traps.ALL_OR_NOTHING,
        world="schedule",
        patches=(Patch(HeldBatch, "belongs_to", lambda self, control, header: True),),
    ),
    Mutation(
        name="released-early",
        sentence="Records are released when they are nearly due.",
        trap=Traps.NOT_EARLY,
        world="schedule",
        patches=(Patch(Releaser, "now_ms", lambda self: self.node.machine.clock.wall_ms() + 60),),
    ),
)
