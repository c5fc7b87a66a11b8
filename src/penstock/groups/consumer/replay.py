"""Records of consumer groups on their way into the shard."""

from penstock.groups.consumer.group import ConsumerGroup
from penstock.groups.consumer.records import FORMS, Kind
from penstock.groups.replaying import replay_into
from penstock.groups.shard import GroupShard


def replay(shard: GroupShard, key: bytes, value: bytes | None) -> None:
    replay_into(shard, FORMS.decode(key, value), ConsumerGroup, ends_with=Kind.GROUP_EPOCH)
