"""Brokers say who and where they are, with every start anew."""

from typing import Final, NamedTuple
from uuid import UUID

from penstock.cluster.controller.leadership import all_partitions
from penstock.cluster.controller.partition_change import Changes, PartitionChange
from penstock.cluster.controller.rules import ControllerRules
from penstock.cluster.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.records import (
    UNASSIGNED_DIRECTORY,
    BrokerEndpoint,
    BrokerFeature,
    RegisterBrokerRecord,
)
from penstock.cluster.state import BrokerState
from penstock.protocol.errors import ApiError, ErrorCode

#: Directory ids below this one have a meaning of their own.
_RESERVED_DIRECTORIES: Final = 100


class BrokerRegistration(NamedTuple):
    """What a broker says of itself; `incarnation` is new with every start."""

    broker_id: int
    incarnation: UUID
    endpoints: tuple[BrokerEndpoint, ...]
    features: tuple[BrokerFeature, ...] = ()
    rack: str | None = None
    log_dirs: tuple[UUID, ...] = ()
    #: Nothing written was lost: it was stopped cleanly, or its machine has not been restarted since.
    was_clean: bool = True


def register_broker(
    image: ClusterImage,
    registration: BrokerRegistration,
    *,
    broker_epoch: int,
    silent_ms: int | None,
    rules: ControllerRules,
) -> Decision[int]:
    """The broker starts fenced; the reply is its epoch. `silent_ms`: how long its earlier incarnation has not
    been heard of, None when it is known to be gone. Raises DUPLICATE_BROKER_REGISTRATION,
    INVALID_REGISTRATION, UNSUPPORTED_VERSION."""
    known = image.brokers.get(registration.broker_id)
    if known is not None and known.incarnation == registration.incarnation:
        return Decision((), known.epoch)  # asked again: the answer was lost
    refuse_second_incarnation(known, registration, silent_ms, rules)
    _refuse_foreign_directories(image, registration)
    _refuse_unsupported_features(image, registration)
    register = _register_record(registration, broker_epoch, fenced=True)
    changes = Changes(image, rules, going=(registration.broker_id,))
    for change in _own_replicas(changes, registration):
        change.leave_isr((registration.broker_id,))
        changes.add(change)
    return changes.decision(broker_epoch, first=(register,))


def restart_sole_broker(
    image: ClusterImage,
    registration: BrokerRegistration,
    *,
    broker_epoch: int,
    rules: ControllerRules,
) -> Decision[int]:
    """For a cluster of one, whose data folder lock proves that the earlier incarnation is gone: registered
    and unfenced at once, and leader again, in a new epoch, of all that it may lead."""
    broker = registration.broker_id
    register = _register_record(registration, broker_epoch, fenced=False)
    changes = Changes(image, rules, coming=(broker,))
    for change in _own_replicas(changes, registration):
        change.new_epoch = change.old.leader == broker
        changes.add(change)
    return changes.decision(broker_epoch, first=(register,))


def refuse_second_incarnation(
    known: BrokerState | None,
    registration: BrokerRegistration,
    silent_ms: int | None,
    rules: ControllerRules,
) -> None:
    """Two live brokers with one id: the second waits until the first is fenced or surely gone."""
    if known is None or known.fenced or silent_ms is None:
        return
    # Whoever has the first one's folder holds its lock; silence makes sure that the folder was not copied.
    same_folder = bool(registration.log_dirs) and known.log_dirs == registration.log_dirs
    if same_folder and silent_ms >= 2 * rules.heartbeat_interval_ms:
        return
    raise ApiError(
        ErrorCode.duplicate_broker_registration,
        f"Another broker is registered with id {registration.broker_id} and alive.",
    )


def _refuse_foreign_directories(image: ClusterImage, registration: BrokerRegistration) -> None:
    directories = registration.log_dirs
    if len(set(directories)) != len(directories):
        raise ApiError(ErrorCode.invalid_registration, "Duplicate directory ID in request")
    if any(directory.int < _RESERVED_DIRECTORIES for directory in directories):
        raise ApiError(ErrorCode.invalid_registration, "Reserved directory ID in request")
    for broker in image.brokers.values():
        for directory in directories:
            if broker.id != registration.broker_id and directory in broker.log_dirs:
                raise ApiError(
                    ErrorCode.invalid_registration,
                    f"Broker {broker.id} is already registered with directory {directory}",
                )


def _refuse_unsupported_features(image: ClusterImage, registration: BrokerRegistration) -> None:
    offered = {f.name: (f.min_supported_version, f.max_supported_version) for f in registration.features}
    for name, level in image.features.items():
        lowest, highest = offered.get(name, (0, 0))
        if not lowest <= level <= highest:
            raise ApiError(
                ErrorCode.unsupported_version,
                f"Unable to register because the broker does not support finalized version {level} of "
                f"{name}. The broker wants a version between {lowest} and {highest}, inclusive.",
            )


def _own_replicas(changes: Changes, registration: BrokerRegistration) -> list[PartitionChange]:
    """Its replicas as its word leaves them: in doubt after an unclean stop, lost with another directory."""
    broker = registration.broker_id
    found = []
    for topic, index, partition in all_partitions(changes.image):
        if broker not in partition.replicas:
            continue
        change = changes.of(topic, index)
        if not registration.was_clean:
            change.doubt(broker)
        if has_other_directory(change, registration):
            change.lose(broker)
        if len(registration.log_dirs) == 1:
            change.directories[broker] = registration.log_dirs[0]
        found.append(change)
    return found


def has_other_directory(change: PartitionChange, registration: BrokerRegistration) -> bool:
    directory = change.directories[registration.broker_id]
    known = directory is not None and directory != UNASSIGNED_DIRECTORY
    return known and directory not in registration.log_dirs


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
