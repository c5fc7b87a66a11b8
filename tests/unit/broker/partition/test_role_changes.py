"""Leader, follower and the change between them: no acknowledged record depends on a single replica."""

import inspect
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.broker.partition.flush_gate import FlushGate
from tests.unit.broker.partition.one_broker import (
    ME,
    OTHER,
    PEER,
    TOPIC_ID,
    Broker,
    broker_of_three,
    registration,
    turn,
)
from tests.unit.broker.raw_client import until

from penstock.broker.handlers import list_offsets
from penstock.broker.network.requests import RequestContext
from penstock.broker.partition.partition import ReplicaRole
from penstock.cluster.metadata_records import PartitionChangeRecord
from penstock.protocol.errors import ApiError, ErrorCode
from penstock.protocol.record_batch import Record, encode_batch


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with broker_of_three(tmp_path) as broker:
        yield broker


async def _latest(broker: Broker, version: int = 11, timestamp: int = -1) -> Any:
    part = SimpleNamespace(partition_index=0, current_leader_epoch=-1, timestamp=timestamp)
    request = SimpleNamespace(isolation_level=0, topics=(SimpleNamespace(name="t", partitions=(part,)),))
    ctx = RequestContext(broker, 2, version, "c", "h", "PLAINTEXT")  # type: ignore[arg-type]
    response = list_offsets.handle(ctx, request)
    # Only what has to be looked up in files is answered later.
    response = await response if inspect.isawaitable(response) else response
    return response.topics[0].partitions[0]


# -- leading ---------------------------------------------------------------------------------------------


async def test_acks_all_waits_for_every_replica_in_sync(broker: Broker) -> None:
    await broker.create()
    write = broker.produce()
    broker.fetch({0: 0}, replica=PEER), broker.fetch({0: 0}, replica=OTHER)
    assert not write.is_done
    broker.fetch({0: 1}, replica=PEER)
    assert not write.is_done
    broker.fetch({0: 1}, replica=OTHER)
    assert (write.produced.error_code, write.produced.base_offset) == (ErrorCode.none, 0)


async def test_acks_one_waits_for_no_replica_and_readers_see_only_committed_records(broker: Broker) -> None:
    await broker.create()
    assert broker.produce(acks=1).produced.error_code is ErrorCode.none
    unseen = broker.fetch({0: 0}).fetched[0]
    assert unseen.high_watermark == 0
    assert not unseen.records
    for replica in (PEER, OTHER):
        broker.fetch({0: 1}, replica=replica)
    seen = broker.fetch({0: 0}).fetched[0]
    assert seen.high_watermark == 1
    assert seen.records


async def test_the_leader_counts_only_for_what_it_has_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = FlushGate(monkeypatch)
    async with broker_of_three(tmp_path) as broker:
        await broker.create(configs={"penstock.flush": "ack"})
        gate.close()
        write = broker.produce()
        for replica in (PEER, OTHER):
            assert broker.fetch({0: 0}, replica=replica).fetched[0].records, "followers need not wait for it"
            broker.fetch({0: 1}, replica=replica)
        await turn()
        assert (write.is_done, broker.partition().high_watermark) == (False, 0)
        gate.open()
        assert (await write.done()).produced.error_code is ErrorCode.none


async def test_too_few_in_sync_take_no_acks_all_and_move_no_high_watermark(broker: Broker) -> None:
    await broker.create(isr=(ME, PEER), min_isr=2)
    first = broker.produce()
    await broker.change(isr=(ME,))
    assert broker.produce().produced.error_code is ErrorCode.not_enough_replicas
    assert broker.produce(acks=1).produced.error_code is ErrorCode.none
    assert (first.is_done, broker.partition().high_watermark) == (False, 0)
    broker.fetch({0: 2}, replica=PEER)
    await broker.change(isr=(ME, PEER))
    assert first.produced.error_code is ErrorCode.none


async def test_min_insync_replicas_above_the_number_of_replicas_asks_for_all_of_them(broker: Broker) -> None:
    await broker.create(replicas=(ME,), min_isr=3)
    assert broker.produce().produced.error_code is ErrorCode.none


async def test_the_high_watermark_is_found_among_many_unconfirmed_appends(broker: Broker) -> None:
    await broker.create(isr=(ME, PEER), replicas=(ME, PEER))
    writes = [broker.produce(bytes([number])) for number in range(10)]
    for reached in (3, 4, 9):
        broker.fetch({0: reached}, replica=PEER)
        assert [write.is_done for write in writes] == [number < reached for number in range(10)]
        seen = broker.fetch({0: reached - 1}).fetched[0]
        assert seen.high_watermark == reached
        assert len(seen.records) == broker.partition().log.size_bytes // 10, "exactly one batch"


