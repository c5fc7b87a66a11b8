"""Fetches of followers: what they get, what counts as progress, when they wake, and what many partitions cost."""

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.partition.one_broker import ME, OTHER, PEER, Broker, broker_of_three, turn

from penstock.broker.partition.fetch_reader import FetchReader
from penstock.broker.partition.leader_replica import monotonic_ms
from penstock.protocol.errors import ErrorCode


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with broker_of_three(tmp_path) as broker:
        yield broker


def _session(broker: Broker, offsets: dict[int, int], replica: int = PEER) -> int:
    opened = broker.fetch(offsets, replica=replica).answer
    assert (opened.error_code, opened.session_id > 0) == (ErrorCode.none, True)
    return opened.session_id  # type: ignore[no-any-return]


async def test_followers_read_to_the_end_and_consumers_to_the_high_watermark(broker: Broker) -> None:
    await broker.create()
    broker.produce(acks=1), broker.produce(acks=1)
    follower = broker.fetch({0: 0}, replica=PEER).fetched[0]
    assert (follower.high_watermark, len(follower.records)) == (0, broker.partition().log.size_bytes)
    assert not broker.fetch({0: 0}).fetched[0].records
    assert broker.metrics.topics["t"].replica_bytes_out == len(follower.records)
    assert broker.metrics.topics["t"].bytes_out == 0


async def test_a_follower_that_waits_is_woken_by_an_append(broker: Broker) -> None:
    await broker.create()
    session = _session(broker, {0: 0})
    waiting = broker.fetch(replica=PEER, session=(session, 1), max_wait_ms=60_000)
    consumer = broker.fetch({0: 0}, max_wait_ms=60_000)
    broker.produce(acks=1)
    await turn()
    assert waiting.fetched[0].records
    assert not consumer.is_done, "nothing is committed yet"


async def test_a_follower_that_waits_hears_of_the_high_watermark_and_then_has_peace(broker: Broker) -> None:
    await broker.create()
    session = _session(broker, {0: 0})
    broker.produce(acks=1)
    assert broker.fetch(replica=PEER, session=(session, 1)).fetched[0].records
    waiting = broker.fetch({0: 1}, replica=PEER, session=(session, 2), max_wait_ms=60_000)
    broker.fetch({0: 1}, replica=OTHER)
    assert not waiting.is_done, "it is told soon, and not at once"
    told = (await waiting.done()).fetched[0]
    assert (told.high_watermark, bool(told.records)) == (1, False)
    idle = broker.fetch(replica=PEER, session=(session, 3), max_wait_ms=60_000)
    other = broker.fetch({0: 1}, replica=OTHER, max_wait_ms=60_000)
    await turn()
    assert (idle.is_done, other.is_done, broker.partition().high_watermark) == (False, False, 1)


async def test_a_follower_that_repeats_its_position_is_told_the_high_watermark_again(broker: Broker) -> None:
    """It gave up a request whose answer was on its way: the session must not take it for heard."""
    await broker.create(isr=(ME, PEER))
    session = _session(broker, {0: 0})
    broker.produce(acks=1)
    assert broker.fetch(replica=PEER, session=(session, 1)).fetched[0].records
    unseen = broker.fetch({0: 1}, replica=PEER, session=(session, 2))
    assert unseen.fetched[0].high_watermark == 1
    assert not broker.fetch(replica=PEER, session=(session, 3)).fetched, "it has been told"
    assert broker.fetch({0: 1}, replica=PEER, session=(session, 4)).fetched[0].high_watermark == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"leader_epoch": 4}, ErrorCode.fenced_leader_epoch),
        ({"leader_epoch": 6}, ErrorCode.unknown_leader_epoch),
        ({"replica": 9}, ErrorCode.unknown_leader_epoch),
        ({"replica": 9, "leader_epoch": -1}, ErrorCode.not_leader_or_follower),
        ({"broker_epoch": 3}, ErrorCode.not_leader_or_follower),
        ({"offsets": {0: 2}}, ErrorCode.offset_out_of_range),
    ],
)
async def test_a_fetch_that_is_refused_counts_for_nothing(
    broker: Broker, change: dict[str, Any], error: ErrorCode
) -> None:
    await broker.create(isr=(ME, PEER))
    write = broker.produce()
    asked: dict[str, Any] = {"offsets": {0: 1}, "replica": PEER} | change
    assert broker.fetch(**asked).fetched[0].error_code is error
    assert not write.is_done
    broker.fetch({0: 1}, replica=PEER)
    assert write.is_done


