"""The cluster image: the state of the cluster as its metadata records describe it.

Replaying records is the only way in which an image changes. The module defines the values that an image is made of, the
image, and the delta: what a run of records changed, which is all that a broker has to look at after it has replayed
them. `diff_images` computes the delta between two images, for a node that has to move from one to the other without the
records between them.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from uuid import UUID

from penstock.cluster import metadata_records
from penstock.cluster.metadata_records import NO_LEADER, MetadataRecord
from penstock.cluster.security_image import SecurityImage
from penstock.cluster.topic_names import collision_key
from penstock.protocol.steps import Steps, finish

if TYPE_CHECKING:
    from penstock.cluster import rare_records


class ResourceType(IntEnum):
    """The kind of resource that a configuration belongs to, numbered as in DescribeConfigs. TENANT is our own."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32
    TENANT = 64


class ConfigResource(NamedTuple):
    """A broker named "" stands for all brokers."""

    type: int
    name: str


class Endpoint(NamedTuple):
    """The address of a broker's listener."""

    host: str
    port: int
    security_protocol: int = 0


class PartitionState(NamedTuple):
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    leader: int
    leader_epoch: int
    partition_epoch: int
    directories: tuple[UUID | None, ...]
    removing_replicas: tuple[int, ...] = ()
    adding_replicas: tuple[int, ...] = ()
    elr: tuple[int, ...] = ()
    last_known_elr: tuple[int, ...] = ()
    #: The leader was elected uncleanly and has not yet recovered.
    leader_recovering: bool = False

    @property
    def has_leader(self) -> bool:
        return self.leader != NO_LEADER


class TopicState(NamedTuple):
    """Only replay changes `partitions`, before readers see it; partition numbers run from 0 without gaps."""

    name: str
    id: UUID
    partitions: dict[int, PartitionState]


class BrokerState(NamedTuple):
    id: int
    epoch: int
    incarnation: UUID
    endpoints: Mapping[str, Endpoint]  # by listener name
    features: Mapping[str, tuple[int, int]]
    rack: str | None
    fenced: bool
    in_controlled_shutdown: bool
    log_dirs: tuple[UUID, ...]

    @property
    def rack_or_host(self) -> str:
        """The failure domain: the rack, or without a rack all nodes of one host."""
        if self.rack is not None:
            return self.rack
        return next((f"host {endpoint.host}" for endpoint in self.endpoints.values()), "")

    @property
    def is_active(self) -> bool:
        """Whether the broker may lead and may be in an ISR."""
        return not self.fenced and not self.in_controlled_shutdown


class TopicPartition(NamedTuple):
    topic: str
    partition: int


class ImageDelta(NamedTuple):
    """What a run of records changed.

    A topic that is created and deleted within the run is in neither list. A topic that is re-created under its old name
    is in both, so readers handle deletions first.
    """

    topics_deleted: tuple[TopicState, ...] = ()  # their last states
    topics_created: tuple[TopicState, ...] = ()
    partitions_changed: tuple[TopicPartition, ...] = ()  # including new ones; all exist in the image
    configs_changed: tuple[ConfigResource, ...] = ()
    brokers_changed: tuple[int, ...] = ()
    features_changed: bool = False
    security_changed: bool = False

    def __bool__(self) -> bool:
        return self != _EMPTY_DELTA


class DeltaBuilder:
    """Collects an ImageDelta while records are replayed. Dictionaries keep the order and drop duplicates."""

    __slots__ = (
        "brokers",
        "configs",
        "created",
        "deleted",
        "features_changed",
        "partitions",
        "security_changed",
    )

    def __init__(self) -> None:
        self.created: dict[UUID, TopicState] = {}
        self.deleted: dict[UUID, TopicState] = {}
        self.partitions: dict[tuple[UUID, int], TopicPartition] = {}
        self.configs: dict[ConfigResource, None] = {}
        self.brokers: dict[int, None] = {}
        self.features_changed = False
        self.security_changed = False

    def topic_created(self, topic: TopicState) -> None:
        self.created[topic.id] = topic

    def topic_deleted(self, topic: TopicState) -> None:
        if self.created.pop(topic.id, None) is None:
            self.deleted[topic.id] = topic
        for index in topic.partitions:
            self.partitions.pop((topic.id, index), None)
        self.configs.pop(ConfigResource(ResourceType.TOPIC, topic.name), None)

    def partition_changed(self, topic: TopicState, index: int) -> None:
        self.partitions[topic.id, index] = TopicPartition(topic.name, index)

    def finish(self) -> ImageDelta:
        return ImageDelta(
            topics_deleted=tuple(self.deleted.values()),
            topics_created=tuple(self.created.values()),
            partitions_changed=tuple(self.partitions.values()),
            configs_changed=tuple(self.configs),
            brokers_changed=tuple(self.brokers),
            features_changed=self.features_changed,
            security_changed=self.security_changed,
        )


