"""The records of a consumer group: what they say, and their bytes in Kafka's formats."""

from enum import IntEnum
from typing import Any, Final
from uuid import UUID

from penstock.groups.assigned_records import Forms
from penstock.groups.consumer import schemas
from penstock.groups.consumer.values import (
    Assignment,
    ClassicPart,
    Current,
    Epochs,
    GroupEpoch,
    Phase,
    Resolved,
    Subscription,
    TargetEpoch,
)


class Kind(IntEnum):
    """What a record is about, by the number that its key starts with."""

    GROUP_EPOCH = 3  # GroupEpoch
    #: Kafka 4.0 kept the partitions of topics here; a hash in the group's epoch has taken their place.
    PARTITION_METADATA = 4
    SUBSCRIPTION = 5  # Subscription, by member
    TARGET_EPOCH = 6  # TargetEpoch
    TARGET = 7  # Assignment, by member
    CURRENT = 8  # Current, by member
    REGEX = 16  # Resolved, by regular expression


# --- values to entities ---


def _epoch_entity(value: GroupEpoch) -> Any:
    return schemas.GroupEpochValue(epoch=value.epoch, metadata_hash=value.metadata_hash)


def _subscription_entity(value: Subscription) -> Any:
    return schemas.SubscriptionValue(
        instance_id=value.instance_id,
        rack_id=value.rack_id,
        client_id=value.client_id,
        client_host=value.client_host,
        subscribed_topic_names=value.topic_names,
        subscribed_topic_regex=value.topic_regex or None,
        rebalance_timeout_ms=value.rebalance_timeout_ms,
        server_assignor=value.assignor,
        classic_member_metadata=_classic_entity(value.classic),
    )


def _classic_entity(classic: ClassicPart | None) -> Any:
    if classic is None:
        return schemas.NOT_CLASSIC
    protocols = tuple(
        schemas.ClassicProtocolPart(name=name, metadata=data) for name, data in classic.protocols
    )
    return schemas.ClassicMemberPart(
        session_timeout_ms=classic.session_timeout_ms, supported_protocols=protocols
    )


def _target_epoch_entity(value: TargetEpoch) -> Any:
    return schemas.TargetEpochValue(assignment_epoch=value.epoch, assignment_timestamp=value.timestamp_ms)


def partition_parts(value: Assignment) -> tuple[Any, ...]:
    return tuple(
        schemas.TopicPartitionsPart(topic_id=topic_id, partitions=tuple(sorted(partitions)))
        for topic_id, partitions in value.items()
    )


def _target_entity(value: Assignment) -> Any:
    return schemas.TargetValue(topic_partitions=partition_parts(value))


def _current_entity(value: Current) -> Any:
    return schemas.CurrentValue(
        member_epoch=value.epoch,
        previous_member_epoch=value.previous_epoch,
        state=value.phase,
        assigned_partitions=_held_parts(value.assigned, value.since),
        partitions_pending_revocation=_held_parts(value.revoking, value.since),
    )


def _held_parts(value: Assignment, since: Epochs) -> tuple[Any, ...]:
    return tuple(
        schemas.HeldPartitionsPart(
            topic_id=topic_id,
            partitions=(numbers := tuple(sorted(partitions))),
            assignment_epochs=tuple(since[topic_id][number] for number in numbers),
        )
        for topic_id, partitions in value.items()
    )


def _regex_entity(value: Resolved) -> Any:
    return schemas.RegexValue(
        topics=tuple(sorted(value.topics)), version=value.version, timestamp=value.timestamp_ms
    )


# --- entities to values ---


def _subscription(entity: Any) -> Subscription:
    return Subscription(
        instance_id=entity.instance_id,
        rack_id=entity.rack_id,
        client_id=entity.client_id,
        client_host=entity.client_host,
        topic_names=entity.subscribed_topic_names,
        topic_regex=entity.subscribed_topic_regex or "",
        rebalance_timeout_ms=entity.rebalance_timeout_ms,
        assignor=entity.server_assignor,
        classic=_classic(entity.classic_member_metadata),
    )


def _classic(part: Any) -> ClassicPart | None:
    if part.presence < 0:
        return None
    protocols = tuple((protocol.name, protocol.metadata) for protocol in part.supported_protocols)
    return ClassicPart(part.session_timeout_ms, protocols)


def assignment_of(parts: tuple[Any, ...]) -> Assignment:
    return {part.topic_id: frozenset(part.partitions) for part in parts}


def _since(entity: Any) -> Epochs:
    """Before Kafka 4.3 nobody noted it: since the member's epoch at the latest."""
    found: dict[UUID, dict[int, int]] = {}
    for part in (*entity.assigned_partitions, *entity.partitions_pending_revocation):
        epochs = part.assignment_epochs
        if epochs is None:
            epochs = (entity.member_epoch,) * len(part.partitions)
        found.setdefault(part.topic_id, {}).update(zip(part.partitions, epochs, strict=True))
    return found


def _current(entity: Any) -> Current:
    return Current(
        epoch=entity.member_epoch,
        previous_epoch=entity.previous_member_epoch,
        phase=Phase(entity.state),
        assigned=assignment_of(entity.assigned_partitions),
        revoking=assignment_of(entity.partitions_pending_revocation),
        since=_since(entity),
    )


_ENTITIES: Final[dict[Kind, Any]] = {
    Kind.GROUP_EPOCH: _epoch_entity,
    Kind.SUBSCRIPTION: _subscription_entity,
    Kind.TARGET_EPOCH: _target_epoch_entity,
    Kind.TARGET: _target_entity,
    Kind.CURRENT: _current_entity,
    Kind.REGEX: _regex_entity,
}

_PARSERS: Final[dict[Kind, tuple[Any, Any]]] = {
    Kind.GROUP_EPOCH: (
        schemas.GroupEpochValue,
        lambda entity: GroupEpoch(entity.epoch, entity.metadata_hash),
    ),
    Kind.SUBSCRIPTION: (schemas.SubscriptionValue, _subscription),
    Kind.TARGET_EPOCH: (
        schemas.TargetEpochValue,
        lambda entity: TargetEpoch(entity.assignment_epoch, entity.assignment_timestamp),
    ),
    Kind.TARGET: (schemas.TargetValue, lambda entity: assignment_of(entity.topic_partitions)),
    Kind.CURRENT: (schemas.CurrentValue, _current),
    Kind.REGEX: (
        schemas.RegexValue,
        lambda entity: Resolved(frozenset(entity.topics), entity.version, entity.timestamp),
    ),
}

FORMS: Final = Forms(
    Kind,
    of_group=(Kind.GROUP_EPOCH, Kind.PARTITION_METADATA, Kind.TARGET_EPOCH),
    entities=_ENTITIES,
    parsers=_PARSERS,
)
