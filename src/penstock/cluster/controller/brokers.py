"""Brokers say who and where they are, with every start anew."""

from dataclasses import dataclass
from uuid import UUID

from penstock.cluster.controller.leadership import all_partitions, partition_change
from penstock.cluster.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.records import NO_LEADER, BrokerEndpoint, BrokerFeature, RegisterBrokerRecord
from penstock.protocol.errors import ApiError, ErrorCode


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
        partition_change(topic, index, leader=broker)
        for topic, index, partition in all_partitions(image)
        if broker in partition.isr and partition.leader in (broker, NO_LEADER)
    )
    register = _register_record(registration, broker_epoch, fenced=False)
    return Decision((register, *elections), broker_epoch)


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