async def test_a_follower_that_names_no_epoch_gets_records_and_counts_for_nothing(broker: Broker) -> None:
    await broker.create(isr=(ME, PEER))
    write = broker.produce()
    assert broker.fetch({0: 0}, replica=PEER, leader_epoch=-1).fetched[0].records
    broker.fetch({0: 1}, replica=PEER, leader_epoch=-1)
    assert not write.is_done


async def test_a_follower_of_another_history_is_told_where_to_cut_and_counts_for_nothing(
    broker: Broker,
) -> None:
    await broker.create(isr=(ME, PEER))
    broker.produce(acks=1)
    await broker.change(leader=ME)
    write = broker.produce()
    parted = broker.fetch({0: 2}, replica=PEER, last_epoch=5).fetched[0]
    assert (parted.diverging_epoch.epoch, parted.diverging_epoch.end_offset) == (5, 1)
    assert (write.is_done, broker.partition().high_watermark) == (False, 0)
    broker.fetch({0: 2}, replica=PEER, last_epoch=6)
    assert write.is_done


async def test_a_follower_that_has_cut_its_log_is_told_the_high_watermark_again(broker: Broker) -> None:
    """It has ignored the one that came with the place where to cut."""
    await broker.create(isr=(ME, PEER))
    broker.produce(acks=1)
    session = _session(broker, {0: 1})
    parted = broker.fetch({0: 2}, replica=PEER, session=(session, 1), last_epoch=5).fetched[0]
    assert (parted.diverging_epoch.end_offset, parted.high_watermark) == (1, 1)
    # The cut leaves it with all that is committed, so no records come that would bring the high watermark.
    again = broker.fetch({0: 1}, replica=PEER, session=(session, 2), last_epoch=5).fetched[0]
    assert (again.high_watermark, bool(again.records)) == (1, False)


