"""The cluster as its metadata records tell it. Replaying records is the only way it changes."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from penstock.cluster import records as kinds
from penstock.cluster.delta import DeltaNotes, ImageDelta
from penstock.cluster.names import collision_key
from penstock.cluster.state import (
    BrokerState,
    ConfigResource,
    Endpoint,
    PartitionState,
    ResourceType,
    TopicState,
)
from penstock.cluster.tenants import TenantState
from penstock.cluster.wire import MetadataRecord

if TYPE_CHECKING:
    from penstock.cluster import seldom_records as seldom

#: BeginTransactionRecord, EndTransactionRecord, AbortTransactionRecord.
_TRANSACTION_KEYS: Final = frozenset({23, 24, 25})

#: What readers see; two images with the same are equal.
_CONTENTS: Final = ("topics", "brokers", "configs", "features", "next_producer_id", "tenants")


class ClusterImage:
    """Readers take what they need from its attributes, at any time, and change nothing."""

    __slots__ = (
        "_collisions",
        "_notes",
        "_own_topics",
        "_transaction",
        "brokers",
        "configs",
        "features",
        "next_producer_id",
        "tenants",
        "topics",
        "topics_by_id",
    )

    def __init__(self) -> None:
        self.topics: dict[str, TopicState] = {}
        self.topics_by_id: dict[UUID, TopicState] = {}
        self.brokers: dict[int, BrokerState] = {}
        self.configs: dict[ConfigResource, dict[str, str]] = {}
        self.features: dict[str, int] = {}
        self.next_producer_id = 0
        self.tenants = TenantState()
        self._collisions: dict[str, frozenset[str]] = {}
        self._own_topics: set[UUID] = set()  # the others are shared with the image this was forked from
        self._notes = DeltaNotes()
        self._transaction: list[MetadataRecord] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterImage):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _CONTENTS)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<ClusterImage {len(self.topics)} topics, brokers {sorted(self.brokers)}, {self.features}>"

    # --- reading ---

    def config(self, resource_type: ResourceType, name: str) -> dict[str, str]:
        """What has been set for a resource; empty when nothing has."""
        return self.configs.get(ConfigResource(resource_type, name), {})

    def partition(self, topic: str, index: int) -> PartitionState | None:
        found = self.topics.get(topic)
        return None if found is None else found.partitions.get(index)

    def colliding_topic(self, name: str) -> str | None:
        """An existing topic whose name differs from this one only in '.' and '_'."""
        return min(self._collisions.get(collision_key(name), frozenset()) - {name}, default=None)

    def active_brokers(self) -> list[BrokerState]:
        return [broker for broker in self.brokers.values() if broker.is_active]

    @property
    def in_transaction(self) -> bool:
        return self._transaction is not None

    # --- changing ---

    def fork(self) -> "ClusterImage":
        """A copy to replay into while readers still see this one; a topic is copied when it changes."""
        image = ClusterImage()
        image.topics, image.topics_by_id = dict(self.topics), dict(self.topics_by_id)
        image.brokers, image.configs = dict(self.brokers), dict(self.configs)
        image.features, image.next_producer_id = dict(self.features), self.next_producer_id
        image.tenants = self.tenants.fork()
        image._collisions = dict(self._collisions)
        image._transaction = None if self._transaction is None else list(self._transaction)
        return image

    def apply(self, records: Iterable[MetadataRecord]) -> ImageDelta:
        """Replay records and tell what they changed."""
        self._notes = notes = DeltaNotes()
        for record in records:
            self.replay(record)
        return notes.finish()

    def replay(self, record: MetadataRecord) -> None:
        """The one way in. A record that contradicts the image is a bug in what wrote it."""
        if self._transaction is not None and record.__api_key__ not in _TRANSACTION_KEYS:
            self._transaction.append(record)
            return
        handler = _REPLAY.get(type(record)) or _replay_seldom().get(type(record))
        if handler is not None:
            handler(self, record)
        else:
            self.tenants.replay(record)

    def _begin_transaction(self, _: "seldom.BeginTransactionRecord") -> None:
        assert self._transaction is None, "metadata transactions do not nest"
        self._transaction = []

    def _end_transaction(self, _: "seldom.EndTransactionRecord") -> None:
        pending, self._transaction = self._transaction, None
        assert pending is not None, "no metadata transaction to end"
        for record in pending:
            self.replay(record)

    def _abort_transaction(self, _: "seldom.AbortTransactionRecord") -> None:
        assert self._transaction is not None, "no metadata transaction to abort"
        self._transaction = None

    def _topic(self, record: kinds.TopicRecord) -> None:
        assert record.name not in self.topics, f"topic {record.name} exists"
        assert record.topic_id not in self.topics_by_id, f"topic id {record.topic_id} exists"
        topic = TopicState(name=record.name, id=record.topic_id, partitions={})
        self.topics[topic.name] = self.topics_by_id[topic.id] = topic
        self._own_topics.add(topic.id)
        key = collision_key(topic.name)
        self._collisions[key] = self._collisions.get(key, frozenset()) | {topic.name}
        self._notes.topic_created(topic)

    def _remove_topic(self, record: kinds.RemoveTopicRecord) -> None:
        topic = self.topics_by_id.pop(record.topic_id)
        del self.topics[topic.name]
        self.configs.pop(ConfigResource(ResourceType.TOPIC, topic.name), None)
        key = collision_key(topic.name)
        alike = self._collisions.pop(key) - {topic.name}
        if alike:
            self._collisions[key] = alike
        self._notes.topic_deleted(topic)

    def _own_topic(self, topic_id: UUID) -> TopicState:
        topic = self.topics_by_id[topic_id]
        if topic_id not in self._own_topics:
            topic = TopicState(name=topic.name, id=topic.id, partitions=dict(topic.partitions))
            self.topics[topic.name] = self.topics_by_id[topic_id] = topic
            self._own_topics.add(topic_id)
        return topic

    def _partition(self, record: kinds.PartitionRecord) -> None:
        topic = self._own_topic(record.topic_id)
        topic.partitions[record.partition_id] = _new_partition(record)
        self._notes.partition_changed(topic, record.partition_id)

    def _partition_change(self, record: kinds.PartitionChangeRecord) -> None:
        topic = self._own_topic(record.topic_id)
        topic.partitions[record.partition_id] = changed_partition(
            topic.partitions[record.partition_id], record
        )
        self._notes.partition_changed(topic, record.partition_id)

    def _config(self, record: kinds.ConfigRecord) -> None:
        resource = ConfigResource(record.resource_type, record.resource_name)
        values = dict(self.configs.get(resource, {}))
        if record.value is None:
            values.pop(record.name, None)
        else:
            values[record.name] = record.value
        if values:
            self.configs[resource] = values
        else:
            self.configs.pop(resource, None)
        self._notes.configs[resource] = None

    def _register_broker(self, record: kinds.RegisterBrokerRecord) -> None:
        self.brokers[record.broker_id] = BrokerState(
            id=record.broker_id,
            epoch=record.broker_epoch,
            incarnation=record.incarnation_id,
            endpoints={e.name: Endpoint(e.host, e.port, e.security_protocol) for e in record.end_points},
            features={f.name: (f.min_supported_version, f.max_supported_version) for f in record.features},
            rack=record.rack,
            fenced=record.fenced,
            in_controlled_shutdown=record.in_controlled_shutdown,
            log_dirs=record.log_dirs,
        )
        self._notes.brokers[record.broker_id] = None

    def _unregister_broker(self, record: "seldom.UnregisterBrokerRecord") -> None:
        self._current_broker(record.broker_id, record.broker_epoch)
        del self.brokers[record.broker_id]
        self._notes.brokers[record.broker_id] = None

    def _fence_broker(self, record: "seldom.FenceBrokerRecord") -> None:
        self._change_broker(record.id, record.epoch, fenced=True)

    def _unfence_broker(self, record: "seldom.UnfenceBrokerRecord") -> None:
        self._change_broker(record.id, record.epoch, fenced=False)

    def _broker_registration_change(self, record: "seldom.BrokerRegistrationChangeRecord") -> None:
        changes: dict[str, Any] = {}
        if record.fenced:
            changes["fenced"] = record.fenced > 0
        if record.in_controlled_shutdown:
            changes["in_controlled_shutdown"] = True
        if record.log_dirs:
            changes["log_dirs"] = record.log_dirs
        self._change_broker(record.broker_id, record.broker_epoch, **changes)

    def _change_broker(self, broker_id: int, epoch: int, **changes: Any) -> None:
        self.brokers[broker_id] = self._current_broker(broker_id, epoch)._replace(**changes)
        self._notes.brokers[broker_id] = None

    def _current_broker(self, broker_id: int, epoch: int) -> BrokerState:
        broker = self.brokers[broker_id]
        assert broker.epoch == epoch, f"broker {broker_id} is at epoch {broker.epoch}, the record at {epoch}"
        return broker

    def _feature_level(self, record: kinds.FeatureLevelRecord) -> None:
        if record.feature_level == 0:
            self.features.pop(record.name, None)
        else:
            self.features[record.name] = record.feature_level
        self._notes.features_changed = True

    def _producer_ids(self, record: kinds.ProducerIdsRecord) -> None:
        assert record.next_producer_id > self.next_producer_id, "producer ids are never given out twice"
        self.next_producer_id = record.next_producer_id

    def _no_op(self, _: "seldom.NoOpRecord") -> None:
        pass

    # --- checking ---

    def check_invariants(self) -> None:
        """What must hold after every record batch. For tests and simulations."""
        assert {topic.name: topic for topic in self.topics_by_id.values()} == self.topics
        for topic in self.topics.values():
            assert sorted(topic.partitions) == list(range(len(topic.partitions))), topic
            assert topic.partitions, f"{topic.name} has no partitions"
            for partition in topic.partitions.values():
                _check_partition(partition)
        for resource, values in self.configs.items():
            assert values, f"{resource} is kept without values"
            assert resource.type != ResourceType.TOPIC or resource.name in self.topics, resource
        assert {name for names in self._collisions.values() for name in names} == set(self.topics)


def _new_partition(record: kinds.PartitionRecord) -> PartitionState:
    return PartitionState(
        replicas=record.replicas,
        isr=record.isr,
        leader=record.leader,
        leader_epoch=record.leader_epoch,
        partition_epoch=record.partition_epoch,
        directories=record.directories,
        removing_replicas=record.removing_replicas,
        adding_replicas=record.adding_replicas,
        elr=record.eligible_leader_replicas or (),
        last_known_elr=record.last_known_elr or (),
        leader_recovering=record.leader_recovery_state == 1,
    )


def changed_partition(old: PartitionState, record: kinds.PartitionChangeRecord) -> PartitionState:
    """What a change leaves of a partition: a reply is made from it before the record is replayed."""
    new_leader = record.leader != kinds.NO_LEADER_CHANGE
    return PartitionState(
        replicas=_or(record.replicas, old.replicas),
        isr=_or(record.isr, old.isr),
        leader=record.leader if new_leader else old.leader,
        leader_epoch=next_leader_epoch(old, record),
        partition_epoch=old.partition_epoch + 1,
        directories=_or(record.directories, old.directories),
        removing_replicas=_or(record.removing_replicas, old.removing_replicas),
        adding_replicas=_or(record.adding_replicas, old.adding_replicas),
        elr=_or(record.eligible_leader_replicas, old.elr),
        last_known_elr=_or(record.last_known_elr, old.last_known_elr),
        leader_recovering=(
            old.leader_recovering if record.leader_recovery_state == -1 else record.leader_recovery_state == 1
        ),
    )


def next_leader_epoch(old: PartitionState, record: kinds.PartitionChangeRecord) -> int:
    """Naming a leader starts an epoch even when it is the same one: that is how a restart is told."""
    return old.leader_epoch + (record.leader != kinds.NO_LEADER_CHANGE)


def _or(new: Any, old: Any) -> Any:
    return old if new is None else new


def _check_partition(partition: PartitionState) -> None:
    replicas = set(partition.replicas)
    assert replicas, "no replicas"
    assert len(replicas) == len(partition.replicas), partition
    for members in (partition.isr, partition.elr, partition.last_known_elr):
        assert set(members) <= replicas, partition
        assert len(set(members)) == len(members), partition
    for members in (partition.adding_replicas, partition.removing_replicas):
        assert set(members) <= replicas, partition
    assert not set(partition.adding_replicas) & set(partition.removing_replicas), partition
    assert not set(partition.elr) & set(partition.isr), partition
    assert not partition.has_leader or partition.leader in partition.isr, partition
    assert len(partition.directories) == len(partition.replicas), partition
    assert partition.leader_epoch >= 0, partition
    assert partition.partition_epoch >= 0, partition


_REPLAY: dict[type[MetadataRecord], Callable[[ClusterImage, Any], None]] = {
    kinds.TopicRecord: ClusterImage._topic,
    kinds.RemoveTopicRecord: ClusterImage._remove_topic,
    kinds.PartitionRecord: ClusterImage._partition,
    kinds.PartitionChangeRecord: ClusterImage._partition_change,
    kinds.ConfigRecord: ClusterImage._config,
    kinds.RegisterBrokerRecord: ClusterImage._register_broker,
    kinds.FeatureLevelRecord: ClusterImage._feature_level,
    kinds.ProducerIdsRecord: ClusterImage._producer_ids,
}


@cache
def _replay_seldom() -> dict[type[MetadataRecord], Callable[[ClusterImage, Any], None]]:
    from penstock.cluster import seldom_records as seldom

    return {
        seldom.BeginTransactionRecord: ClusterImage._begin_transaction,
        seldom.EndTransactionRecord: ClusterImage._end_transaction,
        seldom.AbortTransactionRecord: ClusterImage._abort_transaction,
        seldom.UnregisterBrokerRecord: ClusterImage._unregister_broker,
        seldom.FenceBrokerRecord: ClusterImage._fence_broker,
        seldom.UnfenceBrokerRecord: ClusterImage._unfence_broker,
        seldom.BrokerRegistrationChangeRecord: ClusterImage._broker_registration_change,
        seldom.NoOpRecord: ClusterImage._no_op,
    }
