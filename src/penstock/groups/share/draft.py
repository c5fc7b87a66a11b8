"""An operation on a share group under way: each change is a record, and shows at once to what is decided next.

The group itself changes when the records are replayed. Until then a copy has changed, which is made with the first
record, so that an operation that changes nothing costs next to nothing.
"""

from typing import Any, Final

from penstock.groups.consumer.values import GroupEpoch
from penstock.groups.share.records import Kind, Record, encode
from penstock.groups.share.state import GroupState
from penstock.groups.share.values import Member, StatePlaces
from penstock.groups.work import Step, Timer

SESSION: Final = "share session"


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

    def topics_seen(self) -> None:
        self._origin.topics_version = self.state.topics_version = self.step.topics.version

    # What changes together

    def remove(self, member: Member) -> None:
        for kind in (Kind.CURRENT, Kind.TARGET, Kind.SUBSCRIPTION):
            self.change(kind, member.member_id, None)
        self.step.timers.cancel(session_timer(self.group_id, member.member_id))

    def begin_epoch(self, metadata_hash: int | None = None) -> None:
        if metadata_hash is None:
            metadata_hash = self.state.metadata_hash
        self.change(Kind.GROUP_EPOCH, "", GroupEpoch(self.state.epoch + 1, metadata_hash))

    def change_states(self, states: StatePlaces) -> None:
        if states != self.state.states:
            self.change(Kind.STATES, "", None if states.is_empty else states)


def session_timer(group_id: str, member_id: str) -> Timer:
    return Timer(SESSION, group_id, member_id)