async def test_an_idle_follower_that_keeps_polling_stays_in_sync(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.create(isr=(ME, PEER))
    session = _session(broker, {0: 0})
    clock = monotonic_ms()
    monkeypatch.setattr("penstock.broker.partition.leader_replica.monotonic_ms", lambda: clock)
    monkeypatch.setattr("penstock.broker.partition.alter_partition_manager.monotonic_ms", lambda: clock)
    for epoch in range(1, 21):
        clock += 1_000
        assert broker.fetch(replica=PEER, session=(session, epoch)).fetched == {}
        broker.isr.look_at(broker.partitions)
    broker.produce(acks=1)
    clock += 500
    broker.isr.look_at(broker.partitions)
    await turn()
    assert not broker.controller.requests, "it was heard of a moment ago"
    clock += 11_000
    broker.isr.look_at(broker.partitions)
    await turn()
    assert len(broker.controller.requests) == 1, "and now it has been silent for too long"


async def test_another_replica_cannot_go_on_with_a_session(broker: Broker) -> None:
    await broker.create()
    session = _session(broker, {0: 0})
    for stranger in (OTHER, -1):
        refused = broker.fetch(replica=stranger, session=(session, 1)).answer
        assert refused.error_code is ErrorCode.fetch_session_id_not_found


async def test_a_poll_looks_only_at_partitions_with_news(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.create(partitions=50, replicas=(ME,))
    session = _session(broker, dict.fromkeys(range(50), 0), replica=-1)
    looked_at: list[int] = []
    real = FetchReader.read

    def read(reads: FetchReader, key: Any, *args: Any, **options: Any) -> Any:
        looked_at.append(key[1])
        return real(reads, key, *args, **options)

    monkeypatch.setattr(FetchReader, "read", read)
    assert broker.fetch(session=(session, 1)).fetched == {}
    assert looked_at == []
    waiting = broker.fetch(session=(session, 2), max_wait_ms=60_000)
    broker.produce(index=7)
    await turn()
    assert (set(waiting.fetched), looked_at) == ({7}, [7])
    assert set(broker.fetch(session=(session, 3)).fetched) == {7}, (
        "until the reader goes on, it gets it again"
    )
    assert broker.fetch({7: 1}, session=(session, 4)).fetched == {}
    looked_at.clear()
    assert broker.fetch(session=(session, 5)).fetched == {}
    assert looked_at == []


async def test_what_did_not_fit_is_news_until_it_was_read(broker: Broker) -> None:
    await broker.create(partitions=3, replicas=(ME,))
    session = _session(broker, dict.fromkeys(range(3), 0), replica=-1)
    for index in range(3):
        broker.produce(bytes(1000), index=index)
    broker.fetch_bytes_max = 1
    served = []
    for epoch in (1, 2, 3):
        answer = broker.fetch(session=(session, epoch)).fetched
        served += [index for index, part in answer.items() if part.records]
    assert served == [0, 1, 2]


async def test_the_start_of_a_log_is_news(broker: Broker) -> None:
    await broker.create(replicas=(ME,))
    broker.produce(), broker.produce()
    session = _session(broker, {0: 2}, replica=-1)
    broker.partition().log.delete_records_before(1)
    broker.partition().start_moved()
    assert broker.fetch(session=(session, 1)).fetched[0].log_start_offset == 1
    assert broker.fetch(session=(session, 2)).fetched == {}


async def test_a_session_that_ends_lets_go_of_its_partitions(broker: Broker) -> None:
    await broker.create()
    for replica, waiters in ((-1, broker.partition()._fetch_waiters), (PEER, broker.partition().followers)):
        session = _session(broker, {0: 0}, replica=replica)
        assert len(waiters) == 1
        broker.fetch({0: 0}, replica=replica, session=(session, -1))
        assert not waiters


class _Waiter:
    def __init__(self, woken: list[object]) -> None:
        self._woken = woken

    def bytes_arrived(self, count: int) -> None:
        self._woken.append(self)

    def high_watermark_moved(self) -> None:
        self._woken.append(self)

    def fetch_state(self, leader_epoch: int) -> None:
        return None


@pytest.mark.parametrize("kind", ["reader", "follower"])
async def test_waiters_wake_in_the_order_in_which_they_came(broker: Broker, kind: str) -> None:
    await broker.create()
    partition = broker.partition()
    woken: list[object] = []
    waiters = [_Waiter(woken) for _ in range(50)]
    random.Random(1).shuffle(waiters)  # or memory addresses would be in this order too
    for waiter in waiters:
        partition.watch(waiter) if kind == "reader" else partition.add_follower(waiter)
    partition.start_moved()
    assert woken == waiters


async def test_a_throttled_leader_sends_within_its_rate_to_who_is_not_in_sync(broker: Broker) -> None:
    await broker.create(isr=(ME, OTHER))
    partition = broker.partition()
    for _ in range(10):
        broker.produce(acks=1)
    batch_bytes = partition.log.size_bytes // 10

    def sent(replica: int, offset: int = 0) -> int:
        answer = broker.fetch({0: offset}, replica=replica).fetched[0]
        assert answer.error_code is ErrorCode.none
        return len(answer.records)

    broker.leader_rate = 0
    assert sent(PEER) == 10 * batch_bytes, "only what a topic names is throttled"
    partition.is_leader_throttled = True
    assert sent(PEER) == 0
    assert sent(OTHER) == 10 * batch_bytes, "it is in sync"
    broker.leader_rate = 3 * batch_bytes
    assert sent(PEER) == 3 * batch_bytes
    assert sent(PEER, 3) == 0
    for _ in range(4):
        broker.throttle_clock_s += 0.5
        assert sent(PEER, 3) <= 2 * batch_bytes, "what half a second brings, and the rest of a batch"
    broker.leader_rate = -1
    assert sent(PEER, 3) == 7 * batch_bytes


async def test_a_throttled_follower_is_given_the_rest_when_there_is_room_again(broker: Broker) -> None:
    await broker.create(isr=(ME,))
    partition = broker.partition()
    broker.produce(acks=1)
    partition.is_leader_throttled, broker.leader_rate = True, 0
    session = _session(broker, {0: 0})
    assert not broker.fetch(replica=PEER, session=(session, 1)).fetched
    broker.leader_rate = 1_000_000
    assert broker.fetch(replica=PEER, session=(session, 2)).fetched[0].records
