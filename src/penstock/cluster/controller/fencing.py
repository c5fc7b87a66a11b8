"""Brokers are fenced, unfenced, let go and forgotten; leadership follows them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from penstock.cluster.controller.leadership import all_partitions, current_broker, partitions_of, registered
from penstock.cluster.controller.partition_change import Changes
from penstock.cluster.controller.rules import ControllerRules
from penstock.cluster.decision import Decision
from penstock.cluster.image import ClusterImage
from penstock.cluster.state import BrokerState

if TYPE_CHECKING:
    from penstock.cluster.seldom_records import BrokerRegistrationChangeRecord

_FENCE, _UNFENCE, _KEEP = 1, -1, 0


def fence_broker(image: ClusterImage, broker_id: int, *, rules: ControllerRules) -> Decision[None]:
    return fence_brokers(image, (broker_id,), rules=rules)


def fence_brokers(
    image: ClusterImage, broker_ids: Collection[int], *, rules: ControllerRules
) -> Decision[None]:
    """They lead nothing and are in sync with nothing. Those that expire together are fenced together, so that
    none of them is elected for a moment, and all that had everything stay eligible."""
    fenced = [_registration_change(registered(image, broker), _FENCE) for broker in broker_ids]
    changes = _without(image, broker_ids, rules)
    return changes.decision(None, first=fenced)


def unfence_broker(
    image: ClusterImage, broker_id: int, *, broker_epoch: int, rules: ControllerRules
) -> Decision[None]:
    """It takes the lead where nobody had it and it may. Raises STALE_BROKER_EPOCH."""
    broker = current_broker(image, broker_id, broker_epoch)
    changes = Changes(image, rules, coming=(broker_id,))
    for topic, index, partition in all_partitions(image):
        if not partition.has_leader and broker_id in partition.replicas:
            changes.add(changes.of(topic, index))
    return changes.decision(None, first=(_registration_change(broker, _UNFENCE),))


def begin_shutdown(image: ClusterImage, broker_id: int, *, rules: ControllerRules) -> Decision[None]:
    """It hands over what it leads, and joins no in-sync set again, but goes on serving until it is told."""
    broker = registered(image, broker_id)
    leaving = _registration_change(broker, _KEEP, in_controlled_shutdown=1)
    return _without(image, (broker_id,), rules).decision(None, first=(leaving,))


def unregister_broker(image: ClusterImage, broker_id: int, *, rules: ControllerRules) -> Decision[None]:
    """Its replicas stay assigned to it until they are reassigned, or it comes back."""
    from penstock.cluster.seldom_records import UnregisterBrokerRecord

    broker = registered(image, broker_id)
    changes = _without(image, (broker_id,), rules)
    gone = UnregisterBrokerRecord(broker_id=broker.id, broker_epoch=broker.epoch)
    return Decision((*changes.records, gone), None, tuple(changes.unclean))


def _registration_change(
    broker: BrokerState, fenced: int, in_controlled_shutdown: int = 0
) -> BrokerRegistrationChangeRecord:
    from penstock.cluster.seldom_records import BrokerRegistrationChangeRecord

    return BrokerRegistrationChangeRecord(
        broker_id=broker.id,
        broker_epoch=broker.epoch,
        fenced=fenced,
        in_controlled_shutdown=in_controlled_shutdown,
    )


def _without(image: ClusterImage, gone: Collection[int], rules: ControllerRules) -> Changes:
    changes = Changes(image, rules, going=gone)
    for topic, index in partitions_of(image, gone):
        change = changes.of(topic, index)
        change.leave_isr(gone)
        changes.add(change)
    return changes
