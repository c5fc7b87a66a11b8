"""Broker sessions expire, heartbeats unfence, and controlled shutdown waits until no leader is left."""

import pytest
from tests.unit.cluster.clusters import CONTROLLER, applied, broker, cluster, create, fence, register

from penstock.cluster.controller.create_topics import NewTopic
from penstock.cluster.controller.heartbeats import (
    BrokerHeartbeat,
    BrokerHeartbeatReply,
    BrokerSessions,
    heartbeat,
)
from penstock.cluster.image import ClusterImage
from penstock.protocol.errors import ApiError, ErrorCode


def beat(
    image: ClusterImage,
    broker_id: int,
    *,
    sessions: BrokerSessions | None = None,
    epoch: int | None = None,
    seen: int = 100,
    committed: int = 100,
    fence: bool = False,
    shutdown: bool = False,
) -> BrokerHeartbeatReply:
    epoch = image.brokers[broker_id].epoch if epoch is None else epoch
    sent = BrokerHeartbeat(broker_id, epoch, seen, want_fence=fence, want_shutdown=shutdown)
    sessions = sessions or BrokerSessions(session_timeout_ms=1000)
    sessions.contacted(broker_id, epoch, 0, metadata_offset=seen)
    decision = heartbeat(image, sessions, sent, committed_offset=committed, rules=CONTROLLER)
    return applied(image, decision).reply


def test_a_broker_is_unfenced_once_it_has_seen_its_own_registration() -> None:
    image = ClusterImage()
    register(image, broker(1), epoch=7)
    assert beat(image, 1, seen=6) == BrokerHeartbeatReply(is_caught_up=False, is_fenced=True)
    assert beat(image, 1, seen=7, fence=True) == BrokerHeartbeatReply(is_caught_up=True, is_fenced=True)
    assert image.brokers[1].fenced
    assert beat(image, 1, seen=7) == BrokerHeartbeatReply(is_caught_up=True, is_fenced=False)
    assert image.brokers[1].is_active


def test_a_broker_may_ask_to_be_fenced() -> None:
    image = cluster(2)
    create(image, NewTopic(name="t", assignments=((0, (1, 2)),)))
    assert beat(image, 1, fence=True).is_fenced
    assert image.topics["t"].partitions[0].leader == 2


def test_a_quiet_beat_costs_no_record() -> None:
    image = cluster()
    sent = BrokerHeartbeat(1, 1, 5)
    sessions = BrokerSessions(session_timeout_ms=1000)
    assert heartbeat(image, sessions, sent, committed_offset=5, rules=CONTROLLER).records == ()


@pytest.mark.parametrize(("broker_id", "epoch"), [(1, 0), (2, 1)])
def test_a_replaced_or_unknown_broker_is_told_so(broker_id: int, epoch: int) -> None:
    with pytest.raises(ApiError) as refused:
        beat(cluster(), broker_id, epoch=epoch)
    assert refused.value.code is ErrorCode.stale_broker_epoch


def test_a_broker_leaves_when_it_leads_nothing_and_all_others_know() -> None:
    image, sessions = cluster(3), BrokerSessions(session_timeout_ms=1000)
    create(image, NewTopic(name="t", assignments=((0, (1, 2)),)))
    sessions.elected(image, 0)
    assert not beat(image, 1, sessions=sessions, shutdown=True).should_shut_down
    assert image.brokers[1].in_controlled_shutdown
    assert image.topics["t"].partitions[0].leader == 2
    for other, seen in ((2, 120), (3, 119)):
        beat(image, other, sessions=sessions, seen=seen)
    waiting = beat(image, 1, sessions=sessions, shutdown=True, committed=120)
    assert waiting == BrokerHeartbeatReply(is_caught_up=True, is_fenced=False, should_shut_down=False)
    beat(image, 3, sessions=sessions, seen=120)
    # Later metadata is not waited for.
    leaving = beat(image, 1, sessions=sessions, shutdown=True, committed=130)
    assert leaving == BrokerHeartbeatReply(is_caught_up=True, is_fenced=True, should_shut_down=True)
    assert image.brokers[1].fenced


def test_a_lone_broker_may_leave_too() -> None:
    image = cluster()
    create(image, NewTopic(name="t", assignments=((0, (1,)),)))
    beat(image, 1, shutdown=True)
    assert image.topics["t"].partitions[0].elr == (1,)
    assert beat(image, 1, shutdown=True).should_shut_down


def test_a_fenced_broker_may_stop_at_once() -> None:
    image = cluster(2)
    fence(image, 1)
    assert beat(image, 1, shutdown=True).should_shut_down


# --- sessions ---