async def test_a_replica_alone_is_a_leader_of_the_plain_kind(broker: Broker) -> None:
    await broker.create(replicas=(ME,))
    assert broker.partition().leading is None
    assert broker.produce().produced.error_code is ErrorCode.none
    await broker.change(replicas=(ME, PEER), adding_replicas=(PEER,))
    assert broker.produce().produced.error_code is ErrorCode.none, "who is still being added does not count"
    await broker.change(isr=(ME, PEER), adding_replicas=())
    write = broker.produce()
    assert not write.is_done
    broker.fetch({0: 3}, replica=PEER)
    assert write.produced.base_offset == 2
    await broker.change(replicas=(ME,), isr=(ME,))
    assert (broker.partition().leading, broker.produce().produced.base_offset) == (None, 3)


# -- new leaders -----------------------------------------------------------------------------------------


async def test_a_new_leader_tells_no_latest_offset_before_it_knows_what_was_committed(broker: Broker) -> None:
    await broker.create(leader=PEER, isr=(ME, OTHER))
    _replicate(broker, 5)
    broker.partition().follower_high_watermark(3)
    await broker.change(leader=ME)
    assert (await _latest(broker)).error_code is ErrorCode.offset_not_available
    assert (await _latest(broker, version=4)).error_code is ErrorCode.leader_not_available
    assert (await _latest(broker, timestamp=-2)).offset == 0
    assert broker.fetch({0: 0}).fetched[0].high_watermark == 3
    broker.fetch({0: 5}, replica=OTHER)
    latest = await _latest(broker)
    assert (latest.error_code, latest.offset) == (ErrorCode.none, 5)
    broker.produce(acks=1)
    assert (await _latest(broker)).offset == 5, "it does not wait for replicas"


async def test_leading_begins_when_a_truncation_under_way_has_ended(broker: Broker) -> None:
    await broker.create(leader=PEER)
    broker.fetchers.may_stop.clear()
    change = broker.spawn(broker.change(leader=ME))
    await turn()
    assert broker.partition().role is ReplicaRole.FOLLOWER
    broker.fetchers.may_stop.set()
    await change
    assert (broker.partition().role, broker.fetchers.following) == (ReplicaRole.LEADER, {})


