"""The records of a share group: what they say, and their bytes in Kafka's formats."""

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, Final
from uuid import UUID

from penstock.groups.assigned_records import Forms
from penstock.groups.consumer.records import assignment_of, partition_parts
from penstock.groups.consumer.schemas import TargetEpochValue, TargetValue
from penstock.groups.consumer.values import Assignment, GroupEpoch
from penstock.groups.share import schemas
from penstock.groups.share.values import Current, StatePlaces, Subscription

#: Kafka's number for a member that has all that it is to have: members of share groups always do.
_STABLE: Final = 0


class Kind(IntEnum):
    """What a record is about, by the number that its key starts with."""

    SUBSCRIPTION = 10  # Subscription, by member
    GROUP_EPOCH = 11  # GroupEpoch
    TARGET_EPOCH = 12  # int
    TARGET = 13  # Assignment, by member
    CURRENT = 14  # Current, by member
    STATES = 15  # StatePlaces


# --- values to entities ---


def _epoch_entity(value: GroupEpoch) -> Any:
    return schemas.GroupEpochValue(epoch=value.epoch, metadata_hash=value.metadata_hash)


def _subscription_entity(value: Subscription) -> Any:
    return schemas.SubscriptionValue(
        rack_id=value.rack_id,
        client_id=value.client_id,
        client_host=value.client_host,
        subscribed_topic_names=value.topic_names,
    )


def _current_entity(value: Current) -> Any:
    return schemas.CurrentValue(
        member_epoch=value.epoch,
        previous_member_epoch=value.previous_epoch,
        state=_STABLE,
        assigned_partitions=partition_parts(value.assigned),
    )


def _states_entity(value: StatePlaces) -> Any:
    return schemas.StatePlacesValue(
        initializing_topics=_named_parts(value.initializing, value.names),
        initialized_topics=_named_parts(value.initialized, value.names),
        deleting_topics=tuple(
            schemas.NamedTopicPart(topic_id=topic_id, topic_name=value.names[topic_id])
            for topic_id in sorted(value.deleting)
        ),
    )


def _named_parts(places: Assignment, names: Mapping[UUID, str]) -> tuple[Any, ...]:
    return tuple(
        schemas.NamedPartitionsPart(
            topic_id=topic_id, topic_name=names[topic_id], partitions=tuple(sorted(partitions))
        )
        for topic_id, partitions in places.items()
    )


# --- entities to values ---


def _subscription(entity: Any) -> Subscription:
    return Subscription(
        rack_id=entity.rack_id,
        client_id=entity.client_id,
        client_host=entity.client_host,
        topic_names=entity.subscribed_topic_names,
    )


def _current(entity: Any) -> Current:
    return Current(
        epoch=entity.member_epoch,
        previous_epoch=entity.previous_member_epoch,
        assigned=assignment_of(entity.assigned_partitions),
    )


def _states(entity: Any) -> StatePlaces:
    every: Iterable[Any] = (
        *entity.initializing_topics,
        *entity.initialized_topics,
        *entity.deleting_topics,
    )
    return StatePlaces(
        initializing=assignment_of(entity.initializing_topics),
        initialized=assignment_of(entity.initialized_topics),
        deleting=frozenset(part.topic_id for part in entity.deleting_topics),
        names={part.topic_id: part.topic_name for part in every},
    )


_ENTITIES: Final[dict[Kind, Any]] = {
    Kind.SUBSCRIPTION: _subscription_entity,
    Kind.GROUP_EPOCH: _epoch_entity,
    Kind.TARGET_EPOCH: lambda epoch: TargetEpochValue(assignment_epoch=epoch),
    Kind.TARGET: lambda value: TargetValue(topic_partitions=partition_parts(value)),
    Kind.CURRENT: _current_entity,
    Kind.STATES: _states_entity,
}

_PARSERS: Final[dict[Kind, tuple[Any, Any]]] = {
    Kind.SUBSCRIPTION: (schemas.SubscriptionValue, _subscription),
    Kind.GROUP_EPOCH: (
        schemas.GroupEpochValue,
        lambda entity: GroupEpoch(entity.epoch, entity.metadata_hash),
    ),
    Kind.TARGET_EPOCH: (TargetEpochValue, lambda entity: entity.assignment_epoch),
    Kind.TARGET: (TargetValue, lambda entity: assignment_of(entity.topic_partitions)),
    Kind.CURRENT: (schemas.CurrentValue, _current),
    Kind.STATES: (schemas.StatePlacesValue, _states),
}

FORMS: Final = Forms(
    Kind,
    of_group=(Kind.GROUP_EPOCH, Kind.TARGET_EPOCH, Kind.STATES),
    entities=_ENTITIES,
    parsers=_PARSERS,
)
