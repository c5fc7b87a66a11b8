"""Records of share groups on their way into the shard."""

from penstock.groups.replaying import replay_into
from penstock.groups.shard import GroupShard
from penstock.groups.share.group import ShareGroup
from penstock.groups.share.records import FORMS, Kind


def replay(shard: GroupShard, key: bytes, value: bytes | None) -> None:
    replay_into(shard, FORMS.decode(key, value), ShareGroup, ends_with=Kind.GROUP_EPOCH)
