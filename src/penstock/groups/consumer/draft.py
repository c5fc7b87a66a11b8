"""An operation on a consumer group under way: what changes together, and the timers of a member."""

from penstock.groups.consumer.records import Kind
from penstock.groups.consumer.state import GroupState
from penstock.groups.consumer.values import Current, GroupEpoch, Member
from penstock.groups.drafting import GroupDraft
from penstock.groups.timers import Timers
from penstock.groups.work import Step, Timer


class Draft(GroupDraft[GroupState]):
    __slots__ = ()

    @property
    def subscribed_before(self) -> frozenset[str]:
        return self._origin.subscribed

    # What changes together

    def tell(self, member: Member, current: Current) -> Member:
        self.change(Kind.CURRENT, member.member_id, current)
        return self.state.members[member.member_id]

    def remove(self, member: Member) -> None:
        for kind in (Kind.CURRENT, Kind.TARGET, Kind.SUBSCRIPTION):
            self.change(kind, member.member_id, None)
        cancel_timers(self.step.timers, self.group_id, member.member_id)

    def begin_epoch(self, metadata_hash: int) -> None:
        self.change(Kind.GROUP_EPOCH, "", GroupEpoch(self.state.epoch + 1, metadata_hash))


# Timers of a member

SESSION, REBALANCE = "consumer session", "consumer rebalance"
JOIN, SYNC = "consumer join", "consumer sync"


def cancel_timers(timers: Timers[Timer], group_id: str, member_id: str) -> None:
    for kind in (SESSION, REBALANCE, JOIN, SYNC):
        timers.cancel(Timer(kind, group_id, member_id))


def expect_heartbeat(step: Step, group_id: str, member: Member, session_timeout_ms: int) -> None:
    """`session_timeout_ms` is the group's; members of the classic protocol have brought their own."""
    classic = member.subscription.classic
    delay_ms = session_timeout_ms if classic is None else classic.session_timeout_ms
    step.schedule_in(Timer(SESSION, group_id, member.member_id), delay_ms)