_EMPTY_DELTA = ImageDelta()


#: BeginTransactionRecord, EndTransactionRecord, AbortTransactionRecord.
_TRANSACTION_KEYS: Final = frozenset({23, 24, 25})

#: What readers see, and what equality compares.
_CONTENTS: Final = ("topics", "brokers", "configs", "features", "next_producer_id", "security")


class ClusterImage:
    """Readers may read its attributes at any time, and must not change them."""

    __slots__ = (
        "_collisions",
        "_notes",
        "_own_topics",
        "_transaction",
        "brokers",
        "configs",
        "features",
        "next_producer_id",
        "security",
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
        self.security = SecurityImage()
        self._collisions: dict[str, frozenset[str]] = {}
        self._own_topics: set[UUID] = set()  # the others are shared with the image that this was forked from
        self._notes = DeltaBuilder()
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
        """Returns what has been set for a resource; empty if nothing has."""
        return self.configs.get(ConfigResource(resource_type, name), {})

    def partition(self, topic: str, index: int) -> PartitionState | None:
        found = self.topics.get(topic)
        return None if found is None else found.partitions.get(index)

    def colliding_topic(self, name: str) -> str | None:
        """Returns an existing topic whose name differs from this one only in '.' and '_'."""
        return min(self._collisions.get(collision_key(name), frozenset()) - {name}, default=None)

    def active_brokers(self) -> list[BrokerState]:
        return [broker for broker in self.brokers.values() if broker.is_active]

    @property
    def in_transaction(self) -> bool:
        return self._transaction is not None

    # --- changing ---

    def fork(self) -> "ClusterImage":
        """Returns a copy to replay into while readers still use this image; a topic is copied when it changes."""
        image = ClusterImage()
        image.topics, image.topics_by_id = dict(self.topics), dict(self.topics_by_id)
        image.brokers, image.configs = dict(self.brokers), dict(self.configs)
        image.features, image.next_producer_id = dict(self.features), self.next_producer_id
        image.security = self.security.fork()
        image._collisions = dict(self._collisions)
        image._transaction = None if self._transaction is None else list(self._transaction)
        return image

    def apply(self, records: Iterable[MetadataRecord]) -> ImageDelta:
        """Replays the records and returns what they changed."""
        return finish(self.apply_in_steps(records))

    def apply_in_steps(self, records: Iterable[MetadataRecord]) -> Steps[ImageDelta]:
        """Only for an image that no other code reads or changes meanwhile."""
        self._notes = notes = DeltaBuilder()
        for record in records:
            self.replay(record)
            yield
        return notes.finish()

    def replay(self, record: MetadataRecord) -> None:
        """The only way to change the image. A record that contradicts the image is a bug in its writer."""
        if self._transaction is not None and record.__api_key__ not in _TRANSACTION_KEYS:
            self._transaction.append(record)
            return
        handler = _REPLAY.get(type(record)) or _replay_rare().get(type(record))
        if handler is not None:
            handler(self, record)
        else:
            self.security.replay(record)
            self._notes.security_changed = True

    def _begin_transaction(self, _: "rare_records.BeginTransactionRecord") -> None:
        assert self._transaction is None, "metadata transactions do not nest"
        self._transaction = []

    def _end_transaction(self, _: "rare_records.EndTransactionRecord") -> None:
        pending, self._transaction = self._transaction, None
        assert pending is not None, "no metadata transaction to end"
        for record in pending:
            self.replay(record)

    def _abort_transaction(self, _: "rare_records.AbortTransactionRecord") -> None:
        assert self._transaction is not None, "no metadata transaction to abort"
        self._transaction = None

    def _topic(self, record: metadata_records.TopicRecord) -> None:
        assert record.name not in self.topics, f"topic {record.name} exists"
        assert record.topic_id not in self.topics_by_id, f"topic id {record.topic_id} exists"
        topic = TopicState(name=record.name, id=record.topic_id, partitions={})
        self.topics[topic.name] = self.topics_by_id[topic.id] = topic
        self._own_topics.add(topic.id)
        key = collision_key(topic.name)
        self._collisions[key] = self._collisions.get(key, frozenset()) | {topic.name}
        self._notes.topic_created(topic)

    def _remove_topic(self, record: metadata_records.RemoveTopicRecord) -> None:
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

    def _partition(self, record: metadata_records.PartitionRecord) -> None:
        topic = self._own_topic(record.topic_id)
        topic.partitions[record.partition_id] = _new_partition(record)
        self._notes.partition_changed(topic, record.partition_id)

    def _partition_change(self, record: metadata_records.PartitionChangeRecord) -> None:
        topic = self._own_topic(record.topic_id)
        topic.partitions[record.partition_id] = changed_partition(
            topic.partitions[record.partition_id], record
        )
        self._notes.partition_changed(topic, record.partition_id)

    def _config(self, record: metadata_records.ConfigRecord) -> None:
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

    def _register_broker(self, record: metadata_records.RegisterBrokerRecord) -> None:
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

    def _unregister_broker(self, record: "rare_records.UnregisterBrokerRecord") -> None:
        self._current_broker(record.broker_id, record.broker_epoch)
        del self.brokers[record.broker_id]
        self._notes.brokers[record.broker_id] = None

    def _fence_broker(self, record: "rare_records.FenceBrokerRecord") -> None:
        self._change_broker(record.id, record.epoch, fenced=True)

    def _unfence_broker(self, record: "rare_records.UnfenceBrokerRecord") -> None:
        self._change_broker(record.id, record.epoch, fenced=False)

    def _broker_registration_change(self, record: "rare_records.BrokerRegistrationChangeRecord") -> None:
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

    def _feature_level(self, record: metadata_records.FeatureLevelRecord) -> None:
        if record.feature_level == 0:
            self.features.pop(record.name, None)
        else:
            self.features[record.name] = record.feature_level
        self._notes.features_changed = True

    def _producer_ids(self, record: metadata_records.ProducerIdsRecord) -> None:
        assert record.next_producer_id > self.next_producer_id, "producer ids are never given out twice"
        self.next_producer_id = record.next_producer_id

    def _no_op(self, _: "rare_records.NoOpRecord") -> None:
        pass

    # --- checking ---

    def check_invariants(self) -> None:
        """Checks what must hold after every record batch. For tests and simulations."""
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


def _new_partition(record: metadata_records.PartitionRecord) -> PartitionState:
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


def changed_partition(old: PartitionState, record: metadata_records.PartitionChangeRecord) -> PartitionState:
    """Returns the partition after the change. A reply is built from it before the record is replayed."""
    new_leader = record.leader != metadata_records.NO_LEADER_CHANGE
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


def next_leader_epoch(old: PartitionState, record: metadata_records.PartitionChangeRecord) -> int:
    """A record that names a leader starts an epoch, even for the same leader: a restarted leader needs a new one."""
    return old.leader_epoch + (record.leader != metadata_records.NO_LEADER_CHANGE)


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
    metadata_records.TopicRecord: ClusterImage._topic,
    metadata_records.RemoveTopicRecord: ClusterImage._remove_topic,
    metadata_records.PartitionRecord: ClusterImage._partition,
    metadata_records.PartitionChangeRecord: ClusterImage._partition_change,
    metadata_records.ConfigRecord: ClusterImage._config,
    metadata_records.RegisterBrokerRecord: ClusterImage._register_broker,
    metadata_records.FeatureLevelRecord: ClusterImage._feature_level,
    metadata_records.ProducerIdsRecord: ClusterImage._producer_ids,
}


