"""What a member's request leads to: perhaps a new subscription, epoch and target, and a step towards the target."""

from penstock.groups.consumer.draft import REBALANCE, Draft
from penstock.groups.consumer.reconcile import reconcile
from penstock.groups.consumer.records import Kind
from penstock.groups.consumer.subscriptions import resolve_regexes, subscribed_hash
from penstock.groups.consumer.target import update_target
from penstock.groups.consumer.values import JOINING, NOTHING, Assignment, Member, Phase, Subscription
from penstock.groups.work import Timer


def advance(
    draft: Draft,
    member: Member,
    subscription: Subscription,
    owned: Assignment | None,
    *,
    holds_nothing_else: bool,
    target_interval_ms: int = 0,
) -> Member:
    """`member` may be new; what it has become is returned."""
    old = member.subscription
    is_new = member.member_id not in draft.state.members
    if subscription != old or is_new:
        draft.change(Kind.SUBSCRIPTION, member.member_id, subscription)
    is_other = (subscription.topic_names, subscription.topic_regex) != (old.topic_names, old.topic_regex)
    refresh(draft, begins_epoch=is_other or is_new)
    # Who subscribes to something else must not be told of what it no longer wants.
    changes_its_mind = is_other and bool(old.topic_names or old.topic_regex)
    update_target(draft, 0 if changes_its_mind else target_interval_ms)
    return _reconciled(draft, member.member_id, owned, holds_nothing_else=holds_nothing_else)


def refresh(draft: Draft, *, begins_epoch: bool) -> None:
    """Look at the topics again if they or the subscriptions may have changed since this was last done."""
    if draft.knows_topics and not begins_epoch:
        return
    resolve_regexes(draft)
    number = subscribed_hash(draft)
    if begins_epoch or number != draft.state.metadata_hash:
        draft.begin_epoch(number)
    draft.topics_seen()


def _reconciled(
    draft: Draft, member_id: str, owned: Assignment | None, *, holds_nothing_else: bool
) -> Member:
    state = draft.state
    member = state.members[member_id]
    if member.current.is_settled(state.target_epoch):
        return member
    target = state.targets.get(member_id, NOTHING)
    current = reconcile(state, member, target, owned, holds_nothing_else=holds_nothing_else)
    if current == member.current:
        return member
    if not member.is_classic:
        timer = Timer(REBALANCE, draft.group_id, member_id)
        if current.phase is Phase.UNREVOKED:
            draft.step.schedule_in(timer, member.subscription.rebalance_timeout_ms)
        else:
            draft.step.timers.cancel(timer)
    return draft.tell(member, current)


def replace_static(draft: Draft, old: Member, member_id: str) -> Member:
    """The same place in the group, with what it has, under another id; whoever still uses the old one is fenced."""
    target = draft.state.targets.get(old.member_id)
    draft.remove(old)
    draft.change(Kind.SUBSCRIPTION, member_id, old.subscription)
    if target is not None:
        draft.change(Kind.TARGET, member_id, target)
    new = draft.state.members[member_id]
    return draft.tell(new, old.current._replace(epoch=JOINING, previous_epoch=JOINING))