async def test_an_unclean_election_is_counted_and_reported_with_offsets(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.create(leader=PEER)
    broker.partition().leaders_high_watermark = 7
    await broker.change(leader=ME, isr=(ME,), leader_recovery_state=1)
    assert broker.metrics.unclean_leaderships == 1
    (said,) = [vars(record) for record in caplog.records if "unclean" in record.message]
    assert (said["epoch_start_offset"], said["known_high_watermark"], said["known_lost"]) == (0, 7, 7)
    assert broker.produce().produced.error_code is ErrorCode.none


# -- losing leadership -----------------------------------------------------------------------------------


async def test_who_waits_is_sent_to_the_new_leader(broker: Broker) -> None:
    await broker.create()
    write, reader = broker.produce(), broker.fetch({0: 0}, max_wait_ms=60_000)
    follower = broker.fetch({0: 1}, replica=PEER, max_wait_ms=60_000)
    await broker.change(leader=PEER)
    refused = write.produced
    assert refused.error_code is ErrorCode.not_leader_or_follower
    assert (refused.current_leader.leader_id, refused.current_leader.leader_epoch) == (PEER, 6)
    for waiting in (reader, follower):
        part = (await waiting.done()).fetched[0]
        assert part.error_code is ErrorCode.not_leader_or_follower
        assert (part.current_leader.leader_id, part.current_leader.leader_epoch) == (PEER, 6)
        (endpoint,) = waiting.answer.node_endpoints
        assert (endpoint.node_id, endpoint.host, endpoint.port, endpoint.rack) == (
            2,
            "host-2",
            9092,
            "rack-2",
        )
    assert broker.fetchers.following == {("t", 0): (PEER, 6)}


async def test_a_leader_of_old_acknowledges_nothing(broker: Broker) -> None:
    await broker.create(isr=(ME, PEER))
    await broker.change(leader=PEER)
    outcome: list[ApiError | None] = []
    broker.partition().when_committed(-1, outcome.append)
    assert outcome[0] is not None, "not even what it once knew to be committed"
    assert outcome[0].code is ErrorCode.not_leader_or_follower
    refused = broker.produce()
    assert refused.produced.error_code is ErrorCode.not_leader_or_follower
    assert refused.produced.current_leader.leader_id == PEER
    assert [endpoint.node_id for endpoint in refused.answer.node_endpoints] == [PEER]
    assert (await _latest(broker)).error_code is ErrorCode.not_leader_or_follower


async def test_the_next_epoch_of_the_same_leader_keeps_its_promises(broker: Broker) -> None:
    await broker.create(isr=(ME, PEER))
    write = broker.produce()
    await broker.change(leader=ME)
    assert not write.is_done
    broker.fetch({0: 1}, replica=PEER, leader_epoch=5)
    assert not write.is_done, "the follower has not heard of the epoch yet"
    broker.fetch({0: 1}, replica=PEER)
    assert write.produced.error_code is ErrorCode.none


async def test_a_reader_that_waits_hears_of_a_new_epoch(broker: Broker) -> None:
    await broker.create()
    waiting = broker.fetch({0: 0}, max_wait_ms=60_000)
    await broker.change(leader=ME)
    part = (await waiting.done()).fetched[0]
    assert (part.error_code, part.current_leader.leader_epoch) == (ErrorCode.fenced_leader_epoch, 6)


async def test_who_missed_that_another_led_promises_nothing_from_before(broker: Broker) -> None:
    await broker.create(isr=(ME, PEER))
    write = broker.produce()
    changes = [
        PartitionChangeRecord(partition_id=0, topic_id=TOPIC_ID, leader=leader) for leader in (PEER, ME)
    ]
    await broker.apply(*changes)
    assert write.produced.error_code is ErrorCode.not_leader_or_follower


async def test_without_a_leader_nothing_is_fetched(broker: Broker) -> None:
    await broker.create(leader=PEER)
    await broker.change(leader=-1)
    assert (broker.partition().role, broker.fetchers.following) == (ReplicaRole.OFFLINE, {})
    refused = broker.produce().produced
    assert (refused.error_code, refused.current_leader.leader_id) == (ErrorCode.not_leader_or_follower, -1)


# -- assignment ------------------------------------------------------------------------------------------


async def test_a_replica_that_moved_away_takes_its_files_with_it(broker: Broker, tmp_path: Path) -> None:
    await broker.create(leader=PEER, partitions=2)
    await broker.change(replicas=(PEER, OTHER), isr=(PEER, OTHER))
    assert broker.partitions.get("t", 0) is None
    assert broker.produce().produced.error_code is ErrorCode.not_leader_or_follower
    await until(lambda: not list((tmp_path / "data").glob("t-0*")))
    assert (tmp_path / "data" / "t-1").is_dir()
    assert broker.fetchers.following == {("t", 1): (PEER, 5)}
    await broker.change(replicas=(PEER, ME), adding_replicas=(ME,))
    assert (broker.partition().log.end_offset, broker.partition().is_being_moved_here) == (0, True)


async def test_the_high_watermark_survives_a_restart(tmp_path: Path) -> None:
    async with broker_of_three(tmp_path) as broker:
        await broker.create(leader=PEER)
        _replicate(broker, 5)
        broker.partition().follower_high_watermark(3)
        state = broker.image
    for lost in (0, 3):
        broker = Broker(tmp_path)
        if lost:
            broker.store._offsets.high_watermarks["t", 0] = 99
        await broker.register(ME, PEER, OTHER)
        topic = state.topics["t"]
        await broker.create(leader=PEER, topic_id=topic.id)
        assert broker.partition().high_watermark == (5 if lost else 3), "never beyond the end of the log"
        await broker.close()


def _replicate(broker: Broker, count: int) -> None:
    """What a fetcher appends to a follower's log."""
    for offset in range(count):
        batch = encode_batch([Record(offset, 1, None, b"x")], base_offset=offset, leader_epoch=5)
        broker.partition().log.append_replicated(memoryview(batch), now_ms=1)


async def test_a_broker_that_registers_again_is_not_taken_for_its_past(broker: Broker) -> None:
    await broker.create(isr=(ME, PEER))
    write = broker.produce()
    await broker.apply(registration(PEER, 500))
    stale = broker.fetch({0: 1}, replica=PEER)
    assert (stale.fetched[0].error_code, write.is_done) == (ErrorCode.not_leader_or_follower, False)
    broker.fetch({0: 1}, replica=PEER, broker_epoch=500)
    assert write.is_done


async def test_the_high_watermark_is_saved_in_time_and_survives_a_crash(tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    async with broker_of_three(folder, replica_high_watermark_checkpoint_interval_ms="10") as broker:
        broker.housekeeping.start()
        await broker.create()
        broker.produce()
        for replica in (PEER, OTHER):
            broker.fetch({0: 1}, replica=replica)
        assert broker.partition().high_watermark == 1
        saved = folder / "data" / "replication-offset-checkpoint"
        await until(lambda: saved.exists() and "t 0 1" in saved.read_text())
        points = folder / "data" / "recovery-point-offset-checkpoint"
        assert not points.exists() or "t 0" not in points.read_text(), "they have an interval of their own"
        shutil.copytree(folder / "data", tmp_path / "crashed" / "data")
    async with broker_of_three(tmp_path / "crashed") as broker:
        await broker.create(leader=PEER)
        assert broker.partition().high_watermark == 1
