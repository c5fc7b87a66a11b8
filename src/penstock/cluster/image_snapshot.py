"""The records that rebuild an image: the content of a snapshot of the metadata log."""

from collections.abc import Iterator
from typing import Final

from penstock.cluster.image import BrokerState, ClusterImage, PartitionState, ResourceType, TopicState
from penstock.cluster.metadata_records import (
    BrokerEndpoint,
    BrokerFeature,
    ConfigRecord,
    FeatureLevelRecord,
    MetadataRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
    TopicRecord,
)

#: Records in one batch, so that batches do not grow with the cluster.
RECORDS_MAX: Final = 500


def snapshot_records(image: ClusterImage) -> Iterator[list[MetadataRecord]]:
    """Yields batches that rebuild an equal image when replayed into a new one. The image must not change meanwhile."""
    assert not image.in_transaction, "half a metadata transaction has no snapshot"
    batch: list[MetadataRecord] = []
    for record in _records(image):
        batch.append(record)
        if len(batch) == RECORDS_MAX:
            yield batch
            batch = []
    if batch:
        yield batch


def _records(image: ClusterImage) -> Iterator[MetadataRecord]:
    for name, level in image.features.items():
        yield FeatureLevelRecord(name=name, feature_level=level)
    for broker in image.brokers.values():
        yield _broker(broker)
    for resource, values in image.configs.items():
        if resource.type != ResourceType.TOPIC:
            yield from _configs(resource.type, resource.name, values)
    for topic in image.topics.values():
        yield TopicRecord(name=topic.name, topic_id=topic.id)
        # Before the partitions, so that a broker that opens them knows their settings.
        yield from _configs(ResourceType.TOPIC, topic.name, image.config(ResourceType.TOPIC, topic.name))
        yield from (_partition(topic, index, partition) for index, partition in topic.partitions.items())
    if image.next_producer_id:
        yield ProducerIdsRecord(broker_id=-1, broker_epoch=-1, next_producer_id=image.next_producer_id)
    yield from image.security.records()


def _broker(broker: BrokerState) -> RegisterBrokerRecord:
    return RegisterBrokerRecord(
        broker_id=broker.id,
        incarnation_id=broker.incarnation,
        broker_epoch=broker.epoch,
        end_points=tuple(
            BrokerEndpoint(name=name, host=e.host, port=e.port, security_protocol=e.security_protocol)
            for name, e in broker.endpoints.items()
        ),
        features=tuple(
            BrokerFeature(name=name, min_supported_version=lowest, max_supported_version=highest)
            for name, (lowest, highest) in broker.features.items()
        ),
        rack=broker.rack,
        fenced=broker.fenced,
        in_controlled_shutdown=broker.in_controlled_shutdown,
        log_dirs=broker.log_dirs,
    )


def _configs(resource_type: int, resource: str, values: dict[str, str]) -> Iterator[ConfigRecord]:
    for name, value in values.items():
        yield ConfigRecord(resource_type=resource_type, resource_name=resource, name=name, value=value)


def _partition(topic: TopicState, index: int, partition: PartitionState) -> PartitionRecord:
    return PartitionRecord(
        partition_id=index,
        topic_id=topic.id,
        replicas=partition.replicas,
        isr=partition.isr,
        removing_replicas=partition.removing_replicas,
        adding_replicas=partition.adding_replicas,
        leader=partition.leader,
        leader_recovery_state=int(partition.leader_recovering),
        leader_epoch=partition.leader_epoch,
        partition_epoch=partition.partition_epoch,
        directories=partition.directories,
        eligible_leader_replicas=partition.elr or None,
        last_known_elr=partition.last_known_elr or None,
    )
