"""An operation on a group under way: each change is a record, and shows at once to what is decided next.

The group itself changes when the records are replayed. Until then a copy has changed, which is made with the first
record, so that an operation that changes nothing costs next to nothing.
"""

from typing import Any, Generic, Protocol, Self, TypeVar

from penstock.groups.records import KeyValue
from penstock.groups.work import Step


class Drafted(Protocol):
    """The state of a group that the coordinator assigns."""

    group_id: str
    #: As of when topics were last looked at; not stored, so who loads the group looks again.
    topics_version: int | None

    def fork(self) -> Self:
        """A copy on which an operation can try what its records will do."""
        ...

    def record_of(self, kind: Any, name: str, value: Any) -> KeyValue:
        """The record of a change, None being a deletion."""
        ...

    def apply(self, kind: Any, name: str, value: Any) -> None: ...


StateT = TypeVar("StateT", bound=Drafted)


class GroupDraft(Generic[StateT]):
    __slots__ = ("_is_copy", "_origin", "group_id", "state", "step")

    def __init__(self, state: StateT, step: Step, *, is_new: bool = False) -> None:
        """`is_new` for a state that is in no shard yet, and may be changed as it is."""
        self.group_id = state.group_id
        self.state = state
        self.step = step
        self._origin = state
        self._is_copy = is_new

    def change(self, kind: Any, name: str, value: Any) -> None:
        if not self._is_copy:
            self.state, self._is_copy = self.state.fork(), True
        self.state.apply(kind, name, value)
        self.step.store(self.state.record_of(kind, name, value))

    @property
    def knows_topics(self) -> bool:
        """Whether topics are as they were when they were last looked at for this group."""
        return self._origin.topics_version == self.step.topics.version

    def topics_seen(self) -> None:
        self._origin.topics_version = self.state.topics_version = self.step.topics.version
