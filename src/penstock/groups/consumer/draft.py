"""An operation on a consumer group under way: each change is a record, and shows at once to what is decided next.

The group itself changes when the records are replayed. Until then a copy has changed, which is made with the first
record, so that an operation that changes nothing costs next to nothing.
"""

from typing import Any

from penstock.groups.consumer.records import Kind, Record, encode
from penstock.groups.consumer.state import GroupState
from penstock.groups.consumer.values import Current, GroupEpoch, Member
from penstock.groups.timers import Timers
from penstock.groups.work import Step, Timer


class Draft:
    __slots__ = ("_is_copy", "_origin", "group_id", "state", "step")

    def __init__(self, state: GroupState, step: Step, *, is_new: bool = False) -> None:
        """`is_new` for a state that is in no shard yet, and may be changed as it is."""
        self.group_id = state.group_id
        self.state = state
        self.step = step
        self._origin = state
        self._is_copy = is_new

    def change(self, kind: Kind, name: str, value: Any) -> None:
        if not self._is_copy:
            self.state, self._is_copy = self.state.fork(), True
        self.state.apply(kind, name, value)
        self.step.store(encode(Record(kind, self.group_id, name, value)))

    @property
    def knows_topics(self) -> bool:
        """Whether topics are as they were when they were last looked at for this group."""
        return self._origin.topics_version == self.step.topics.version

    @property
    def subscribed_before(self) -> frozenset[str]:
        return self._origin.subscribed

    def topics_seen(self) -> None:
        self._origin.topics_version = self.state.topics_version = self.step.topics.version

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
