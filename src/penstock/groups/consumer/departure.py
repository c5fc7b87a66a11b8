"""How a member goes: it leaves, leaves for a while, or is put out because it was not heard of or did not let go."""

from penstock.groups.consumer.checks import known_member
from penstock.groups.consumer.draft import REBALANCE, Draft
from penstock.groups.consumer.messages import ConsumerHeartbeat, ConsumerHeartbeatReply
from penstock.groups.consumer.migration import downgrade, may_downgrade
from penstock.groups.consumer.state import GroupState
from penstock.groups.consumer.subscriptions import resolve_regexes, subscribed_hash
from penstock.groups.consumer.values import AWAY, NOTHING, Member, Phase
from penstock.groups.work import Step, Timer


def leave(group: GroupState, request: ConsumerHeartbeat, step: Step) -> ConsumerHeartbeatReply:
    """Raises ApiError."""
    member = known_member(group, request.member_id, request.instance_id)
    if request.member_epoch == AWAY:
        # Its place stays reserved until its session ends; what it had to give up, it has given up.
        away = member.current._replace(epoch=AWAY, phase=Phase.STABLE, revoking=NOTHING)
        Draft(group, step).tell(member, away)
        step.timers.cancel(Timer(REBALANCE, group.group_id, member.member_id))
    else:
        fence(group, member, step)
    return ConsumerHeartbeatReply(member_id=request.member_id, member_epoch=request.member_epoch)


def fence(group: GroupState, member: Member, step: Step) -> None:
    """What it has is free from now on."""
    draft = Draft(group, step)
    draft.remove(member)
    go_on_without(draft)


def go_on_without(draft: Draft) -> None:
    """Members were removed. If only members of the classic protocol remain, they have a classic group.

    Otherwise a new epoch begins; the target assignment is worked out when the next member is heard of.
    """
    if may_downgrade(draft.state, draft.step):
        downgrade(draft.state, draft.step)
        return
    resolve_regexes(draft)
    draft.begin_epoch(subscribed_hash(draft))
