"""Records of groups that the coordinator assigns, on their way into the shard."""

from typing import Any, Protocol, TypeVar

from penstock.groups.assigned_records import Record
from penstock.groups.group import Group
from penstock.groups.shard import GroupShard


class AssignedGroup(Group, Protocol):
    def __init__(self, group_id: str) -> None: ...

    def apply(self, kind: Any, name: str, value: Any) -> None: ...


AssignedT = TypeVar("AssignedT", bound=AssignedGroup)


def replay_into(
    shard: GroupShard, record: Record[Any], group_class: type[AssignedT], *, ends_with: Any
) -> None:
    """The tombstone of the kind `ends_with` is the last one of a group."""
    group = shard.groups.get(record.group_id)
    if not isinstance(group, group_class):
        if record.value is None:
            # A tombstone of what this group was before, or of a group that is gone.
            return
        if group is not None:
            shard.drop(group)
        group = shard.groups[record.group_id] = group_class(record.group_id)
    group.apply(record.kind, record.name, record.value)
    if record.kind is ends_with and record.value is None:
        shard.drop(group)
