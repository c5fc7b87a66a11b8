"""An operation on a share group under way: what changes together."""

from typing import Final

from penstock.groups.consumer.values import GroupEpoch
from penstock.groups.drafting import GroupDraft
from penstock.groups.share.records import Kind
from penstock.groups.share.state import GroupState
from penstock.groups.share.values import Member, StatePlaces
from penstock.groups.work import Timer

SESSION: Final = "share session"


class Draft(GroupDraft[GroupState]):
    __slots__ = ()

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
