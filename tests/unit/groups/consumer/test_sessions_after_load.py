"""A coordinator that loads a group uses the session timeout of the group's own settings."""

from typing import Any

from tests.unit.groups.consumer.world import FakeTopics, NewClient
from tests.unit.groups.consumer.world import World as Consumers
from tests.unit.groups.share.world import World as Sharers

from penstock.groups.group_config import GroupConfig, GroupCoordinatorConfig
from penstock.groups.group_shard import GroupCoordinatorShard
from penstock.groups.modern_group import JOIN_GROUP_MEMBER_EPOCH

NODE_MS, GROUP_MS = 45_000, 4_000


def reload(world: Any) -> GroupCoordinatorShard:
    settings = GroupCoordinatorConfig(consumer_session_timeout_ms=NODE_MS, share_session_timeout_ms=NODE_MS)
    own = GroupConfig(consumer_session_timeout_ms=GROUP_MS, share_session_timeout_ms=GROUP_MS)
    shard = GroupCoordinatorShard(settings, world.shard.topics, lambda group_id: own)
    for key, value in world.log:
        shard.replay(key, value)
    shard.loaded(0)
    return shard


def test_a_share_group() -> None:
    world = Sharers()
    world.put_topic("t", 1)
    world.beat("m", JOIN_GROUP_MEMBER_EPOCH, ("t",))
    assert reload(world).next_deadline_ms() == GROUP_MS


def test_a_consumer_group() -> None:
    topics = FakeTopics()
    topics.set("t", 1)
    world = Consumers(GroupCoordinatorConfig(), topics)
    NewClient(world, "m", ("t",)).beat()
    assert reload(world).next_deadline_ms() == GROUP_MS
