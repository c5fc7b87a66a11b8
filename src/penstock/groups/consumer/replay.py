"""Records of consumer groups on their way into the shard."""

from penstock.groups.consumer.group import ConsumerGroup
from penstock.groups.consumer.records import Kind, decode
from penstock.groups.shard import GroupShard


def replay(shard: GroupShard, key: bytes, value: bytes | None) -> None:
    record = decode(key, value)
    group = shard.groups.get(record.group_id)
    if not isinstance(group, ConsumerGroup):
        if record.value is None:
            # A tombstone of what this group was before, or of a group that is gone.
            return
        if group is not None:
            shard.drop(group)
        group = shard.groups[record.group_id] = ConsumerGroup(record.group_id)
    group.apply(record.kind, record.name, record.value)
    if record.kind is Kind.GROUP_EPOCH and record.value is None:
        shard.drop(group)
