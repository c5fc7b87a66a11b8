"""Brokers come, are fenced and unfenced, and go; leadership follows them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from uuid import UUID

from penstock.cluster.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.records import (
    NO_LEADER,
    BrokerEndpoint,
    BrokerFeature,
    BrokerRegistrationChangeRecord,
    PartitionChangeRecord,
    RegisterBrokerRecord,
    UnregisterBrokerRecord,
)
from penstock.cluster.state import BrokerState, PartitionState, TopicState
from penstock.protocol.errors import ApiError, ErrorCode

_FENCE, _UNFENCE = 1, -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRegistration:
    """What a broker says of itself; `incarnation` is new with every start."""

    broker_id: int
    incarnation: UUID
    endpoints: tuple[BrokerEndpoint, ...]
    features: tuple[BrokerFeature, ...] = ()
    rack: str | None = None
    log_dirs: tuple[UUID, ...] = ()


def register_broker(
    image: ClusterImage, registration: BrokerRegistration, *, broker_epoch: int
) -> Decision[int]:
    """The broker starts fenced; the reply is its epoch. Raises DUPLICATE_BROKER_REGISTRATION."""
    known = image.brokers.get(registration.broker_id)
    if known is not None and not known.fenced and known.incarnation != registration.incarnation:
        raise ApiError(
            ErrorCode.duplicate_broker_registration,
            f"Another broker is registered with id {registration.broker_id} and alive.",
        )
    return Decision((_register_record(registration, broker_epoch, fenced=True),), broker_epoch)


def restart_sole_broker(
    image: ClusterImage, registration: BrokerRegistration, *, broker_epoch: int
) -> Decision[int]:
    """For a cluster of one, whose data folder lock proves that the earlier incarnation is gone: registered
    and unfenced at once, and leader again, in a new epoch, of all that has it in sync."""
    broker = registration.broker_id
    elections = tuple(
        _change(topic, index, leader=broker)
        for topic, index, partition in _partitions(image)
        if broker in partition.isr and partition.leader in (broker, NO_LEADER)
    )
    register = _register_record(registration, broker_epoch, fenced=False)
    return Decision((register, *elections), broker_epoch)


def fence_broker(image: ClusterImage, broker_id: int) -> Decision[None]:
    """It leaves every in-sync set it is not the last of, and leads nothing."""
    broker = _registered(image, broker_id)
    change = _registration_change(broker, _FENCE)
    return Decision((change, *_leadership_without(image, broker_id)), None)


def unfence_broker(image: ClusterImage, broker_id: int, *, broker_epoch: int) -> Decision[None]:
    """It takes the lead where nobody had it and it is in sync. Raises STALE_BROKER_EPOCH."""
    broker = _registered(image, broker_id)
    if broker.epoch != broker_epoch:
        raise ApiError(
            ErrorCode.stale_broker_epoch,
            f"Broker {broker_id} is at epoch {broker.epoch}, not {broker_epoch}.",
        )
    elections = tuple(
        _change(topic, index, leader=broker_id)
        for topic, index, partition in _partitions(image)
        if not partition.has_leader and broker_id in partition.isr
    )
    return Decision((_registration_change(broker, _UNFENCE), *elections), None)


def unregister_broker(image: ClusterImage, broker_id: int) -> Decision[None]:
    broker = _registered(image, broker_id)
    gone = UnregisterBrokerRecord(broker_id=broker.id, broker_epoch=broker.epoch)
    return Decision((*_leadership_without(image, broker_id), gone), None)


def _registered(image: ClusterImage, broker_id: int) -> BrokerState:
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise ApiError(
            ErrorCode.broker_id_not_registered, f"Broker ID {broker_id} is not currently registered"
        )
    return broker


def _register_record(
    registration: BrokerRegistration, broker_epoch: int, *, fenced: bool
) -> RegisterBrokerRecord:
    return RegisterBrokerRecord(
        broker_id=registration.broker_id,
        incarnation_id=registration.incarnation,
        broker_epoch=broker_epoch,
        end_points=registration.endpoints,
        features=registration.features,
        rack=registration.rack,
        fenced=fenced,
        log_dirs=registration.log_dirs,
    )


def _registration_change(broker: BrokerState, fenced: int) -> BrokerRegistrationChangeRecord:
    return BrokerRegistrationChangeRecord(broker_id=broker.id, broker_epoch=broker.epoch, fenced=fenced)


def _leadership_without(image: ClusterImage, broker_id: int) -> list[PartitionChangeRecord]:
    return [
        _without(image, topic, index, partition, broker_id)
        for topic, index, partition in _partitions(image)
        if broker_id in partition.isr
    ]


def _without(
    image: ClusterImage, topic: TopicState, index: int, partition: PartitionState, gone: int
) -> PartitionChangeRecord:
    others = tuple(broker for broker in partition.isr if broker != gone)
    # The last in-sync replica stays listed: it alone is known to have everything that was acknowledged.
    change = _change(topic, index)
    if others:
        change = replace(change, isr=others)
    if partition.leader == gone:
        change = replace(change, leader=_first_active(image, partition.replicas, others))
    return change


def _first_active(image: ClusterImage, replicas: tuple[int, ...], in_sync: tuple[int, ...]) -> int:
    return next(
        (
            broker
            for broker in replicas
            if broker in in_sync and broker in image.brokers and image.brokers[broker].is_active
        ),
        NO_LEADER,
    )


def _partitions(image: ClusterImage) -> Iterator[tuple[TopicState, int, PartitionState]]:
    for topic in image.topics.values():
        for index, partition in topic.partitions.items():
            yield topic, index, partition


def _change(topic: TopicState, index: int, **what: int) -> PartitionChangeRecord:
    return PartitionChangeRecord(partition_id=index, topic_id=topic.id, **what)  # type: ignore[arg-type]
