"""Broker heartbeats and sessions: brokers are fenced, unfenced, shut down and unregistered, and leadership follows.

The active controller keeps a session per broker, which is soft state: a new controller starts with fresh sessions.
A broker is unfenced once it has caught up, fenced when it requests it, and may shut down once it leads no partition.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Final, NamedTuple

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


#: A live broker has at least this long to report over a new connection, even with a shorter heartbeat interval.
_RECONNECT_MS_MIN: Final = 1000


class _Session:
    __slots__ = ("cut_ms", "epoch", "handed_over_at", "heard_ms", "metadata_offset")

    def __init__(self, epoch: int, heard_ms: int, metadata_offset: int = -1) -> None:
        self.epoch = epoch
        self.heard_ms = heard_ms
        self.metadata_offset = metadata_offset
        #: The session ends at this time, before its timeout, because the connection of the heartbeats has closed.
        self.cut_ms: int | None = None
        #: The metadata offset at which the controller first saw that this broker leads no partition.
        self.handed_over_at: int | None = None

    def __repr__(self) -> str:
        return f"<epoch {self.epoch}, heard at {self.heard_ms} ms>"

    def ends_ms(self, timeout_ms: int) -> int:
        silent = self.heard_ms + timeout_ms
        return silent if self.cut_ms is None else min(silent, self.cut_ms)


class BrokerSessions:
    """Finds the brokers to fence: those that have been silent for longer than the session timeout."""

    __slots__ = ("_fetch_timeout_ms", "_reconnect_ms", "_sessions", "_timeout_ms")

    def __init__(
        self, *, session_timeout_ms: int, fetch_timeout_ms: int = 0, heartbeat_interval_ms: int = 0
    ) -> None:
        self._timeout_ms = session_timeout_ms
        self._reconnect_ms = max(2 * heartbeat_interval_ms, _RECONNECT_MS_MIN)
        self._fetch_timeout_ms = fetch_timeout_ms
        self._sessions: dict[int, _Session] = {}

    def __repr__(self) -> str:
        return f"<BrokerSessions {self._sessions}>"

    def elected(self, image: ClusterImage, now_ms: int, deposed: int | None = None) -> None:
        """Gives every broker a fresh session.

        The previous controller, `deposed`, starts with the silence that it took to replace it: the fetch timeout.
        """
        self._sessions.clear()
        for broker in image.brokers.values():
            silent_ms = self._fetch_timeout_ms if broker.id == deposed else 0
            self._sessions[broker.id] = _Session(broker.epoch, now_ms - silent_ms)

    def contacted(self, broker: int, epoch: int, now_ms: int, *, metadata_offset: int = -1) -> None:
        """`metadata_offset` is the last one that the broker has applied. A report of an earlier epoch is ignored."""
        session = self._sessions.get(broker)
        if session is None or session.epoch < epoch:
            self._sessions[broker] = _Session(epoch, now_ms, metadata_offset)
        elif session.epoch == epoch:
            session.heard_ms = max(session.heard_ms, now_ms)
            session.cut_ms = None
            session.metadata_offset = max(session.metadata_offset, metadata_offset)

    def paused(self, lasted_ms: int, now_ms: int) -> None:
        """The controller's process did not run for this long until now, so it could not hear any broker."""
        for session in self._sessions.values():
            session.heard_ms = min(session.heard_ms + lasted_ms, now_ms)
            if session.cut_ms is not None:
                session.cut_ms = min(session.cut_ms + lasted_ms, now_ms + self._reconnect_ms)

    def connection_lost(self, broker: int, epoch: int, now_ms: int) -> None:
        """The connection that the broker reports over has closed: its process has probably ended.

        A live broker reports over a new connection within two heartbeats, so its session ends after that time.
        """
        session = self._sessions.get(broker)
        if session is not None and session.epoch == epoch and session.cut_ms is None:
            session.cut_ms = now_ms + self._reconnect_ms

    def expired(self, image: ClusterImage, now_ms: int) -> list[int]:
        """Returns the unfenced brokers whose session has expired. A broker without a session gets one now."""
        for broker in image.brokers.values():
            session = self._sessions.get(broker.id)
            if session is None or session.epoch < broker.epoch:
                self._sessions[broker.id] = _Session(broker.epoch, now_ms)
        for gone in self._sessions.keys() - image.brokers.keys():
            del self._sessions[gone]
        return [
            broker.id
            for broker in image.brokers.values()
            if not broker.fenced and now_ms >= self._sessions[broker.id].ends_ms(self._timeout_ms)
        ]

    def silent_ms(self, broker: int, now_ms: int) -> int:
        """Returns 0 for a broker without a session: it is unknown how long it has been silent."""
        session = self._sessions.get(broker)
        return 0 if session is None else now_ms - session.heard_ms

    def next_deadline_ms(self) -> int | None:
        """Returns when the next session may expire. Fenced brokers count too, which costs only an extra check."""
        return min((s.ends_ms(self._timeout_ms) for s in self._sessions.values()), default=None)

    def record_handover(self, broker: int, offset: int) -> int:
        """Remembers and returns the first offset at which the broker led no partition."""
        session = self._sessions.get(broker)
        if session is None:
            return offset
        if session.handed_over_at is None:
            session.handed_over_at = offset
        return session.handed_over_at

    def all_have_applied(self, image: ClusterImage, offset: int) -> bool:
        """Whether every active broker has applied the metadata up to this offset."""
        return all(
            broker.id in self._sessions and self._sessions[broker.id].metadata_offset >= offset
            for broker in image.active_brokers()
        )


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