@cache
def _replay_rare() -> dict[type[MetadataRecord], Callable[[ClusterImage, Any], None]]:
    from penstock.cluster import rare_records

    return {
        rare_records.BeginTransactionRecord: ClusterImage._begin_transaction,
        rare_records.EndTransactionRecord: ClusterImage._end_transaction,
        rare_records.AbortTransactionRecord: ClusterImage._abort_transaction,
        rare_records.UnregisterBrokerRecord: ClusterImage._unregister_broker,
        rare_records.FenceBrokerRecord: ClusterImage._fence_broker,
        rare_records.UnfenceBrokerRecord: ClusterImage._unfence_broker,
        rare_records.BrokerRegistrationChangeRecord: ClusterImage._broker_registration_change,
        rare_records.NoOpRecord: ClusterImage._no_op,
    }


Key = TypeVar("Key")


def diff_images(old: ClusterImage, new: ClusterImage) -> ImageDelta:
    """Returns the delta that replaying the records between the two images would give."""
    return ImageDelta(
        topics_deleted=tuple(topic for id, topic in old.topics_by_id.items() if id not in new.topics_by_id),
        topics_created=tuple(topic for id, topic in new.topics_by_id.items() if id not in old.topics_by_id),
        partitions_changed=tuple(_partitions_changed(old, new)),
        configs_changed=_changed_keys(old.configs, new.configs),
        brokers_changed=_changed_keys(old.brokers, new.brokers),
        features_changed=old.features != new.features,
        security_changed=old.security != new.security,
    )


def _partitions_changed(old: ClusterImage, new: ClusterImage) -> list[TopicPartition]:
    changed = []
    for id, topic in new.topics_by_id.items():
        before = old.topics_by_id.get(id)
        if before is topic:
            continue
        known = before.partitions if before is not None else {}
        changed += [
            TopicPartition(topic.name, index)
            for index, state in topic.partitions.items()
            if known.get(index) != state
        ]
    return changed


def _changed_keys(old: Mapping[Key, object], new: Mapping[Key, object]) -> tuple[Key, ...]:
    return tuple(key for key in {**old, **new} if old.get(key) != new.get(key))
