"""Records of share groups on their way into the shard."""

from penstock.groups.shard import GroupShard
from penstock.groups.share.group import ShareGroup
from penstock.groups.share.records import Kind, decode


def replay(shard: GroupShard, key: bytes, value: bytes | None) -> None:
    record = decode(key, value)
    group = shard.groups.get(record.group_id)
    if not isinstance(group, ShareGroup):
        if record.value is None:
            # A tombstone of a group that is gone.
            return
        if group is not None:
            shard.drop(group)
        group = shard.groups[record.group_id] = ShareGroup(record.group_id)
    group.apply(record.kind, record.name, record.value)
    if record.kind is Kind.GROUP_EPOCH and record.value is None:
        shard.drop(group)
