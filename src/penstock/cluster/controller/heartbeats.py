"""Broker heartbeats: brokers are fenced, unfenced, shut down and unregistered, and leadership follows.

A broker is unfenced once it has caught up, fenced when it requests it, and may shut down once it leads no partition.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from penstock.cluster.controller.brokers import BrokerSessions
from penstock.cluster.controller.decision import ControllerConfig, Decision
from penstock.cluster.controller.partition_change import (
    PartitionChanges,
    affected_partitions,
    all_partitions,
    current_broker,
    leads_any_partition,
    registered_broker,
)
from penstock.cluster.image import BrokerState, ClusterImage

if TYPE_CHECKING:
    from penstock.cluster.rare_records import BrokerRegistrationChangeRecord


_FENCE, _UNFENCE, _LEAVE_FENCING = 1, -1, 0


def fence_broker(image: ClusterImage, broker_id: int, *, rules: ControllerConfig) -> Decision[None]:
    return fence_brokers(image, (broker_id,), rules=rules)


def fence_brokers(
    image: ClusterImage, broker_ids: Collection[int], *, rules: ControllerConfig
) -> Decision[None]:
    """Removes the brokers from leadership and from every ISR.

    Brokers that expire together are fenced together. Otherwise one of them could be elected for a moment, and replicas
    that have every acknowledged record would not stay eligible.
    """
    fenced = [_registration_change(registered_broker(image, broker), _FENCE) for broker in broker_ids]
    changes = _without_brokers(image, broker_ids, rules)
    return changes.decision(None, first=fenced)


def unfence_broker(
    image: ClusterImage, broker_id: int, *, broker_epoch: int, rules: ControllerConfig
) -> Decision[None]:
    """Makes the broker leader of leaderless partitions that it may lead. Raises STALE_BROKER_EPOCH."""
    broker = current_broker(image, broker_id, broker_epoch)
    changes = PartitionChanges(image, rules, coming=(broker_id,))
    for topic, index, partition in all_partitions(image):
        if not partition.has_leader and broker_id in partition.replicas:
            changes.add(changes.of(topic, index))
    return changes.decision(None, first=(_registration_change(broker, _UNFENCE),))


def begin_shutdown(image: ClusterImage, broker_id: int, *, rules: ControllerConfig) -> Decision[None]:
    """Moves leadership away. The broker rejoins no ISR, but serves until a heartbeat reply lets it shut down."""
    broker = registered_broker(image, broker_id)
    leaving = _registration_change(broker, _LEAVE_FENCING, in_controlled_shutdown=1)
    return _without_brokers(image, (broker_id,), rules).decision(None, first=(leaving,))


def unregister_broker(image: ClusterImage, broker_id: int, *, rules: ControllerConfig) -> Decision[None]:
    """Its replicas stay assigned to it until they are reassigned, or it comes back."""
    from penstock.cluster.rare_records import UnregisterBrokerRecord

    broker = registered_broker(image, broker_id)
    changes = _without_brokers(image, (broker_id,), rules)
    gone = UnregisterBrokerRecord(broker_id=broker.id, broker_epoch=broker.epoch)
    return Decision((*changes.records, gone), None, tuple(changes.unclean))


def _registration_change(
    broker: BrokerState, fenced: int, in_controlled_shutdown: int = 0
) -> BrokerRegistrationChangeRecord:
    from penstock.cluster.rare_records import BrokerRegistrationChangeRecord

    return BrokerRegistrationChangeRecord(
        broker_id=broker.id,
        broker_epoch=broker.epoch,
        fenced=fenced,
        in_controlled_shutdown=in_controlled_shutdown,
    )


def _without_brokers(image: ClusterImage, gone: Collection[int], rules: ControllerConfig) -> PartitionChanges:
    changes = PartitionChanges(image, rules, going=gone)
    for topic, index in affected_partitions(image, gone):
        change = changes.of(topic, index)
        change.leave_isr(gone)
        changes.add(change)
    return changes


class BrokerHeartbeat(NamedTuple):
    broker_id: int
    broker_epoch: int
    metadata_offset: int  # the last one that the broker has applied
    want_fence: bool = False
    want_shutdown: bool = False


class BrokerHeartbeatReply(NamedTuple):
    """The broker's state once the records are applied."""

    is_caught_up: bool
    is_fenced: bool
    should_shut_down: bool = False


def heartbeat(
    image: ClusterImage,
    sessions: BrokerSessions,
    beat: BrokerHeartbeat,
    *,
    committed_offset: int,
    rules: ControllerConfig,
) -> Decision[BrokerHeartbeatReply]:
    """Raises STALE_BROKER_EPOCH. The session itself is renewed by `sessions.contacted`."""
    broker = current_broker(image, beat.broker_id, beat.broker_epoch)
    caught_up = has_caught_up(beat)
    if beat.want_shutdown:
        may_stop = may_shut_down(image, sessions, broker.id, committed_offset)
        return _shut_down(image, broker, caught_up, rules, may_stop=may_stop)
    if broker.fenced:
        if beat.want_fence or not caught_up:
            return Decision((), BrokerHeartbeatReply(caught_up, is_fenced=True))
        done = unfence_broker(image, broker.id, broker_epoch=broker.epoch, rules=rules)
        return Decision(done.records, BrokerHeartbeatReply(caught_up, is_fenced=False), done.unclean)
    if beat.want_fence:
        done = fence_broker(image, broker.id, rules=rules)
        return Decision(done.records, BrokerHeartbeatReply(caught_up, is_fenced=True), done.unclean)
    return Decision((), BrokerHeartbeatReply(caught_up, is_fenced=False))


def has_caught_up(beat: BrokerHeartbeat) -> bool:
    """Whether the broker has applied its own registration, and so knows its replicas and their leaders."""
    return beat.metadata_offset >= beat.broker_epoch


def _shut_down(
    image: ClusterImage, broker: BrokerState, caught_up: bool, rules: ControllerConfig, *, may_stop: bool
) -> Decision[BrokerHeartbeatReply]:
    if broker.fenced:
        return Decision((), BrokerHeartbeatReply(caught_up, is_fenced=True, should_shut_down=True))
    if not broker.in_controlled_shutdown:
        done = begin_shutdown(image, broker.id, rules=rules)
        return Decision(done.records, BrokerHeartbeatReply(caught_up, is_fenced=False), done.unclean)
    if not may_stop:
        return Decision((), BrokerHeartbeatReply(caught_up, is_fenced=False))
    done = fence_broker(image, broker.id, rules=rules)
    reply = BrokerHeartbeatReply(caught_up, is_fenced=True, should_shut_down=True)
    return Decision(done.records, reply, done.unclean)


def may_shut_down(image: ClusterImage, sessions: BrokerSessions, broker: int, committed_offset: int) -> bool:
    """Whether the broker leads no partition, and every active broker has applied the metadata that says so."""
    if leads_any_partition(image, broker):
        return False
    return sessions.all_have_applied(image, sessions.record_handover(broker, committed_offset))
