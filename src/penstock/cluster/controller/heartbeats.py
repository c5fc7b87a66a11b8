"""A broker's heartbeat: it is unfenced once it has caught up, fenced when it asks, let go when it leads nothing."""

from typing import NamedTuple

from penstock.cluster.controller.fencing import begin_shutdown, fence_broker, unfence_broker
from penstock.cluster.controller.leadership import current_broker, leads_something
from penstock.cluster.controller.rules import ControllerRules
from penstock.cluster.controller.sessions import BrokerSessions
from penstock.cluster.decision import Decision
from penstock.cluster.image import ClusterImage


class Heartbeat(NamedTuple):
    broker_id: int
    broker_epoch: int
    metadata_offset: int  # the last one it has applied
    want_fence: bool = False
    want_shutdown: bool = False


class HeartbeatReply(NamedTuple):
    """As things are once the records are applied."""

    is_caught_up: bool
    is_fenced: bool
    should_shut_down: bool = False


def heartbeat(
    image: ClusterImage,
    sessions: BrokerSessions,
    beat: Heartbeat,
    *,
    committed_offset: int,
    rules: ControllerRules,
) -> Decision[HeartbeatReply]:
    """Raises STALE_BROKER_EPOCH. The session itself is renewed by `sessions.contacted`."""
    broker = current_broker(image, beat.broker_id, beat.broker_epoch)
    caught_up = has_caught_up(beat)
    if beat.want_shutdown:
        return _shut_down(image, sessions, beat, committed_offset, rules)
    if broker.fenced:
        if beat.want_fence or not caught_up:
            return Decision((), HeartbeatReply(caught_up, is_fenced=True))
        done = unfence_broker(image, broker.id, broker_epoch=broker.epoch, rules=rules)
        return Decision(done.records, HeartbeatReply(caught_up, is_fenced=False), done.unclean)
    if beat.want_fence:
        done = fence_broker(image, broker.id, rules=rules)
        return Decision(done.records, HeartbeatReply(caught_up, is_fenced=True), done.unclean)
    return Decision((), HeartbeatReply(caught_up, is_fenced=False))


def has_caught_up(beat: Heartbeat) -> bool:
    """It has applied its own registration, so it knows what it holds and whom it may trust."""
    return beat.metadata_offset >= beat.broker_epoch


def _shut_down(
    image: ClusterImage,
    sessions: BrokerSessions,
    beat: Heartbeat,
    committed_offset: int,
    rules: ControllerRules,
) -> Decision[HeartbeatReply]:
    broker, caught_up = image.brokers[beat.broker_id], has_caught_up(beat)
    if broker.fenced:
        return Decision((), HeartbeatReply(caught_up, is_fenced=True, should_shut_down=True))
    if not broker.in_controlled_shutdown:
        done = begin_shutdown(image, broker.id, rules=rules)
        return Decision(done.records, HeartbeatReply(caught_up, is_fenced=False), done.unclean)
    if not may_leave(image, sessions, broker.id, committed_offset):
        return Decision((), HeartbeatReply(caught_up, is_fenced=False))
    done = fence_broker(image, broker.id, rules=rules)
    reply = HeartbeatReply(caught_up, is_fenced=True, should_shut_down=True)
    return Decision(done.records, reply, done.unclean)


def may_leave(image: ClusterImage, sessions: BrokerSessions, broker: int, committed_offset: int) -> bool:
    """It leads nothing, and all the others have heard who leads instead."""
    if leads_something(image, broker):
        return False
    return sessions.all_have_seen(image, sessions.handed_over(broker, committed_offset))
