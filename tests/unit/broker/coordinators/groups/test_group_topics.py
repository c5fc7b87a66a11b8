"""Topics as groups see them: a new version when partitions or racks change, not when only leaders change."""

from types import SimpleNamespace
from typing import Any
from uuid import UUID

from penstock.broker.coordinators.groups.coordinator import GroupTopics
from penstock.cluster import metadata_records as kinds
from penstock.cluster.image import ClusterImage

_ID = UUID(int=7)


class _World:
    def __init__(self) -> None:
        self.metadata = SimpleNamespace(image=ClusterImage())
        self.topics = GroupTopics(self.metadata)

    def happens(self, *records: Any) -> bool:
        """Whether groups have to look again."""
        before = self.topics.version
        image = self.metadata.image.fork()
        delta = image.apply(records)
        self.metadata.image = image
        self.topics.image_changed(delta)
        return self.topics.version != before


def _broker(broker_id: int, rack: str | None) -> Any:
    return kinds.RegisterBrokerRecord(
        broker_id=broker_id,
        incarnation_id=UUID(int=1),
        broker_epoch=1,
        end_points=(),
        features=(),
        rack=rack,
        fenced=False,
        in_controlled_shutdown=False,
        log_dirs=(),
        is_migrating_zk_broker=False,
    )


def _partition(number: int, *replicas: int) -> Any:
    return kinds.PartitionRecord(
        partition_id=number,
        topic_id=_ID,
        replicas=replicas,
        isr=replicas,
        removing_replicas=(),
        adding_replicas=(),
        leader=replicas[0],
        leader_epoch=0,
        partition_epoch=0,
        directories=tuple(None for _ in replicas),
    )


def _world() -> _World:
    world = _World()
    assert world.happens(_broker(1, "north"), _broker(2, None))
    assert world.happens(kinds.TopicRecord(name="orders", topic_id=_ID), _partition(0, 1, 2))
    return world


def test_a_topic_is_known_by_name_and_id_with_the_racks_of_its_replicas() -> None:
    world = _world()
    topic = world.topics.get("orders")
    assert topic is not None
    assert topic == world.topics.by_id(_ID) == ("orders", _ID, (frozenset({"north"}),))
    assert world.topics.get("none") is None
    assert world.topics.by_id(UUID(int=8)) is None
    assert list(world.topics.names()) == ["orders"]


def test_more_partitions_and_deletion_are_news_and_a_leader_is_not() -> None:
    world = _world()
    assert world.topics.get("orders") is not None
    assert not world.happens(kinds.PartitionChangeRecord(partition_id=0, topic_id=_ID, leader=2))
    assert world.happens(_partition(1, 2))
    topic = world.topics.get("orders")
    assert topic is not None
    assert topic.partition_count == 2
    assert world.happens(kinds.RemoveTopicRecord(topic_id=_ID))
    assert world.topics.get("orders") is None


def test_a_broker_in_another_rack_is_news_and_one_that_is_fenced_is_not() -> None:
    world = _world()
    assert not world.happens(_broker(1, "north"))
    assert world.happens(_broker(1, "south"))
    topic = world.topics.get("orders")
    assert topic is not None
    assert topic.racks == (frozenset({"south"}),)
