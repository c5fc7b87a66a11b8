"""Consumers that read from a follower in their rack (KIP-392): how they are redirected, and what they read."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.broker.partition.one_broker import (
    BROKER_EPOCH,
    ME,
    OTHER,
    PEER,
    Broker,
    broker_of_three,
    registration,
    turn,
)

from penstock.protocol.errors import ErrorCode

NOBODY = -1


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """The racks are named after the brokers: rack-1, rack-2, rack-3."""
    async with broker_of_three(tmp_path) as broker:
        broker.selects_replicas = True
        yield broker


def followed(broker: Broker, replica: int, offset: int) -> int:
    return broker.fetch({0: offset}, replica=replica).answer.session_id  # type: ignore[no-any-return]


def preferred(broker: Broker, rack: str, offset: int = 0) -> int:
    answer = broker.fetch({0: offset}, rack=rack, max_wait_ms=60_000).fetched[0]
    assert answer.error_code is ErrorCode.none
    assert not (answer.preferred_read_replica > NOBODY and answer.records)
    return answer.preferred_read_replica  # type: ignore[no-any-return]


async def test_a_leader_names_the_follower_in_the_consumers_rack(broker: Broker) -> None:
    await broker.create()
    broker.produce(acks=1)
    for replica in (PEER, OTHER):
        followed(broker, replica, 0)
        followed(broker, replica, 1)
    assert broker.partition().high_watermark == 1
    assert preferred(broker, "rack-2") == PEER
    assert preferred(broker, "rack-3") == OTHER
    for rack in ("", "rack-1", "nowhere"):
        answer = broker.fetch({0: 0}, rack=rack).fetched[0]
        assert (answer.preferred_read_replica, len(answer.records) > 0) == (NOBODY, True), rack


async def test_a_session_is_told_again_whenever_it_comes_back(broker: Broker) -> None:
    await broker.create()
    followed(broker, PEER, 0)
    session = broker.fetch({0: 0}, rack="rack-2").answer.session_id
    for epoch in (1, 2):
        told = broker.fetch(session=(session, epoch), rack="rack-2", max_wait_ms=60_000)
        assert told.fetched[0].preferred_read_replica == PEER


async def test_only_followers_that_can_serve_are_named(broker: Broker) -> None:
    await broker.create(isr=(ME, PEER))
    broker.produce(acks=1)
    assert broker.fetch({0: 0}, rack="rack-2").fetched[0].preferred_read_replica == NOBODY, "not heard of yet"
    followed(broker, PEER, 1)
    followed(broker, OTHER, 1)
    broker.produce(acks=1)
    assert preferred(broker, "rack-2", 1) == PEER
    assert broker.fetch({0: 2}, rack="rack-2").fetched[0].preferred_read_replica == NOBODY, "not there yet"
    assert broker.fetch({0: 1}, rack="rack-3").fetched[0].preferred_read_replica == NOBODY, "not in sync"


async def racks(broker: Broker, **racks: str) -> None:
    """Where brokers are, `b1` and so on."""
    await broker.apply(
        *(
            registration(int(name[1:]), BROKER_EPOCH + int(name[1:]), rack=rack)
            for name, rack in racks.items()
        )
    )


async def test_a_consumer_in_the_leaders_rack_stays_with_the_leader(broker: Broker) -> None:
    await racks(broker, b1="north", b2="north", b3="south")
    await broker.create()
    broker.produce(acks=1)
    for replica in (PEER, OTHER):
        followed(broker, replica, 1)
    answer = broker.fetch({0: 0}, rack="north").fetched[0]
    assert (answer.preferred_read_replica, len(answer.records) > 0) == (NOBODY, True)
    assert preferred(broker, "south") == OTHER


@pytest.mark.parametrize("ahead", [PEER, OTHER])
async def test_of_two_followers_in_a_rack_the_one_that_has_more_is_named(broker: Broker, ahead: int) -> None:
    await racks(broker, b1="north", b2="south", b3="south")
    await broker.create()
    for _ in range(2):
        broker.produce(acks=1)
    for replica in (PEER, OTHER):
        followed(broker, replica, 2 if replica == ahead else 1)
    assert preferred(broker, "south") == ahead


async def test_without_a_selector_the_leader_serves_and_followers_do_not(broker: Broker) -> None:
    broker.selects_replicas = False
    await broker.create()
    followed(broker, PEER, 0)
    assert broker.fetch({0: 0}, rack="rack-2").fetched[0].preferred_read_replica == NOBODY
    await broker.change(leader=PEER)
    assert broker.fetch({0: 0}, rack="rack-1").fetched[0].error_code is ErrorCode.not_leader_or_follower


async def test_a_follower_serves_up_to_its_high_watermark(broker: Broker) -> None:
    await broker.create()
    partition = broker.partition()
    for _ in range(4):
        broker.produce(acks=1)
    batch_bytes = partition.log.size_bytes // 4
    await broker.change(leader=PEER)
    assert not partition.is_leader

    def read(offset: int, isolation: int = 0) -> tuple[ErrorCode, int, int]:
        answer = broker.fetch({0: offset}, rack="rack-1", isolation=isolation).fetched[0]
        return answer.error_code, answer.high_watermark, len(answer.records) // batch_bytes

    assert read(0) == (ErrorCode.none, 0, 0)
    partition.follower_high_watermark(3)
    assert read(0) == read(0, isolation=1) == (ErrorCode.none, 3, 3)
    assert read(2) == (ErrorCode.none, 3, 1)
    assert read(4) == (ErrorCode.none, 3, 0), "not called committed yet, but here"
    assert read(5)[0] is ErrorCode.offset_out_of_range
    epoch = partition.leader_epoch
    for asked, error in (
        (epoch - 1, ErrorCode.fenced_leader_epoch),
        (epoch + 1, ErrorCode.unknown_leader_epoch),
    ):
        assert broker.fetch({0: 0}, rack="rack-1", leader_epoch=asked).fetched[0].error_code is error


async def test_a_consumer_waits_at_a_follower_for_its_high_watermark(broker: Broker) -> None:
    await broker.create()
    partition = broker.partition()
    for _ in range(2):
        broker.produce(acks=1)
    await broker.change(leader=PEER)
    waiting = broker.fetch({0: 0}, rack="rack-1", max_wait_ms=60_000)
    await turn()
    assert not waiting.is_done
    partition.follower_high_watermark(1)
    await turn()
    assert waiting.fetched[0].records
    assert waiting.fetched[0].high_watermark == 1