def test_silence_ends_a_session() -> None:
    image, sessions = cluster(2), BrokerSessions(session_timeout_ms=1000)
    sessions.elected(image, 0)
    sessions.contacted(2, 2, 600)
    assert sessions.expired(image, 999) == []
    assert sessions.next_deadline_ms() == 1000
    assert sessions.expired(image, 1000) == [1]
    fence(image, 1)
    assert sessions.expired(image, 1599) == []
    assert sessions.expired(image, 1600) == [2]
    assert sessions.silent_ms(2, 1600) == 1000


def test_the_leader_before_us_has_been_silent_for_a_while() -> None:
    image, sessions = cluster(2), BrokerSessions(session_timeout_ms=1000, fetch_timeout_ms=400)
    sessions.elected(image, 5000, deposed=2)
    assert sessions.silent_ms(2, 5000) == 400
    assert sessions.expired(image, 5600) == [2]
    assert sessions.expired(image, 6000) == [1, 2]


def test_an_earlier_incarnation_keeps_no_session_alive() -> None:
    image, sessions = cluster(1), BrokerSessions(session_timeout_ms=1000)
    sessions.contacted(1, 1, 0)
    sessions.contacted(1, 0, 900, metadata_offset=50)
    assert sessions.expired(image, 1000) == [1]
    assert not sessions.all_have_applied(image, 50)


def test_a_broker_that_was_never_heard_gets_its_time() -> None:
    image, sessions = cluster(1), BrokerSessions(session_timeout_ms=1000)
    assert sessions.next_deadline_ms() is None
    assert sessions.silent_ms(1, 500) == 0
    assert sessions.expired(image, 500) == []
    assert sessions.expired(image, 1500) == [1]


def test_a_broker_that_registers_again_starts_a_session() -> None:
    image, sessions = cluster(1), BrokerSessions(session_timeout_ms=1000)
    sessions.contacted(1, 1, 0, metadata_offset=80)
    register(image, broker(1, incarnation=1), epoch=9, silent_ms=None)
    beat(image, 1, seen=9)
    assert sessions.expired(image, 1200) == []
    assert not sessions.all_have_applied(image, 80), "what its predecessor had seen does not count"


def test_a_broker_whose_connection_has_closed_has_two_heartbeats_to_report_again() -> None:
    image = cluster(3)
    sessions = BrokerSessions(session_timeout_ms=9000, heartbeat_interval_ms=700)
    sessions.elected(image, 0)
    for each in (1, 2, 3):
        sessions.contacted(each, each, 1000)
        sessions.connection_lost(each, each - (each == 3), 1500)  # the third's was of an earlier life
    assert sessions.next_deadline_ms() == 2900
    sessions.contacted(2, 2, 2800)
    assert sessions.expired(image, 2899) == []
    assert sessions.expired(image, 2900) == [1]
    assert sessions.expired(image, 10_000) == [1, 3]


@pytest.mark.parametrize(("heartbeat_ms", "timeout_ms", "ends_ms"), [(100, 9000, 1000), (700, 500, 500)])
def test_a_closed_connection_leaves_a_second_but_never_prolongs(
    heartbeat_ms: int, timeout_ms: int, ends_ms: int
) -> None:
    image = cluster(1)
    sessions = BrokerSessions(session_timeout_ms=timeout_ms, heartbeat_interval_ms=heartbeat_ms)
    sessions.elected(image, 0)
    sessions.connection_lost(1, 1, 0)
    sessions.connection_lost(1, 1, 400)
    assert (sessions.expired(image, ends_ms - 1), sessions.expired(image, ends_ms)) == ([], [1])


def test_a_pause_of_the_controller_is_no_silence() -> None:
    image = cluster(3)
    sessions = BrokerSessions(session_timeout_ms=9000, heartbeat_interval_ms=700)
    sessions.elected(image, 0)
    sessions.connection_lost(2, 2, 500)
    sessions.contacted(3, 3, 8000)  # its heartbeat was read before the pause was noticed
    sessions.paused(7000, 8000)
    assert sessions.expired(image, 8899) == []
    assert sessions.expired(image, 8900) == [2]
    assert sessions.expired(image, 16_000) == [1, 2]
    assert sessions.expired(image, 17_000) == [1, 2, 3]


def test_a_connection_that_closed_during_a_pause_has_the_usual_time() -> None:
    image = cluster(1)
    sessions = BrokerSessions(session_timeout_ms=9000, heartbeat_interval_ms=700)
    sessions.elected(image, 0)
    sessions.connection_lost(1, 1, 5000)
    sessions.paused(5000, 5000)
    assert (sessions.expired(image, 6399), sessions.expired(image, 6400)) == ([], [1])
