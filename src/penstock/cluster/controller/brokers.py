"""Brokers: registration, feature levels and blocks of producer ids.

A broker registers its listeners, features and directories at every start. A feature level is what the whole cluster
supports; it is raised only when every broker supports it. Brokers get producer ids in blocks, so that a single id costs
no metadata record.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple
from uuid import UUID

from penstock.cluster.controller.decision import ControllerConfig, Decision
from penstock.cluster.controller.partition_change import (
    PartitionChangeBuilder,
    PartitionChanges,
    all_partitions,
)
from penstock.cluster.image import BrokerState, ClusterImage, ResourceType
from penstock.cluster.metadata_records import (
    UNASSIGNED_DIRECTORY,
    BrokerEndpoint,
    BrokerFeature,
    ConfigRecord,
    FeatureLevelRecord,
    MetadataRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
)
from penstock.cluster.topic_settings import MIN_ISR
from penstock.protocol.errors import ApiError, ErrorCode

#: Directory ids below this one are reserved for special meanings.
_RESERVED_DIRECTORIES: Final = 100


class BrokerRegistration(NamedTuple):
    """What a broker reports about itself when it registers; `incarnation` is new with every start."""

    broker_id: int
    incarnation: UUID
    endpoints: tuple[BrokerEndpoint, ...]
    features: tuple[BrokerFeature, ...] = ()
    rack: str | None = None
    log_dirs: tuple[UUID, ...] = ()
    #: Whether no written data was lost: the broker stopped cleanly, or its machine has not restarted since.
    was_clean: bool = True


def register_broker(
    image: ClusterImage,
    registration: BrokerRegistration,
    *,
    broker_epoch: int,
    silent_ms: int | None,
    rules: ControllerConfig,
) -> Decision[int]:
    """Registers the broker as fenced and replies with its epoch.

    `silent_ms` is the time since the controller last heard from the broker's earlier incarnation, None if that is known
    to be gone. Raises DUPLICATE_BROKER_REGISTRATION, INVALID_REGISTRATION, UNSUPPORTED_VERSION.
    """
    known = image.brokers.get(registration.broker_id)
    if known is not None and known.incarnation == registration.incarnation:
        return Decision((), known.epoch)  # a retry: the response was lost
    refuse_second_incarnation(known, registration, silent_ms, rules)
    _refuse_foreign_directories(image, registration)
    _refuse_unsupported_features(image, registration)
    register = _register_record(registration, broker_epoch, fenced=True)
    changes = PartitionChanges(image, rules, going=(registration.broker_id,))
    for change in _own_replicas(changes, registration):
        change.leave_isr((registration.broker_id,))
        changes.add(change)
    return changes.decision(broker_epoch, first=(register,))


def restart_sole_broker(
    image: ClusterImage,
    registration: BrokerRegistration,
    *,
    broker_epoch: int,
    rules: ControllerConfig,
) -> Decision[int]:
    """For a cluster of one broker, whose data folder lock proves that the earlier incarnation is gone.

    Registers the broker unfenced. It becomes leader, in a new epoch, of every partition that it may lead.
    """
    broker = registration.broker_id
    register = _register_record(registration, broker_epoch, fenced=False)
    changes = PartitionChanges(image, rules, coming=(broker,))
    for change in _own_replicas(changes, registration):
        change.new_epoch = change.old.leader == broker
        changes.add(change)
    return changes.decision(broker_epoch, first=(register,))


def refuse_second_incarnation(
    known: BrokerState | None,
    registration: BrokerRegistration,
    silent_ms: int | None,
    rules: ControllerConfig,
) -> None:
    """Refuses a second broker with the same id until the first one is fenced or certainly gone."""
    if known is None or known.fenced or silent_ms is None:
        return
    # A broker that has the first one's folder also holds its lock. The silence rules out that the folder is a copy.
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


def _own_replicas(
    changes: PartitionChanges, registration: BrokerRegistration
) -> list[PartitionChangeBuilder]:
    """Its partitions, updated: a replica is uncertain after an unclean stop, and lost if its directory is gone."""
    broker = registration.broker_id
    found = []
    for topic, index, partition in all_partitions(changes.image):
        if broker not in partition.replicas:
            continue
        change = changes.of(topic, index)
        if not registration.was_clean:
            change.doubt(broker)
        if has_other_directory(change, registration):
            change.mark_lost(broker)
        if len(registration.log_dirs) == 1:
            change.directories[broker] = registration.log_dirs[0]
        found.append(change)
    return found


def has_other_directory(change: PartitionChangeBuilder, registration: BrokerRegistration) -> bool:
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


ELIGIBLE_LEADER_REPLICAS: Final = "eligible.leader.replicas.version"


def set_feature_levels(
    image: ClusterImage, levels: Mapping[str, int], *, isr_min: str | None = None
) -> Decision[None]:
    """Level 0 removes a feature. Raises INVALID_UPDATE_VERSION when a registered broker lacks the level.

    With eligible leader replicas all brokers must use the same min.insync.replicas: `isr_min`, the value configured on
    the deciding node, becomes the cluster-wide value, unless there already is one.
    """
    for name, level in levels.items():
        _refuse_unsupported_level(image, name, level)
    records: list[MetadataRecord] = [
        FeatureLevelRecord(name=name, feature_level=level)
        for name, level in sorted(levels.items())
        if image.features.get(name, 0) != level
    ]
    begins = levels.get(ELIGIBLE_LEADER_REPLICAS, 0) > image.features.get(ELIGIBLE_LEADER_REPLICAS, 0)
    if begins and isr_min is not None and MIN_ISR not in image.config(ResourceType.BROKER, ""):
        records.append(
            ConfigRecord(resource_type=ResourceType.BROKER, resource_name="", name=MIN_ISR, value=isr_min)
        )
    return Decision(tuple(records), None)


def _refuse_unsupported_level(image: ClusterImage, name: str, level: int) -> None:
    for broker in image.brokers.values():
        lowest, highest = broker.features.get(name, (0, 0))
        if level and not lowest <= level <= highest:
            raise ApiError(
                ErrorCode.invalid_update_version,
                f"Invalid update version {level} for feature {name}. Broker {broker.id} only supports "
                f"versions {lowest}-{highest}",
            )


PRODUCER_ID_BLOCK: Final = 1000
_PRODUCER_ID_MAX = (1 << 63) - 1


class ProducerIdBlock(NamedTuple):
    first: int
    length: int


def allocate_producer_ids(
    image: ClusterImage, *, broker_id: int, broker_epoch: int
) -> Decision[ProducerIdBlock]:
    """Raises STALE_BROKER_EPOCH for a broker that has been replaced."""
    broker = image.brokers.get(broker_id)
    if broker is None or broker.epoch != broker_epoch:
        raise ApiError(ErrorCode.stale_broker_epoch, f"Broker {broker_id} is not registered at this epoch.")
    first = image.next_producer_id
    if first > _PRODUCER_ID_MAX - PRODUCER_ID_BLOCK:
        raise ApiError(ErrorCode.unknown_server_error, "All producer ids have been used.")
    record = ProducerIdsRecord(
        broker_id=broker_id, broker_epoch=broker_epoch, next_producer_id=first + PRODUCER_ID_BLOCK
    )
    return Decision((record,), ProducerIdBlock(first, PRODUCER_ID_BLOCK))
